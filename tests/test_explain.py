"""`carl explain` shows what the network does: masks sum to 1, their centres are the matches, spreads are correct."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, texture
from torch import Tensor

from carlreg import carl, gradicon, load, save, xi
from carlreg.cli import main
from carlreg.explain import Explanation, Inside, Probe, explain, find_attention, index_to_unit, probe
from carlreg.files.images import Image, from_array, map_points, read, write
from carlreg.files.orientation import to_closest_ras
from carlreg.geometry.resizing import resize
from carlreg.model.algorithms import Downsample, RegistrationAlgorithm
from carlreg.objective.metrics import dice
from carlreg.preparation import preprocess

AFFINE = np.array([[1.6, -0.9, 0, -20], [1.2, 1.2, 0, 10], [0, 0, 3.0, 5], [0, 0, 0, 1]])
"""Oblique: turned by 37°, with voxels of 2 × 1.5 × 3 mm."""


def sharp(dim: int, shape: tuple[int, ...]) -> tuple[RegistrationAlgorithm, Tensor, Tensor]:
    """Down{Down{Ξ}} with long features, so that attention is compact, and a pair of images."""
    model = xi(dim, width=8, length=6.0).double().eval()
    moving, fixed = texture(*shape), texture(*(n - 3 for n in shape))
    return model, moving, fixed


@pytest.mark.parametrize(("dim", "shape"), [(2, (38, 33)), (3, (18, 21, 15))])
def test_a_mask_adds_up_to_one_and_its_centre_is_the_match(dim: int, shape: tuple[int, ...]) -> None:
    model, moving, fixed = sharp(dim, shape)
    inside = Inside.of(model, moving, fixed)
    voxels = [tuple(int(n * part) for n in inside.fixed.shape[2:]) for part in (0, 0.3, 0.8)]
    masks = inside.masks(voxels)
    assert torch.allclose(masks.flatten(1).sum(1), torch.ones(3, dtype=torch.float64))
    places = inside.keys.points(torch.float64)
    attention, poolings = find_attention(model)
    assert len(poolings) == 2
    matches = attention(inside.moving, inside.fixed).on_grid_of(inside.fixed)[0]
    mean, covariance = inside.moments()
    for voxel, mask in zip(voxels, masks, strict=True):
        centre = (mask[..., None] * places).flatten(0, -2).sum(0)
        assert torch.allclose(centre, matches[voxel], atol=1e-9)
        assert torch.allclose(mean[voxel], centre, atol=1e-9)
        apart = (places - centre).flatten(0, -2)
        expected = (mask.flatten()[:, None, None] * apart[:, :, None] * apart[:, None, :]).sum(0)
        assert torch.allclose(covariance[voxel], expected, atol=1e-9)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "small.safetensors"
    save(carl(3, 2, width=16, **SMALL), path, metadata={"grid": "45 39 48"})
    return path


@pytest.fixture
def scans(tmp_path: Path) -> tuple[Path, Path]:
    """Two images with oblique headers, and labels beside them."""
    rng = np.random.default_rng(0)
    for name, shape in (("fixed", (20, 24, 16)), ("moving", (22, 20, 18))):
        index = np.stack(np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij"), axis=-1)
        ball = (index**2).sum(-1) < 0.5
        affine = AFFINE if name == "fixed" else np.diag([1.0, 1.0, -1.0, 1.0]) @ AFFINE
        write(from_array((100 * ball + rng.normal(0, 5, shape)).astype(np.float32), affine), tmp_path / f"{name}.mha")
        write(from_array(ball.astype(np.uint8), affine), tmp_path / f"{name}_seg.mha")
    return tmp_path / "fixed.mha", tmp_path / "moving.mha"


def test_places_in_the_world(model_file: Path, scans: tuple[Path, Path]) -> None:
    """A mask's centre of mass in mm is where the network without its refinements maps the voxel."""
    fixed, moving = scans
    seen = explain(fixed=fixed, moving=moving, model=model_file, device="cpu")
    attention, _ = find_attention(load(model_file))
    tensors = [resize(preprocess(to_closest_ras(read(path)))[0], (45, 39, 48)) for path in (moving, fixed)]
    with torch.no_grad():
        phi = Downsample(Downsample(attention)).eval()(*tensors)
    for voxel in ((2, 2, 3), (6, 7, 5), (11, 0, 9)):
        point = map_points(seen.fixed_lattice(), voxel)
        assert seen.voxel_at(point) == voxel
        mask = seen.mask(voxel)
        assert mask.data.sum() == pytest.approx(1, abs=1e-5)
        centre, spread = seen.match(mask)
        unit = torch.from_numpy(map_points(seen.fixed.world_to_unit(), point)).float()[None, None]
        expected = map_points(seen.moving.unit_to_world(), phi(unit)[0, 0].double().numpy())
        assert np.allclose(centre, expected, atol=0.02)
        assert float(seen.certainty().data[voxel]) == pytest.approx(spread, rel=1e-3)
    assert seen.certainty().shape == seen.inside.fixed.shape[2:] == (12, 10, 12)
    with pytest.raises(ValueError, match=r"the point \(900, 0, 0\) lies outside of"):
        seen.voxel_at((900, 0, 0))


def test_levels_of_networks_that_were_pooled_without_alignment() -> None:
    model = xi(2, width=8)
    downs = [module for module in model.modules() if isinstance(module, Downsample)]
    aligned = index_to_unit((20, 30), downs)
    padded = index_to_unit((20, 30), downs, 3)
    for module in downs:
        module.aligned = False
    plain = index_to_unit((20, 30), downs)
    ends = np.array([[0.0, 0], [1, 1]])
    assert np.allclose(map_points(plain, [[0, 0], [4, 7]]), ends)
    assert np.allclose(map_points(aligned, [[-0.375, -0.375], [4.375, 6.875]]), ends)
    assert np.allclose(map_points(padded, [[2.625, 2.625], [7.375, 9.875]]), ends)


def test_a_network_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="the model begins with PredictDisplacement"):
        find_attention(gradicon(2, 2, **SMALL))


def test_random_voxels_lie_in_the_body(scans: tuple[Path, Path], model_file: Path) -> None:
    seen = explain(fixed=scans[0], moving=scans[1], model=model_file, device="cpu")
    voxels = seen.random_voxels(10)
    assert len(set(voxels)) == 10
    assert voxels == seen.random_voxels(10)
    assert voxels != seen.random_voxels(10, seed=1)
    image = seen.inside.fixed[0, 0]
    assert min(float(image[voxel]) for voxel in voxels) > 0.1 * float(image.max())


# ---- the probe ------------------------------------------------------------------------------------------------------


def separable(seed: int, noise: float) -> tuple[Tensor, Tensor]:
    """Features in which each structure has its own direction, and the structures: labels 0, 2, 5, 7."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([0, 2, 5, 7])[torch.randint(0, 4, (1, 1, 9, 8, 7), generator=generator)]
    directions = torch.randn(8, 12, generator=torch.Generator().manual_seed(9))
    features = directions[labels[0, 0]].movedim(-1, 0)[None]
    return features + noise * torch.randn(features.shape, generator=generator), labels


def test_a_probe_finds_structures_that_have_a_direction() -> None:
    trained = Probe.fit(*separable(0, 0.1), [2, 5, 7])
    features, labels = separable(1, 0.1)
    scores = dice(trained.segment(features), labels, [2, 5, 7])
    assert min(scores.values()) > 0.99
    heat = trained.heat(features)
    assert heat.shape == (3, 9, 8, 7)
    assert heat[1][labels[0, 0] == 5].mean() > 0.9
    assert heat[1][labels[0, 0] != 5].abs().mean() < 0.1


def test_a_probe_does_not_find_what_the_features_do_not_know() -> None:
    features, labels = separable(0, 0.1)
    shuffled = labels.flatten()[torch.randperm(labels.numel())].reshape(labels.shape)
    trained = Probe.fit(features, shuffled, [2, 5, 7])
    others, truth = separable(1, 0.1)
    assert max(dice(trained.segment(others), truth, [2, 5, 7]).values()) < 0.7


def test_a_small_structure_is_found_although_it_answers_weakly() -> None:
    """A structure of 1 voxel in 100: with noise, the fit never reaches 0.5, but a chosen threshold finds it."""
    labels = torch.zeros(1, 1, 20, 20, dtype=torch.int64)
    labels[0, 0, 4:6, 7:9] = 3
    features = torch.cat([labels.double() / 3, torch.zeros(1, 1, 20, 20, dtype=torch.float64)], dim=1)
    noisy = features + 0.2 * torch.randn(features.shape, dtype=torch.float64)
    trained = Probe.fit(noisy, labels, [3])
    assert float(trained.thresholds) < 0.5
    assert dice(trained.segment(features), labels, [3])[3] == 1


def test_a_probe_of_a_network(model_file: Path, scans: tuple[Path, Path]) -> None:
    """Even an untrained encoder distinguishes the inside of a bright ball from its outside."""
    seen = explain(fixed=scans[0], moving=scans[1], model=model_file, device="cpu")
    labels = [read(path.with_name(f"{path.stem}_seg.mha")) for path in scans]
    trained, heat, scores = probe(seen, labels[1], labels[0])
    assert trained.labels == (1,)
    assert heat.shape == (1, *seen.inside.fixed.shape[2:])
    assert scores[1] > 0.85
    with pytest.raises(ValueError, match="no label in common"):
        probe(seen, labels[1], Image(labels[0].data * 0, labels[0].affine))


def test_carl_explain(model_file: Path, scans: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    fixed, moving = (str(path) for path in scans)
    out = scans[0].parent / "out"
    words = ["explain", "-f", fixed, "-m", moving, "-o", str(out), "--model", str(model_file), "--device", "cpu"]
    segs = ["--fixed-seg", fixed.replace(".mha", "_seg.mha"), "--moving-seg", moving.replace(".mha", "_seg.mha")]
    assert main([*words, *segs, "--voxels", "4"]) == 0
    assert "spread of" in capsys.readouterr().out
    pictures = {"point.png", "masks.png", "certainty.png", "probe.png"}
    assert {path.name for path in out.iterdir()} == {*pictures, "mask.nii.gz", "certainty.nii.gz", "report.json"}
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    seen = explain(fixed=fixed, moving=moving, model=model_file, device="cpu")
    centre, spread = seen.match(read(out / "mask.nii.gz"))
    assert np.allclose(report["match_mm"], centre, atol=1e-2)
    assert report["spread_mm"] == pytest.approx(spread, rel=1e-3)
    assert report["probe_dice"]["1"] > 0.8
    assert main([*words]) == 1
    assert "already holds report.json" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--point", "1,2"]) == 2
    assert main([*words, "--overwrite", segs[0], segs[1]]) == 2
    capsys.readouterr()
    assert main([*words, "--overwrite", "--point", "900,0,0"]) == 1
    assert "lies outside of" in capsys.readouterr().err


def test_pictures_in_two_dimensions() -> None:
    from carlreg.explain import draw_certainty, draw_masks, draw_point

    model, moving, fixed = sharp(2, (32, 28))
    images = [from_array(np.zeros(tensor.shape[2:], np.float32)) for tensor in (fixed, moving)]
    seen = Explanation(Inside.of(model, moving, fixed), *images)
    voxels = seen.random_voxels(3)
    for picture in (draw_point(seen, voxels[0]), draw_masks(seen, voxels), draw_certainty(seen, seen.certainty())):
        assert picture[1:4] == b"PNG"
