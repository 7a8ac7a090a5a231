"""Training in stages: diffusion first, then GradICON, then perhaps one more refinement.

Everything random at step n follows from the seed and n alone, so that a run that was broken off and taken up again
goes the same way as one that was not.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carlreg.fast.precision import Precision, mixed_precision
from carlreg.files.atomic import write_atomically
from carlreg.geometry.fitting import random_rotation
from carlreg.geometry.jacobian import folding
from carlreg.geometry.transforms import Affine
from carlreg.model.algorithms import Augmented, RegistrationAlgorithm
from carlreg.model.files import describe, save
from carlreg.model.zoo import add_refinement, first_step
from carlreg.objective.losses import Loss, Regularity, registration_loss
from carlreg.training.distributed import Team

logger = logging.getLogger(__name__)

Draw = Callable[[torch.Generator], tuple[Tensor, ...]]
"""Moving and fixed images of one step, (B, C, *shape) each, chosen with the generator (a CPU one) and nothing else; and
for stages with a `label_weight`, the structures that they show, (B, K, *shape) each, from 0 to 1.

Where several processes train together, each draws its own part of the joined batch, with a generator in the same state
everywhere and left in the same state: `carlreg.distributed.shared` makes such a function of one that draws the whole.
"""

Validate = Callable[[RegistrationAlgorithm], float]
"""How good a model is, larger is better: Dice on labelled pairs, say."""


@dataclass(frozen=True)
class Stage:
    """A stretch of training with one loss."""

    steps: int
    regularity: Regularity = "gradicon"
    weight: float = 1.5
    """λ, of the regulariser."""
    learning_rate: float = 1e-4
    final_learning_rate: float | None = None
    """Where the learning rate ends, along half a cosine; it stays the same if not given."""
    warm_up: int = 0
    """Steps over which the learning rate grows from zero: for an optimiser that starts anew on a trained network."""
    similarity: str = "lncc"
    label_weight: float = 0.0
    """Of the overlap of labels, which must then be drawn with the images. The paper trains without."""
    refine: bool = False
    """Append a refinement, with its last convolution at zero, before the first step."""
    rotate: bool = False
    """Train through `Augmented`, R ∘ Φ[M ∘ R, F ∘ Q] ∘ Q⁻¹, with R and Q drawn from SO(D) at each step. What is saved
    is Φ."""
    first_step_alone: bool = False
    """Leave the refinements out and as they are, and train what comes before them, Ξθ, alone."""

    def rate(self, step: int) -> float:
        """The learning rate at a step of this stage."""
        rate = self.learning_rate
        if self.final_learning_rate is not None:
            half_cosine = 0.5 * (1 + math.cos(math.pi * step / max(self.steps, 1)))
            rate = self.final_learning_rate + (rate - self.final_learning_rate) * half_cosine
        return rate * min(1.0, (step + 1) / (self.warm_up + 1))


PAPER = (Stage(1_500, "diffusion"), Stage(50_000), Stage(50_000, refine=True))
"""The paper's schedule, for a network of two refinements."""
PAPER_ROT = (
    Stage(4_500, "diffusion", 10.5, rotate=True, first_step_alone=True),
    Stage(50_000, rotate=True),
    Stage(50_000, rotate=True, refine=True),
)
"""The same for CARL{ROT}; Ξθ alone first, and its weight, are from the authors' code."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands, for a callback."""

    stage: int
    step: int
    """Of this stage."""
    losses: dict[str, float]
    skipped: int
    """Steps left out so far, since their gradients were not finite."""
    seconds: float
    folds: float
    """Share of the step's first pair that is folded, in per cent."""


class TrainingError(RuntimeError):
    """A run that cannot go on; its last good checkpoint is on disk."""


def train(
    model: RegistrationAlgorithm,
    draw: Draw,
    stages: Sequence[Stage],
    *,
    out: str | os.PathLike[str],
    seed: int = 0,
    validate: Validate | None = None,
    validate_every: int = 500,
    save_every: int = 500,
    log_every: int = 20,
    precision: Precision = "auto",
    graphs: bool | None = None,
    seconds: float | None = None,
    most_skipped: int = 50,
    callback: Callable[[Progress], None] | None = None,
    metadata: Mapping[str, str] | None = None,
    freeze_batch_norm: bool = False,
) -> RegistrationAlgorithm:
    """Train a model, where it is, and return it (another one if a stage refines it), in evaluation mode.

    The folder `out` gets `last.safetensors` and `state.pt`, from which the same call goes on if it was broken off;
    `best.safetensors`, the best by `validate`; and `log.jsonl`. On a GPU a step is captured once and replayed as a
    CUDA graph, unless `graphs` says otherwise: images must then keep their shape. `seconds` ends the run after so
    long, with a checkpoint. A step whose gradients are not finite changes neither weights nor BatchNorm's statistics;
    more than `most_skipped` of them in a row end the run.

    `metadata` goes into the model files. `freeze_batch_norm` keeps BatchNorm in evaluation mode, with the statistics
    that the model came with. Where `torch.distributed` is initialised, gradients and BatchNorm's statistics are
    averaged over the processes, and the first one alone validates and writes files.

    >>> train(carl(refinements=2), draw, [Stage(1500, "diffusion"), Stage(50_000)], out="run")
    """
    if not stages:
        raise ValueError("there are no stages; expected at least one")
    describe(model)  # what cannot be kept in a file should not be trained for hours first
    team = Team.current()
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device
    run = {
        "stages": [asdict(stage) for stage in stages],
        "seed": seed,
        "model": describe(model),
        "freeze_batch_norm": freeze_batch_norm,
    }
    keep = _Files(folder, run, metadata, team)
    model, state = _resume(model, run, folder, device)
    team.wait()  # until all have read it, before it is written anew
    keep.forget_after(state["stage"], state["step"])
    team.copy_from_leader([*model.parameters(), *model.buffers()])
    start = time.monotonic()
    for number in range(state["stage"], len(stages)):
        stage = stages[number]
        if stage.refine and number not in state["refined"]:
            model = _refine(model, seed, number)
            state["refined"].append(number)
        _training_mode(model, freeze_batch_norm)
        state_of_adam = state.pop("optimizer", None)
        runner = TrainingStep(
            model, stage, device=device, precision=precision, graphs=graphs, optimizer=state_of_adam, team=team
        )
        before = state["skipped"]
        for step in range(state["step"], stage.steps):
            if seconds is not None and team.leader_says(time.monotonic() - start > seconds, device):
                state["skipped"] = before + int(runner.skipped)
                keep.checkpoint(model, runner, {**state, "stage": number, "step": step})
                return model.eval()
            choice = torch.Generator().manual_seed(_mix(seed, number, step))
            drawn = [part.to(device, non_blocking=True) for part in draw(choice)]
            labels = _labels_of(drawn) if stage.label_weight else None
            loss = runner(drawn[0], drawn[1], stage.rate(step), _mix(seed, number, step) + 1, labels)
            last = step + 1 == stage.steps
            if last or (step + 1) % log_every == 0:
                state["skipped"] = before + int(runner.skipped)
                passed = time.monotonic() - start
                progress = Progress(number, step + 1, loss.floats(), state["skipped"], passed, runner.folds())
                keep.log(asdict(progress))
                if callback is not None:
                    callback(progress)
                if int(runner.skipped_in_a_row) > most_skipped:
                    raise TrainingError(
                        f"{int(runner.skipped_in_a_row)} steps in a row had gradients that are not finite, up to step "
                        f"{step + 1} of stage {number}; the last good checkpoint is in {folder}"
                    )
            if validate is not None and team.leads and (last or (step + 1) % validate_every == 0):
                _validate(model, validate, state, keep, number, step + 1)
                _training_mode(model, freeze_batch_norm)
            if last or (step + 1) % save_every == 0:
                state["skipped"] = before + int(runner.skipped)
                at = {"stage": number + 1, "step": 0} if last else {"stage": number, "step": step + 1}
                keep.checkpoint(model, None if last else runner, {**state, **at})
        state["step"] = 0
    return model.eval()


def _training_mode(model: nn.Module, freeze_batch_norm: bool) -> None:
    model.train()
    if freeze_batch_norm:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


def _labels_of(drawn: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    if len(drawn) != 4:
        raise ValueError(f"{len(drawn)} tensors were drawn; expected 4 for a stage with a label weight: images, labels")
    return drawn[2], drawn[3]


def _rotations(moving: Tensor, fixed: Tensor, seed: int, team: Team) -> Tensor:
    """R of each moving and Q of each fixed image, (2B, D, D+1), as `both` wants them: one after the other."""
    if moving.shape != fixed.shape:
        raise ValueError(
            f"moving has shape {tuple(moving.shape)} and fixed {tuple(fixed.shape)}; expected the same to rotate them"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        random_rotation(image.shape[2:], team.size * len(image), like=image, generator=generator).matrix
        for image in (moving, fixed)
    ]
    return torch.cat([team.part(matrices) for matrices in drawn])


def _refine(model: RegistrationAlgorithm, seed: int, stage: int) -> RegistrationAlgorithm:
    with torch.random.fork_rng():
        torch.manual_seed(_mix(seed, stage, 0))
        return add_refinement(model)


class TrainingStep:
    """One training step of a stage: losses, gradients and Adam, replayed as a CUDA graph where that is wanted.

    For loops other than `train`: call it with the images, the learning rate and a seed for what is random in the loss,
    rotations among it. `optimizer` is Adam's state to go on from. `skipped` counts the steps that were left out.
    """

    def __init__(
        self,
        model: RegistrationAlgorithm,
        stage: Stage,
        *,
        device: torch.device,
        precision: Precision = "auto",
        graphs: bool | None = None,
        optimizer: dict[str, Any] | None = None,
        team: Team | None = None,
    ) -> None:
        self.model = first_step(model) if stage.first_step_alone else model
        self.stage, self.precision, self.team = stage, precision, team or Team()
        self.on_gpu = device.type == "cuda"
        self.rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.rate, fused=True, capturable=self.on_gpu)
        if optimizer is not None:
            self.optimizer.load_state_dict(optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.generator = torch.Generator(device)
        self.skipped, self.skipped_in_a_row = (torch.zeros((), dtype=torch.long, device=device) for _ in range(2))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = 0
        captured = self.on_gpu and graphs is not False and self.team.size == 1
        # cuBLAS keeps a workspace per stream: graphs captured on one stream could not be replayed side by side.
        self.stream = torch.cuda.Stream() if captured else None

    def __call__(
        self,
        moving: Tensor,
        fixed: Tensor,
        rate: float,
        seed: int,
        labels: tuple[Tensor, Tensor] | None = None,
    ) -> Loss:
        if bool(self.stage.label_weight) != (labels is not None):
            raise ValueError(
                f"labels are {'not ' * (labels is None)}given, and the stage's label weight is "
                f"{self.stage.label_weight:g}; expected them where there is a weight, and nowhere else"
            )
        self.rate.fill_(rate)
        self.generator.manual_seed(seed)
        given = {"moving": moving, "fixed": fixed}
        if self.stage.rotate:
            given["rotations"] = _rotations(moving, fixed, seed, self.team)
        if labels is not None:
            given |= {"moving_labels": labels[0], "fixed_labels": labels[1]}
        if self.stream is None:
            return self._run(**given)
        if self.graph is None and self.warm < 3:  # kernels are chosen and compiled before anything is captured
            self.warm += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = self._run(**given)
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        if self.graph is None:
            self.inputs = {name: part.clone() for name, part in given.items()}
            self.graph = torch.cuda.CUDAGraph()
            self.graph.register_generator_state(self.generator)
            self.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.result = self._run(**self.inputs)
        for name, kept in self.inputs.items():
            new = given[name]
            if new.shape != kept.shape:
                raise ValueError(
                    f"images or labels changed shape from {tuple(kept.shape)} to {tuple(new.shape)} within a stage; "
                    "expected one shape, or graphs=False"
                )
            kept.copy_(new)
        self.graph.replay()
        return self.result

    def folds(self) -> float:
        """Of the last step's first pair, in per cent; NaN where an axis is too short to tell."""
        return math.nan if min(self.image.shape[2:]) < 3 else folding(self.phi, self.image)

    def _run(
        self,
        moving: Tensor,
        fixed: Tensor,
        rotations: Tensor | None = None,
        moving_labels: Tensor | None = None,
        fixed_labels: Tensor | None = None,
    ) -> Loss:
        algorithm = self.model if rotations is None else Augmented(self.model, lambda _: Affine(rotations))
        known = [labels.float() for labels in (moving_labels, fixed_labels) if labels is not None]
        self.optimizer.zero_grad(set_to_none=True)
        statistics = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        before = torch._foreach_add(statistics, 0) if statistics else []
        with mixed_precision(moving.device, self.precision):
            phi, inverse = algorithm.both(moving, fixed)
        loss = registration_loss(
            phi,
            inverse,
            moving,
            fixed,
            similarity=self.stage.similarity,
            regularity=self.stage.regularity,
            weight=self.stage.weight,
            generator=self.generator,
            labels=(known[0], known[1]) if known else None,
            label_weight=self.stage.label_weight,
        )
        loss.total.backward()
        self.phi, self.image = phi[:1].detach(), fixed[:1]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        parts = (loss.total, loss.similarity, loss.regularity, loss.label_loss)
        values = [part.detach().clone() for part in parts if part is not None]
        self.team.average([*gradients, *statistics, *values])  # before the check: all leave out the same steps
        finite = torch.stack(torch._foreach_norm([*gradients, *statistics])).isfinite().all()
        self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]  # Adam leaves such a step out
        self.optimizer.step()
        if statistics:  # BatchNorm's: a bad batch leaves no trace there either
            kept = torch.where(finite, _joined(statistics), _joined(before))
            torch._foreach_copy_(statistics, list(kept.split([buffer.numel() for buffer in statistics])))
        self.skipped += ~finite
        self.skipped_in_a_row.add_(1).mul_(~finite)
        return Loss(*values)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """All values in one vector: one operation on it is cheaper than one on each tensor."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def _mix(seed: int, stage: int, step: int) -> int:
    """A seed for one step."""
    return ((seed * 1_000_003 + stage) * 10_000_019 + 2 * step) % 2**62


def _validate(
    model: RegistrationAlgorithm, validate: Validate, state: dict[str, Any], keep: _Files, stage: int, step: int
) -> None:
    with torch.no_grad():
        score = float(validate(model.eval()))
    logger.info("stage %d, step %d: validation %.4f", stage, step, score)
    keep.log({"stage": stage, "step": step, "validation": score})
    if math.isnan(score):
        logger.warning("validation gave no score at step %d of stage %d", step, stage)
        return
    if state["best"] is None or score > state["best"]:
        state["best"] = score
        keep.best(model)


@dataclass(frozen=True)
class _Files:
    """What a run leaves in its folder. Of several processes, only the first writes."""

    folder: Path
    run: dict[str, Any]
    metadata: Mapping[str, str] | None
    team: Team

    def log(self, entry: dict[str, Any]) -> None:
        if self.team.leads:
            with self._or_stop("log.jsonl") as path, path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")

    def best(self, model: RegistrationAlgorithm) -> None:
        with self._or_stop("best.safetensors") as path:
            save(model, path, metadata=self.metadata)

    def checkpoint(self, model: RegistrationAlgorithm, runner: TrainingStep | None, state: dict[str, Any]) -> None:
        """One file holds all that a run goes on from; `last.safetensors` beside it is for everybody else."""
        if not self.team.leads:
            return
        buffer = io.BytesIO()
        kept = {**state, "run": self.run, "weights": model.state_dict()}
        torch.save({**kept, "optimizer": None if runner is None else runner.optimizer.state_dict()}, buffer)
        with self._or_stop("state.pt") as path:
            write_atomically(path, buffer.getvalue())
        with self._or_stop("last.safetensors") as path:
            save(model, path, metadata=self.metadata)

    def forget_after(self, stage: int, step: int) -> None:
        """Drop from the log what will be done again, and a line that was cut off."""
        path = self.folder / "log.jsonl"
        if self.team.leads and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and _place(line) <= (stage, step)]
            write_atomically(path, "".join(kept).encode())

    @contextmanager
    def _or_stop(self, name: str) -> Iterator[Path]:
        """A file that cannot be written ends the run; those that are there stay as they are."""
        path = self.folder / name
        try:
            yield path
        except OSError as error:
            raise TrainingError(
                f"{path} cannot be written: {error.strerror or error}; training has stopped, what was saved before is "
                "whole: make room, and the same call goes on from the last checkpoint"
            ) from error


def _place(line: str) -> tuple[int, int]:
    entry = json.loads(line)
    return entry["stage"], entry["step"]


def _resume(
    model: RegistrationAlgorithm, run: dict[str, Any], folder: Path, device: torch.device
) -> tuple[RegistrationAlgorithm, dict[str, Any]]:
    """The given model with the weights of a run that was broken off, if there is one, and where it stood."""
    path = folder / "state.pt"
    if not path.exists():
        return model, {"stage": 0, "step": 0, "skipped": 0, "best": None, "refined": []}
    state = torch.load(path, map_location=device, weights_only=True)
    for what, value in state.pop("run").items():
        if value != run[what]:
            raise ValueError(f"{folder} holds a run with another {what}; expected the same {what}, or another folder")
    for stage in state["refined"]:
        model = _refine(model, run["seed"], stage)
    model.load_state_dict(state.pop("weights"))
    if state["optimizer"] is None:
        del state["optimizer"]
    logger.info("going on at step %d of stage %d", state["step"], state["stage"])
    return model, state
