"""The training of carl-2d: pairs whose true map is known, and a run that ends with a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from carlreg import load
from carlreg.geometry.grids import interpolate
from carlreg.model.files import read_metadata

SETS = ("brain", "brain_ibsr", "brain_maps", "abdomen", "abdomen_mr", "cardiac", "hippocampus", "lung")


@pytest.fixture(scope="module")
def two_d() -> ModuleType:
    folder = str(Path(__file__).parent.parent / "experiments" / "base")
    sys.path.insert(0, folder)
    try:
        import two_d
    finally:
        sys.path.remove(folder)
    two_d.SHAPES = 16
    return two_d


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack like that of prepare_2d.py: every set has two subjects for training and two of `dev` at one place."""
    draw = np.random.default_rng(0)
    rows, columns = np.mgrid[:96, :96]

    def blobs() -> np.ndarray:
        centres = draw.uniform(25, 70, (5, 2))
        return np.stack([np.hypot(rows - y, columns - x) < 12 for y, x in centres]).sum(0)

    vessels = np.stack([blobs() % 2 == 1 for _ in range(20)])
    parts = {"bits": np.packbits(vessels.reshape(20, -1), axis=1), "shape": np.array(vessels.shape)}
    for name in SETS:
        shown = np.stack([blobs() for _ in range(4)]).astype(np.uint8)
        parts |= {f"{name}/images": shown if name == "brain_maps" else 50 * shown, f"{name}/labels": shown}
        parts |= {f"{name}/place": np.zeros(4, int), f"{name}/dev": np.array([False, False, True, True])}
        parts[f"{name}/subject"] = np.array([0, 0, 1, 1]) if name == "lung" else np.arange(4)
    path = tmp_path_factory.mktemp("pack") / "two_d.npz"
    np.savez(path, **parts)
    return path


def test_true_maps_are_true(two_d: ModuleType, pack: Path) -> None:
    data = two_d.Pictures(pack, 64, torch.device("cpu"), {"retina": 2, "subjects": 2, "deformed": 4, "maps": 0}, 0.0)
    batches = data.draw(torch.Generator().manual_seed(0), two_d.FAR, 3, same=False).split(3)
    for drawn in batches:
        moving, fixed = drawn.targets.chunk(2)
        warped = interpolate(moving, drawn.truth, outside="zeros")
        inside = two_d.inside(drawn.truth)[:, None]
        wrong, before = (
            (inside * (one - fixed).abs()).flatten(1).sum(1) / inside.flatten(1).sum(1) for one in (warped, moving)
        )
        assert drawn.known.tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
        same = drawn.known > 0
        assert (wrong[same] < 0.4 * before[same]).all()
        assert wrong[same].mean() < 0.02
        assert wrong[~same].mean() > 0.05
    known = data.draw(torch.Generator().manual_seed(0), two_d.FAR, 3, same=True).known
    assert known.min() == 1


def test_a_run_ends_with_a_model(
    two_d: ModuleType, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "DOWN": (4, 4),
        "UP": (4, 4),
        "LOG_EVERY": 2,
        "AHEAD": 2,
        "WARM_UP": 1,
        "FIELD_STEPS": 2,
        "LEAST": 0.0,
    }.items():
        monkeypatch.setattr(two_d, name, value)
    counts = {"retina": 1, "subjects": 1, "deformed": 1, "maps": 1, "shapes": 1}
    words = ["--side", "32", "--downs", "2", "--width", "4", "--steps", "4", "4", "--validate-every", "2"]
    monkeypatch.setattr(
        sys, "argv", ["two_d.py", str(pack), "--out", str(tmp_path), *words, "--counts", json.dumps(counts)]
    )
    two_d.main()
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    losses, scores = ([entry for entry in entries if key in entry] for key in ("total", "dev"))
    assert [(entry["part"], entry["step"]) for entry in losses] == [(0, 2), (0, 4), (1, 2), (1, 4)]
    assert [entry["skipped"] for entry in losses] == [0, 0, 0, 0]
    report = json.loads((tmp_path / "trained.json").read_text(encoding="utf-8"))
    assert report["dev_mean"] == max(entry["dev"] for entry in scores)
    about = read_metadata(tmp_path / "model.safetensors")
    assert (about["name"], about["grid"]) == ("carl-2d", "32 32")
    assert "research use" in about["licence"]

    monkeypatch.setattr(
        sys,
        "argv",
        [
            "two_d.py",
            str(pack),
            "--out",
            str(tmp_path),
            "--score",
            str(tmp_path / "model.safetensors"),
            "--side",
            "32",
            "--retinas",
            "1",
        ],
    )
    two_d.main()
    test = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))["test"]
    assert [test[variant]["pairs"] for variant in ("Baseline", "Shift")] == [40, 40]
    assert test["Baseline"]["dice_optimized"] > test["Baseline"]["before"]


def test_a_gradient_is_limited_and_forgotten(two_d: ModuleType, pack: Path) -> None:
    counts = {"retina": 1, "deformed": 1}
    data = two_d.Pictures(pack, 32, torch.device("cpu"), counts, 0.0)
    model = two_d.network(4, 2)
    step = two_d.Registering(model, data.device, two_d.WEIGHTS, 1e-3)
    (drawn,) = data.draw(torch.Generator().manual_seed(0), two_d.FAR, 1, same=True).split(1)
    step.on(drawn, 1e-4, 0)
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert step.norm > 1e-2
    assert gradients.norm() == pytest.approx(1e-3, rel=1e-2)
    step.forget()
    assert all(not value.any() for state in step.optimizer.state.values() for value in state.values())


def test_a_fall_leads_back_to_the_best_model(
    two_d: ModuleType, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"DOWN": (4, 4), "UP": (4, 4), "LOG_EVERY": 1, "AHEAD": 1, "WARM_UP": 1}.items():
        monkeypatch.setattr(two_d, name, value)
    seen: list[tuple[float, torch.Tensor]] = []

    def evaluate(self: object, model: torch.nn.Module) -> dict[str, dict[str, float]]:
        score = 0.1 if seen else 0.9
        seen.append((score, torch.cat([weights.detach().flatten() for weights in model.parameters()])))
        return {"brain": {"dice": score, "folds": 0.0}}

    monkeypatch.setattr(two_d.Pictures, "evaluate", evaluate)
    words = ["--side", "32", "--downs", "1", "--width", "4", "--steps", "2", "20", "--validate-every", "1"]
    counts = {"retina": 1, "subjects": 0, "deformed": 1, "maps": 0, "shapes": 0}
    monkeypatch.setattr(
        sys, "argv", ["two_d.py", str(pack), "--out", str(tmp_path), *words, "--counts", json.dumps(counts)]
    )
    two_d.main()
    assert len(seen) == 1 + two_d.MOST_FALLS  # then training ends
    best = load(tmp_path / "model.safetensors")
    kept = torch.cat([weights.detach().flatten() for weights in best.parameters()])
    assert torch.allclose(kept, seen[0][1], atol=1e-3)  # rounded to half precision
    moves = [(after - kept).abs().max() for _, after in seen[1:]]
    assert moves[2] < 0.6 * moves[0]  # one step from the same model, each time at half the rate


class Operations(TorchDispatchMode):
    """The names of all operations that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["Matching", "Registering"])
def test_steps_can_be_captured(two_d: ModuleType, pack: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CUDA graph: no value is read back, and no numbers come from the host."""
    monkeypatch.setattr("carlreg.model.algorithms.check_finite", lambda *_: None)  # left out by capturing, too
    data = two_d.Pictures(pack, 32, torch.device("cpu"), {"retina": 1, "deformed": 1}, 0.0)
    model = two_d.network(4, 2)
    network = two_d.first_step(model) if kind == "Matching" else model
    step = getattr(two_d, kind)(network, data.device, two_d.WEIGHTS, 1.0)
    (drawn,) = data.draw(torch.Generator().manual_seed(0), two_d.FAR, 1, same=True).split(1)
    step.on(drawn, 1e-4, 0)
    operations = Operations()
    with operations:
        step._run(tuple(drawn))
    assert {"convolution_backward", "_fused_adam_"} <= operations.names
    assert not operations.names & {"_local_scalar_dense", "lift_fresh", "nonzero", "equal"}
