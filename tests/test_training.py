"""Training: it learns, it can be broken off anywhere, and bad steps do no harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import SMALL
from torch import Tensor

from carlreg import Augmented, RegistrationAlgorithm, carl, gradicon, load, registration_loss
from carlreg.grids import Grid
from carlreg.training import PAPER, Progress, Stage, TrainingError, train


def blobs(generator: torch.Generator, batch: int = 2) -> Tensor:
    x = Grid.of((32, 32)).points()
    centres = torch.tensor([[0.4, 0.4], [0.6, 0.55], [0.45, 0.7]])
    images = []
    for _ in range(batch):
        moved = centres + 0.05 * torch.randn(2, generator=generator)
        images.append(sum(torch.exp(-((x - c) ** 2).sum(-1) / 0.01) for c in moved)[None])
    return torch.stack(images)


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return blobs(generator), blobs(generator)


def network() -> RegistrationAlgorithm:
    torch.manual_seed(0)
    return carl(2, 2, width=4, **SMALL)


STAGES = [Stage(4, "diffusion"), Stage(5, final_learning_rate=1e-5, warm_up=2), Stage(3, refine=True)]


def test_it_learns(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = gradicon(2, 2, **SMALL)
    pair = draw(torch.Generator().manual_seed(99))

    def similarity() -> float:
        with torch.no_grad():
            return float(registration_loss(*model.eval().both(*pair), *pair).similarity)

    before = similarity()
    model = train(model, draw, [Stage(120, learning_rate=2e-3)], out=tmp_path)
    assert similarity() < 0.9 * before
    assert not model.training


def test_a_broken_off_run_goes_the_same_way(tmp_path: Path) -> None:
    whole = train(network(), draw, STAGES, out=tmp_path / "whole", log_every=1)

    class Killed(Exception):  # noqa: N818
        pass

    for stop in [(0, 2), (1, 1), (1, 4), (2, 2)]:

        def kill(progress: Progress, stop: tuple[int, int] = stop) -> None:
            if (progress.stage, progress.step) == stop:
                raise Killed

        with pytest.raises(Killed):
            train(network(), draw, STAGES, out=tmp_path / "broken", log_every=1, save_every=1, callback=kill)
    model = train(network(), draw, STAGES, out=tmp_path / "broken", log_every=1, save_every=1)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    lines = [json.loads(line) for line in (tmp_path / "broken" / "log.jsonl").open()]
    assert len(lines) == len({(e["stage"], e["step"]) for e in lines})  # what was done again is there once
    losses = [
        {(e["stage"], e["step"]): e["losses"] for e in map(json.loads, (tmp_path / run / "log.jsonl").open())}
        for run in ("whole", "broken")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12


def test_a_time_limit_leaves_a_checkpoint(tmp_path: Path) -> None:
    train(network(), draw, STAGES, out=tmp_path, seconds=0)
    model = train(network(), draw, STAGES, out=tmp_path)
    expected = train(network(), draw, STAGES, out=tmp_path / "other")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_time_limit_where_a_refinement_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from carlreg import training

    stages = [Stage(2), Stage(3, refine=True)]
    expected = train(network(), draw, stages, out=tmp_path / "whole")
    ticks = iter([0.0, 0.1, 0.2, *[9.0] * 99])
    monkeypatch.setattr(training.time, "monotonic", lambda: next(ticks))
    train(network(), draw, stages, out=tmp_path / "cut", seconds=1, log_every=99)
    monkeypatch.undo()
    model = train(network(), draw, stages, out=tmp_path / "cut")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_batch_that_overflows_leaves_no_trace(tmp_path: Path) -> None:
    """Finite images so large that BatchNorm's statistics overflow: weights and statistics stay as they were."""

    def huge(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return 1e38 * blobs(generator), 1e38 * blobs(generator)

    seen: list[Progress] = []
    model = train(network(), huge, [Stage(3)], out=tmp_path, log_every=1, callback=seen.append)
    assert seen[-1].skipped == 3
    fresh = network().state_dict()
    for name, value in model.state_dict().items():
        assert "num_batches" in name or torch.equal(value, fresh[name]), name


def test_a_stage_says_what_the_loss_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from carlreg import training

    seen: list[dict[str, object]] = []

    def spy(*arguments: object, **options: object) -> object:
        seen.append(options)
        return registration_loss(*arguments, **options)

    monkeypatch.setattr(training, "registration_loss", spy)
    train(network(), draw, [Stage(1, "diffusion", weight=0.3, similarity="ssd")], out=tmp_path)
    assert {k: seen[0][k] for k in ("regularity", "weight", "similarity")} == {
        "regularity": "diffusion",
        "weight": 0.3,
        "similarity": "ssd",
    }


def test_a_step_that_is_not_finite_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from carlreg import training

    calls = 0

    def sometimes_nan(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        loss = registration_loss(*arguments, **options)
        factor = torch.nan if calls in (2, 3) else 1.0
        return type(loss)(loss.total * factor, loss.similarity, loss.regularity)

    monkeypatch.setattr(training, "registration_loss", sometimes_nan)
    seen: list[Progress] = []
    model = train(network(), draw, [Stage(5)], out=tmp_path, log_every=1, callback=seen.append)
    assert [p.skipped for p in seen] == [0, 1, 2, 2, 2]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_too_many_of_them_end_the_run_with_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from carlreg import training

    good = train(network(), draw, [Stage(3)], out=tmp_path / "good").state_dict()
    calls = 0

    def breaks(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        loss = registration_loss(*arguments, **options)
        return type(loss)(loss.total * (torch.nan if calls > 3 else 1.0), loss.similarity, loss.regularity)

    monkeypatch.setattr(training, "registration_loss", breaks)
    with pytest.raises(TrainingError, match="5 steps in a row had gradients that are not finite"):
        train(network(), draw, [Stage(50)], out=tmp_path / "bad", save_every=3, log_every=1, most_skipped=4)
    kept = load(tmp_path / "bad" / "last.safetensors").state_dict()
    for name, weight in good.items():
        if "running" not in name and "num_batches" not in name:  # statistics follow the images, not the gradients
            assert torch.allclose(kept[name], weight), name


def test_the_best_model_is_kept(tmp_path: Path) -> None:
    scores = iter([0.2, 0.7, 0.4])
    kept: list[dict[str, Tensor]] = []

    def validate(model: RegistrationAlgorithm) -> float:
        assert not model.training
        kept.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return next(scores)

    train(network(), draw, [Stage(6)], out=tmp_path, validate=validate, validate_every=2)
    best = load(tmp_path / "best.safetensors").state_dict()
    assert all(torch.equal(best[name], tensor) for name, tensor in kept[1].items())


def test_a_validation_without_a_score_is_not_the_best(tmp_path: Path) -> None:
    scores = iter([float("nan"), 0.5, float("nan")])
    train(network(), draw, [Stage(3)], out=tmp_path, validate=lambda _: next(scores), validate_every=1)
    assert [json.loads(line).get("validation") for line in (tmp_path / "log.jsonl").open()][1] == 0.5
    assert (tmp_path / "best.safetensors").exists()


def test_training_goes_on_in_training_mode_after_a_validation(tmp_path: Path) -> None:
    modes: list[bool] = []
    model = network()

    def watched(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        modes.append(model.training)
        return draw(generator)

    train(model, watched, [Stage(3)], out=tmp_path, validate=lambda _: 0.0, validate_every=1)
    assert modes == [True, True, True]


def test_the_learning_rate(tmp_path: Path) -> None:
    stage = Stage(100, learning_rate=1.0, final_learning_rate=0.1, warm_up=4)
    assert stage.rate(0) == pytest.approx(0.2, abs=1e-3)
    assert stage.rate(50) == pytest.approx(0.55)
    assert stage.rate(100) == pytest.approx(0.1)
    assert Stage(10).rate(7) == 1e-4
    assert [s.steps for s in PAPER] == [1500, 50_000, 50_000]


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no stages"):
        train(network(), draw, [], out=tmp_path)
    train(network(), draw, [Stage(1)], out=tmp_path)
    with pytest.raises(ValueError, match="holds a run with another seed"):
        train(network(), draw, [Stage(1)], out=tmp_path, seed=5)
    with pytest.raises(ValueError, match="holds a run with another model"):
        train(gradicon(2, 2, **SMALL), draw, [Stage(1)], out=tmp_path)
    with pytest.raises(TypeError, match="cannot describe a Augmented"):
        train(Augmented(network(), lambda image: None), draw, [Stage(1)], out=tmp_path / "new")
    with pytest.raises(ValueError, match="holds a run with another stages"):
        train(network(), draw, [Stage(2)], out=tmp_path)


@pytest.mark.gpu
def test_graphs_change_nothing_but_speed(tmp_path: Path) -> None:
    models = []
    for graphs in (False, True):
        model = train(network().cuda(), draw, [Stage(8)], out=tmp_path / str(graphs), graphs=graphs, log_every=1)
        models.append(model)
    logs = [
        [json.loads(line)["losses"]["total"] for line in (tmp_path / f / "log.jsonl").open()] for f in ("False", "True")
    ]
    assert logs[0] == pytest.approx(logs[1], rel=1e-2)
