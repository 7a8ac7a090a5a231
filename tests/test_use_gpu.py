"""What users ask of a GPU beside a plain registration: the doctor, guide points, rigid regions, and inverses.

pytest -m gpu tests/test_use_gpu.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("SimpleITK")
from test_guide import missed, model, pair, points  # noqa: F401
from test_rigid_regions import SPACING, grid_points, missing_rigidity, scans  # noqa: F401

from carlreg import Identity, optimize_fields, register
from carlreg.cli import main
from carlreg.files.images import Image
from carlreg.files.world_transform import WorldTransform, invert, jacobian_determinant, to_world
from carlreg.geometry.jacobian import folding
from carlreg.geometry.transforms import DisplacementField
from carlreg.objective.guide import Guide
from carlreg.objective.rigidity import Rigidity

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
Scans = tuple[Image, Image, Image, Image]


def test_the_doctor_finds_the_gpu_and_right_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["GPU"]["state"] == "green"
    assert torch.cuda.get_device_name(0) in found["GPU"]["text"]
    kernels = {name: one for name, one in found.items() if name.startswith("kernel")}
    assert {one["state"] for one in kernels.values()} <= {"green", "note"}, kernels
    assert found["ITK"]["state"] == "green"


def test_guide_points_pull_on_a_gpu_as_on_a_cpu(
    pair: tuple[Image, Image],  # noqa: F811
    points: tuple[np.ndarray, np.ndarray],  # noqa: F811
    model: Path,  # noqa: F811
) -> None:
    options: dict[str, Any] = {"guide": points, "model": model, "io_iterations": 5, "io_sim": "lncc"}
    there, here = (register(fixed=pair[0], moving=pair[1], device=device, **options) for device in ("cuda", "cpu"))
    assert there.metrics["guide_after_max_mm"] == pytest.approx(missed(there, points), abs=1e-6)
    assert missed(there, points) < 2
    assert there.metrics["folds_percent"] == 0
    everywhere = grid_points(pair[0]).reshape(-1, 3)
    assert np.linalg.norm(there.transform(everywhere) - here.transform(everywhere), axis=1).mean() < 0.2


def test_a_rigid_region_on_a_gpu(scans: Scans, model: Path) -> None:  # noqa: F811
    fixed, moving, first, second = scans
    hard = Image((first.data == 1).astype(np.uint8), first.affine)
    options: dict[str, Any] = {"fixed_seg": first, "moving_seg": second, "model": model, "io_iterations": 8}
    free = register(fixed=fixed, moving=moving, device="cuda", **options)
    kept = register(fixed=fixed, moving=moving, device="cuda", rigid_mask=hard, **options)
    inside = grid_points(fixed)[hard.data == 1]
    assert missing_rigidity(free.transform, inside) > 0.3 * min(SPACING)
    assert missing_rigidity(kept.transform, inside) < 0.1 * min(SPACING)
    assert kept.metrics["folds_percent"] == 0
    assert kept.dice["after"][1] > 0.8


def test_both_terms_give_the_same_bits_every_time(scans: Scans) -> None:  # noqa: F811
    """As plain registrations on a GPU do, whose steps are captured as graphs."""
    fixed, moving = (torch.from_numpy(one.data)[None, None].cuda() / 600 for one in scans[:2])
    guide = Guide(torch.tensor([[0.5, 0.45, 0.5]]), torch.tensor([[0.55, 0.5, 0.45]]))
    rigid = Rigidity(torch.from_numpy(scans[2].data == 1)[None, None].float().cuda(), None)
    options: dict[str, Any] = {"steps": 6, "levels": 2, "moving_spacing": SPACING, "fixed_spacing": SPACING}
    runs = [
        optimize_fields(Identity(), Identity(), moving, fixed, guide=guide, rigidity=rigid, **options) for _ in range(2)
    ]
    assert runs[0].losses == runs[1].losses
    assert runs[0].transform.on_grid_of(fixed).equal(runs[1].transform.on_grid_of(fixed))
    assert folding(runs[0].transform, fixed) == 0
    missing = (runs[0].transform(guide.fixed.cuda()[None]).cpu() - guide.moving) * torch.tensor(fixed.shape[2:])
    assert float(missing.norm()) < 1.5  # voxels; 3.0 before


def test_a_gpu_inverts_as_a_cpu_does() -> None:
    numbers = np.random.default_rng(0)
    coarse = torch.from_numpy(numbers.normal(size=(1, 3, 6, 7, 5))).float()
    shift = torch.nn.functional.interpolate(coarse, (40, 44, 36), mode="trilinear", align_corners=True)
    grid = Image(np.zeros((40, 44, 36), np.float32), np.diag([1.0, 1.2, 2.0, 1.0]))
    there = WorldTransform(np.eye(4), 0.8 * shift[0].movedim(0, -1).numpy(), grid.affine)
    assert jacobian_determinant(there, grid).data.min() > 0  # a fold would have no inverse
    (here, missed), (inverse, left) = (invert(there, grid, device=device) for device in ("cpu", "cuda"))
    inside = np.isfinite(missed) & np.isfinite(left)
    assert inside.mean() > 0.8
    assert max(missed[inside].max(), left[inside].max()) < 1e-3  # mm
    assert np.abs(here.displacement - inverse.displacement)[inside].max() < 4e-3  # both are within the tolerance
    assert np.abs(here.displacement).max() > 1


def test_a_gpu_samples_a_map_as_a_cpu_does() -> None:
    numbers = torch.Generator().manual_seed(0)
    coarse = 0.03 * torch.randn(1, 3, 6, 7, 5, generator=numbers)
    phi = DisplacementField(torch.nn.functional.interpolate(coarse, (20, 22, 18), mode="trilinear", align_corners=True))
    fixed, moving = (Image(np.zeros(shape, np.float32), np.diag([1.0, 1.2, 2.0, 1.0])) for shape in [(30, 28, 26)] * 2)
    here, there = (to_world(phi, fixed, moving, np.eye(4), device=device) for device in ("cpu", "cuda"))
    assert np.abs(here.displacement - there.displacement).max() < 1e-4  # mm
    assert np.abs(here.displacement).max() > 1
