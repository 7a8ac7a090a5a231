"""Training improves the network, can be interrupted anywhere, and skips bad steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import SMALL, randomize
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from carlreg import (
    Augmented,
    RegistrationAlgorithm,
    Transform,
    TwoStep,
    carl,
    carl_rot,
    gradicon,
    lncc2,
    load,
    registration_loss,
    ssd,
)
from carlreg.errors import InputError
from carlreg.geometry.fitting import fit_affine
from carlreg.geometry.grids import Grid
from carlreg.model.files import read_metadata
from carlreg.training.batches import Batch, Batches
from carlreg.training.distributed import Team, TrainingError, launch, shared
from carlreg.training.loop import Progress, train
from carlreg.training.run import Settings
from carlreg.training.stages import PAPER, PAPER_ROT, Stage
from carlreg.training.step import TrainingStep


def blobs(generator: torch.Generator, batch: int = 2, side: int = 32) -> Tensor:
    x = Grid.of((side, side)).points()
    centres = torch.tensor([[0.4, 0.4], [0.6, 0.55], [0.45, 0.7]])
    images = []
    for _ in range(batch):
        moved = centres + 0.05 * torch.randn(2, generator=generator)
        images.append(sum(torch.exp(-((x - c) ** 2).sum(-1) / 0.01) for c in moved)[None])
    return torch.stack(images)


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return blobs(generator), blobs(generator)


def labelled(generator: torch.Generator) -> tuple[Tensor, ...]:
    images = draw(generator)
    return (*images, *((image > 0.5).byte() for image in images))


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
    from carlreg.training import loop

    stages = [Stage(2), Stage(3, refine=True)]
    expected = train(network(), draw, stages, out=tmp_path / "whole")
    ticks = iter([0.0, 0.1, 0.2, *[9.0] * 99])
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(ticks))
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

    seen: list[dict[str, object]] = []

    def spy(*arguments: object, **options: object) -> object:
        seen.append(options)
        return registration_loss(*arguments, **options)

    monkeypatch.setattr("carlreg.training.step.registration_loss", spy)
    train(network(), draw, [Stage(1, "diffusion", weight=0.3, similarity="ssd")], out=tmp_path / "ssd")
    train(network(), draw, [Stage(1, similarity="lncc2", window=1.5)], out=tmp_path / "lncc2")
    assert [(call["regularity"], call["weight"]) for call in seen] == [("diffusion", 0.3), ("gradicon", 1.5)]
    images = torch.rand(2, 1, 1, 16, 16)
    for call, expected in zip(seen, (ssd(*images), lncc2(*images, sigma=1.5)), strict=True):
        assert torch.equal(call["similarity"](*images), expected)  # type: ignore[operator]


def test_only_correlations_have_windows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="window of 2 voxels was given for ssd"):
        train(network(), draw, [Stage(1, similarity="ssd", window=2.0)], out=tmp_path)
    with pytest.raises(InputError, match="window is 2 for mind"):
        Settings(similarity="mind", window=2.0)
    assert Settings(window=2.0).stages()[-1].window == 2.0


def test_a_step_that_is_not_finite_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    calls = 0

    def sometimes_nan(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        loss = registration_loss(*arguments, **options)
        factor = torch.nan if calls in (2, 3) else 1.0
        return type(loss)(loss.total * factor, loss.similarity, loss.regularity)

    monkeypatch.setattr("carlreg.training.step.registration_loss", sometimes_nan)
    seen: list[Progress] = []
    model = train(network(), draw, [Stage(5)], out=tmp_path, log_every=1, callback=seen.append)
    assert [p.skipped for p in seen] == [0, 1, 2, 2, 2]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_too_many_of_them_end_the_run_with_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    good = train(network(), draw, [Stage(3)], out=tmp_path / "good").state_dict()
    calls = 0

    def breaks(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        loss = registration_loss(*arguments, **options)
        return type(loss)(loss.total * (torch.nan if calls > 3 else 1.0), loss.similarity, loss.regularity)

    monkeypatch.setattr("carlreg.training.step.registration_loss", breaks)
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
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").open()]
    assert [entry["validation"] for entry in entries if "validation" in entry][1] == 0.5
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
    assert [(s.steps, s.weight, s.first_step_alone) for s in PAPER_ROT] == [
        (4500, 10.5, True),
        (50_000, 1.5, False),
        (50_000, 1.5, False),
    ]
    assert Settings(model="carl_rot", refine_steps=50_000).stages() == list(PAPER_ROT)
    turning = {name: Settings(model=name).stages()[0].rotate for name in ("rot", "carl-rot", "carl-base", "carl")}
    assert turning == {"rot": True, "carl-rot": True, "carl-base": False, "carl": False}


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


def test_labels_are_learnt_from_where_a_stage_says_so(tmp_path: Path) -> None:
    stages = [Stage(2), Stage(2, label_weight=0.5)]
    train(network(), labelled, stages, out=tmp_path / "some", log_every=1)
    parts = [json.loads(line)["losses"] for line in (tmp_path / "some" / "log.jsonl").open()]
    assert ["label_loss" in part for part in parts] == [False, False, True, True]
    with pytest.raises(ValueError, match="the batch has no labels, but the stage has a label weight"):
        train(network(), draw, stages, out=tmp_path / "none")


def test_the_loss_compares_the_targets_and_not_what_is_seen() -> None:
    model, generator = network().train(), torch.Generator().manual_seed(0)
    images, targets = draw(generator), draw(generator)
    step = TrainingStep(model, Stage(1, "diffusion"), device=torch.device("cpu"))
    with torch.no_grad():
        expected = registration_loss(*model.both(*images), *targets, regularity="diffusion")
        otherwise = registration_loss(*model.both(*images), *images, regularity="diffusion")
    loss = step(Batch(*images, moving_target=targets[0], fixed_target=targets[1]), rate=0.0, seed=0)
    assert float(loss.similarity) == pytest.approx(float(expected.similarity), rel=1e-5)
    assert float(otherwise.similarity) != pytest.approx(float(expected.similarity), rel=1e-2)


def test_a_batch_may_be_a_plain_tuple(tmp_path: Path) -> None:
    """And images that are their own targets change nothing."""

    def as_batch(generator: torch.Generator) -> Batch:
        return Batch(*draw(generator))

    def with_targets(generator: torch.Generator) -> Batch:
        images = draw(generator)
        return Batch(*images, moving_target=images[0], fixed_target=images[1])

    models = [
        train(network(), how, [Stage(3)], out=tmp_path / str(number))
        for number, how in enumerate((draw, as_batch, with_targets, shared(with_targets)))
    ]
    for model in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), models[0].parameters(), strict=True))
    with pytest.raises(ValueError, match="3 tensors were drawn; expected 2 images"):
        train(network(), lambda generator: (*draw(generator), draw(generator)[0]), [Stage(1)], out=tmp_path / "three")


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_drawing_ahead_changes_nothing_but_speed(graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_gpu(generator: torch.Generator) -> Batch:
        images = [image.cuda() for image in draw(generator)]
        own = torch.Generator("cuda").manual_seed(int(torch.randint(1000, (), generator=generator)))
        noisy = [image + 0.1 * torch.randn(image.shape, generator=own, device="cuda") for image in images]
        return Batch(noisy[0], noisy[1], moving_target=images[0], fixed_target=images[1])

    drawn: dict[str, list[Tensor]] = {"ahead": [], "now": []}
    threads: list[str] = []
    for name, batches in drawn.items():

        def remembered(generator: torch.Generator, batches: list[Tensor] = batches) -> Batch:
            batch = on_gpu(generator)
            batches.append(batch.moving.clone())
            threads.append(threading.current_thread().name)
            return batch

        if name == "now":
            monkeypatch.setattr(Batches, "draw_ahead", lambda self, step: None)
        train(network().cuda(), remembered, [Stage(12)], out=tmp_path / name, graphs=graphs, log_every=1)
    assert len(drawn["ahead"]) == len(drawn["now"]) == 12
    assert [name.startswith("draw") for name in threads] == [n >= (4 if graphs else 1) and n < 12 for n in range(24)]
    assert all(torch.equal(a, b) for a, b in zip(*drawn.values(), strict=True))
    losses = [
        [json.loads(line)["losses"]["total"] for line in (tmp_path / name / "log.jsonl").open()] for name in drawn
    ]
    assert losses[0][:8] == pytest.approx(losses[1][:8], rel=2e-2)  # later, rounding has grown


@pytest.mark.gpu
def test_what_goes_wrong_while_drawing_ahead_is_raised(tmp_path: Path) -> None:
    count = 0

    def breaks(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        nonlocal count
        count += 1
        if count == 9:
            raise OSError("the disk is gone")
        return draw(generator)

    with pytest.raises(OSError, match="the disk is gone"):
        train(network().cuda(), breaks, [Stage(20)], out=tmp_path)
    assert count == 9


@pytest.mark.gpu
def test_batches_of_two_shapes_take_turns() -> None:
    """Each shape is captured as a graph of its own; both change the same weights as steps without graphs do."""

    def batch(number: int) -> Batch:
        return Batch(*blobs(torch.Generator().manual_seed(number), 4, 48 if number % 2 else 32).cuda().split(2))

    losses = []
    for graphs in (False, True):
        step = TrainingStep(network().cuda().train(), Stage(20), device=torch.device("cuda"), graphs=graphs)
        losses.append([float(step(batch(number), 1e-5, seed=number).total) for number in range(16)])
        assert len(step.captured) == 2 * graphs
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.gpu
def test_batches_of_ever_new_shapes_are_refused() -> None:
    step = TrainingStep(network().cuda().train(), Stage(99), device=torch.device("cuda"))

    def run(number: int) -> None:
        images = blobs(torch.Generator().manual_seed(number), 4, 32 + number // 5)
        step(Batch(*images.cuda().split(2)), 1e-5, seed=number)

    for number in range(40):
        run(number)
    with pytest.raises(ValueError, match="expected fewer, or graphs=False"):
        run(40)


@pytest.mark.gpu
@pytest.mark.parametrize("label_weight", [0.0, 1.0])
def test_graphs_change_nothing_but_speed(tmp_path: Path, label_weight: float) -> None:
    stage = Stage(8, label_weight=label_weight)
    for graphs in (False, True):
        train(network().cuda(), labelled, [stage], out=tmp_path / str(graphs), graphs=graphs, log_every=1)
    logs = [
        [json.loads(line)["losses"]["total"] for line in (tmp_path / f / "log.jsonl").open()] for f in ("False", "True")
    ]
    assert logs[0] == pytest.approx(logs[1], rel=1e-2)


def test_rotations_inside_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that answers with the identity, behind R and Q, gives R ∘ Q⁻¹: rotations, each way the other's
    inverse, new at every step. The file holds the network alone."""

    seen: list[tuple[Transform, Transform]] = []

    def spy(phi: Transform, inverse: Transform, *images: Tensor, **options: object) -> object:
        seen.append((phi.detach(), inverse.detach()))
        return registration_loss(phi, inverse, *images, **options)

    monkeypatch.setattr("carlreg.training.step.registration_loss", spy)
    torch.manual_seed(0)
    train(gradicon(2, 2, **SMALL), draw, [Stage(2, learning_rate=0.0, rotate=True)], out=tmp_path)
    x = torch.rand(2, 50, 2)
    matrices = []
    for phi, inverse in seen:
        assert torch.allclose(phi(inverse(x)), x, atol=1e-5)
        linear = fit_affine(x, phi(x)).linear  # of an image with equal sides
        assert torch.allclose(linear @ linear.mT, torch.eye(2).expand(2, 2, 2), atol=1e-4)
        assert not torch.allclose(linear, torch.eye(2).expand(2, 2, 2), atol=0.1)
        matrices.append(linear)
    assert not torch.allclose(matrices[0], matrices[1], atol=0.1)
    assert type(load(tmp_path / "last.safetensors")) is TwoStep


def test_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two passes, the loss is that of TwoStep{Φ, Φ}; large images are passed once."""
    seen: list[Transform] = []

    def spy(phi: Transform, inverse: Transform, *images: Tensor, **options: object) -> object:
        seen.append(phi.detach())
        return registration_loss(phi, inverse, *images, **options)

    monkeypatch.setattr("carlreg.training.step.registration_loss", spy)
    moving, fixed = draw(torch.Generator().manual_seed(0))
    model = randomize(network(), moving, fixed).eval().requires_grad_()
    voxels, cpu = fixed[0, 0].numel(), torch.device("cpu")
    expected = [TwoStep(model, model)(moving, fixed), model(moving, fixed)]
    for once_above in (voxels, voxels - 1):
        TrainingStep(model, Stage(1, passes=2, once_above=once_above), device=cpu)(Batch(moving, fixed), 0.0, 0)
    x = torch.rand(2, 50, 2)
    for phi, right in zip(seen, expected, strict=True):
        assert torch.allclose(phi(x), right(x), atol=1e-5)
    assert not torch.allclose(seen[0](x), seen[1](x), atol=1e-3)


def test_a_run_with_rotations_goes_the_same_way(tmp_path: Path) -> None:
    stages = [Stage(2, "diffusion", rotate=True), Stage(3, rotate=True)]
    whole = train(network(), draw, stages, out=tmp_path / "whole")

    class Killed(Exception):  # noqa: N818
        pass

    def kill(progress: Progress) -> None:
        if (progress.stage, progress.step) == (1, 2):
            raise Killed

    with pytest.raises(Killed):
        train(network(), draw, stages, out=tmp_path / "broken", log_every=1, save_every=1, callback=kill)
    model = train(network(), draw, stages, out=tmp_path / "broken", log_every=1, save_every=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))


def test_the_first_step_alone(tmp_path: Path) -> None:
    """The refinements' weights and statistics stay unchanged, also after an interruption."""
    before = network().state_dict()
    stages = [Stage(3, "diffusion", rotate=True, first_step_alone=True)]

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(network(), draw, stages, out=tmp_path, log_every=2, save_every=1, callback=stop)
    model = train(network(), draw, stages, out=tmp_path)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    first = {name for name in before if ".psi." not in f".{name}"}
    assert changed == first
    model = train(model, draw, [Stage(2, rotate=True)], out=tmp_path / "whole")
    assert not all(torch.equal(after[name], model.state_dict()[name]) for name in before.keys() - first)


class Operations(TorchDispatchMode):
    """The names of all PyTorch operations in the block, backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("regularity", ["diffusion", "gradicon"])
def test_a_step_with_rotations_never_waits_for_the_device(regularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it can be captured as a CUDA graph: no value is read back, no numbers come from the host, and nothing is
    factorised. Once constants are made, and without the check of the images, which capturing leaves out."""
    monkeypatch.setattr("carlreg.model.algorithms.check_finite", lambda *_: None)
    step = TrainingStep(
        carl_rot(2, 2, width=4, **SMALL).train(), Stage(1, regularity, rotate=True), device=torch.device("cpu")
    )
    step(Batch(*draw(torch.Generator())), rate=1e-3, seed=0)
    operations, run = Operations(), step._run

    def watched(inputs: tuple[Tensor | None, ...]) -> object:
        assert inputs[-1] is not None
        assert inputs[-1].shape == (4, 2, 3)
        with operations:
            return run(inputs)

    monkeypatch.setattr(step, "_run", watched)
    step(Batch(*draw(torch.Generator())), rate=1e-3, seed=1)
    assert {"roll", "convolution_backward", "_fused_adam_"} <= operations.names
    waits = {"_local_scalar_dense", "lift_fresh", "nonzero", "equal"}
    factorises = {name for name in operations.names if "linalg" in name} - {"linalg_vector_norm"}  # which is but a sum
    assert not operations.names & waits | factorises


def test_a_full_disk_costs_nothing_that_was_saved(tmp_path: Path) -> None:
    """When the disk is full, the run ends with one line, and continues once there is space."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    expected = train(network(), draw, [Stage(6)], out=tmp_path / "whole")
    run = tmp_path / "run"

    def fill(progress: Progress) -> None:
        if progress.step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    try:
        with pytest.raises(
            TrainingError, match=r"last\.safetensors cannot be written: File too large; training has stop"
        ):
            train(network(), draw, [Stage(6)], out=run, save_every=2, log_every=1, callback=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in run.iterdir()) == ["last.safetensors", "log.jsonl", "state.pt"]
    assert torch.load(run / "state.pt", weights_only=True)["step"] == 2
    model = train(network(), draw, [Stage(6)], out=run, save_every=2, log_every=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_log_that_was_cut_off_is_mended(tmp_path: Path) -> None:
    train(network(), draw, [Stage(2)], out=tmp_path, log_every=1, seconds=0)
    (tmp_path / "log.jsonl").write_text('{"stage": 0, "st')
    train(network(), draw, [Stage(2)], out=tmp_path, log_every=1)
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").open()] == [1, 2]


def test_folds_are_those_of_the_step(tmp_path: Path) -> None:
    """An untrained network predicts the identity, which has no folds; random attention has many."""
    seen: list[Progress] = []
    train(gradicon(2, 2, **SMALL), draw, [Stage(1)], out=tmp_path / "identity", callback=seen.append)
    train(network(), draw, [Stage(1)], out=tmp_path / "random", callback=seen.append)
    assert seen[0].folds == 0
    assert seen[1].folds > 10


def test_batch_norm_can_be_frozen(tmp_path: Path) -> None:
    before = network().state_dict()
    score = iter([0.1, 0.2])
    options = {"validate": lambda _: next(score), "validate_every": 1, "metadata": {"name": "mine"}}
    model = train(network(), draw, [Stage(2)], out=tmp_path, freeze_batch_norm=True, **options)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if "running" in name or "num" in name)
    assert not all(torch.equal(after[name], before[name]) for name in before)
    assert {read_metadata(tmp_path / f"{name}.safetensors")["name"] for name in ("best", "last")} == {"mine"}


TOGETHER = [Stage(2, "diffusion"), Stage(2, rotate=True), Stage(1, refine=True)]


def draw_four(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return blobs(generator, 4).double(), blobs(generator, 4).double()


def work_together(rank: int, folder: str) -> None:
    """One of two processes."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for name, frozen in (("frozen", True), ("free", False)):
        out = f"{folder}/{name}"
        model = train(network().double(), shared(draw_four), TOGETHER, out=out, log_every=1, freeze_batch_norm=frozen)
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        torch.save({"weights": model.state_dict(), "gradients": gradients}, f"{folder}/{name}{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    """Half of the batch each, BatchNorm in evaluation mode: the same gradients and weights as from the joined batch.
    With BatchNorm in training mode, whose statistics are of a part, the two still have the same weights."""
    torch.multiprocessing.spawn(work_together, (str(tmp_path),), nprocs=2)
    one = train(network().double(), draw_four, TOGETHER, out=tmp_path / "one", log_every=1, freeze_batch_norm=True)
    results = [torch.load(tmp_path / f"frozen{rank}.pt", weights_only=True) for rank in range(2)]
    for name, parameter in one.named_parameters():
        for result in results:
            assert torch.allclose(result["gradients"][name], parameter.grad, rtol=1e-8, atol=1e-12), name
            assert torch.allclose(result["weights"][name], parameter, rtol=0, atol=1e-9), name
    assert float(parameter.grad.abs().max()) > 0
    entries = [json.loads(line) for line in (tmp_path / "frozen" / "log.jsonl").open()]
    assert len(entries) == 5  # of one process alone
    alone = [json.loads(line) for line in (tmp_path / "one" / "log.jsonl").open()]
    assert [e["losses"]["total"] for e in entries] == pytest.approx([e["losses"]["total"] for e in alone], rel=1e-9)
    free = [torch.load(tmp_path / f"free{rank}.pt", weights_only=True)["weights"] for rank in range(2)]
    assert all(torch.equal(free[0][name], free[1][name]) for name in free[0])


def test_parts_of_a_batch(tmp_path: Path) -> None:
    batch = torch.arange(6)
    assert Team(1, 3).part(batch).tolist() == [1, 4]
    assert sorted(torch.cat([Team(rank, 2).part(batch) for rank in range(2)]).tolist()) == batch.tolist()
    with pytest.raises(ValueError, match="a batch of 6 cannot be shared by 4 processes"):
        Team(0, 4).part(batch)
    assert launch(torch.device("cpu")) == (Team(0, 1), torch.device("cpu"))
    with pytest.raises(ValueError, match="devices is 0"):
        launch(torch.device("cpu"), 0)


def test_the_core_needs_torch_numpy_and_safetensors_alone() -> None:
    """It trains on a bare GPU machine, without the packages for images, commands, plots and several devices."""
    others = {"SimpleITK", "typer", "rich", "h5py", "PIL", "jinja2", "matplotlib", "lightning_fabric", "nibabel"}
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({others}))\n"  # importing one of them fails
        "from carlreg import Stage, train, carl, carl_rot, instance_optimize, registration_loss, save, load\n"
        "import carlreg.training.batches, carlreg.training.step, carlreg.synthesis.contrast\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
