"""The training loop.

Everything random at step n follows from the seed and n alone, so that a run that was interrupted and resumed gives the
same result as one that was not.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from carlreg.errors import InputError
from carlreg.fast.precision import Precision
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.files import describe
from carlreg.model.zoo import add_refinement
from carlreg.objective.losses import Loss
from carlreg.training.batches import Batches, Draw
from carlreg.training.checkpoint import LAST, Checkpoint, RunFolder, refuse_other_run
from carlreg.training.distributed import Team, TrainingError
from carlreg.training.stages import Stage
from carlreg.training.step import TrainingStep

logger = logging.getLogger(__name__)

Validate = Callable[[RegistrationAlgorithm], float]
"""Score a model; larger is better. For example the mean Dice of labelled pairs."""


@dataclass(frozen=True)
class Progress:
    """How far a run has got, for a callback."""

    stage: int
    step: int
    """Within the stage, from 1."""
    losses: dict[str, float]
    skipped: int
    """Steps skipped so far because their gradients were not finite."""
    seconds: float
    folds: float
    """Folded share of the step's first pair, in per cent."""


def train(
    model: RegistrationAlgorithm,
    draw: Draw,
    stages: Sequence[Stage],
    *,
    out: str | os.PathLike[str] | RunFolder,
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
    """Train a model on its device and return it in evaluation mode; a new model if a stage adds a refinement.

    The folder `out` gets `last.safetensors`; `state.pt`, from which the same call resumes an interrupted run;
    `best.safetensors`, the best model by `validate`; and `log.jsonl`. On a GPU a step is captured once and replayed as
    a CUDA graph unless `graphs` is False: images must then keep their shape. `seconds` ends the run after that time,
    with a checkpoint. A step whose gradients are not finite changes neither weights nor BatchNorm's statistics; more
    than `most_skipped` of them in a row end the run.

    `metadata` is stored in the model files. `freeze_batch_norm` keeps BatchNorm in evaluation mode, with the model's
    own statistics. If `torch.distributed` is initialised, gradients and BatchNorm's statistics are averaged over the
    processes, and only the first process validates and writes files.

    >>> train(carl(refinements=2), draw, [Stage(1500, "diffusion"), Stage(50_000)], out="run")
    """
    if not stages:
        raise InputError("there are no stages; expected at least one")
    team = Team.current()
    identity = {
        "stages": [asdict(stage) for stage in stages],
        "seed": seed,
        "model": describe(model),  # now, since a model that cannot be saved should not be trained for hours first
        "freeze_batch_norm": freeze_batch_norm,
    }
    with nullcontext(out) if isinstance(out, RunFolder) else RunFolder.claim(out, writes=team.leads) as folder:
        model, at = _resume(model, folder, identity)
        team.barrier()  # until all have read the checkpoint
        folder.truncate_log(at.stage, at.step)
        team.copy_from_leader([*model.parameters(), *model.buffers()])
        run = _Run(
            model=model,
            draw=draw,
            stages=stages,
            folder=folder,
            at=at,
            team=team,
            seed=seed,
            validate=validate if team.leads else None,
            validate_every=validate_every,
            save_every=save_every,
            log_every=log_every,
            precision=precision,
            graphs=graphs,
            start=time.monotonic(),
            seconds=seconds,
            most_skipped=most_skipped,
            callback=callback,
            metadata=metadata,
            freeze_batch_norm=freeze_batch_norm,
        )
        return run.train()


@dataclass
class _Run:
    """A run in progress."""

    model: RegistrationAlgorithm
    draw: Draw
    stages: Sequence[Stage]
    folder: RunFolder
    at: Checkpoint
    team: Team
    seed: int
    validate: Validate | None
    validate_every: int
    save_every: int
    log_every: int
    precision: Precision
    graphs: bool | None
    start: float
    seconds: float | None
    most_skipped: int
    callback: Callable[[Progress], None] | None
    metadata: Mapping[str, str] | None
    freeze_batch_norm: bool

    def train(self) -> RegistrationAlgorithm:
        """Train all remaining stages, or until the time is up."""
        self.device = next(self.model.parameters()).device
        if self.at.stage == len(self.stages) and not (self.folder.path / LAST).exists():
            self.folder.save(self.at, self.model, self.metadata)
        while self.at.stage < len(self.stages) and self._train_stage(self.at.stage):
            pass
        return self.model.eval()

    def _train_stage(self, number: int) -> bool:
        """Train one stage. False if the time is up before its end."""
        stage = self.stages[number]
        if stage.refine and number not in self.at.refined:
            self.model = _refine(self.model, self.seed, number)
            self.at = replace(self.at, refined=(*self.at.refined, number))
        self._training_mode()
        run_step = self.run_step = TrainingStep(
            self.model,
            stage,
            device=self.device,
            precision=self.precision,
            graphs=self.graphs,
            optimizer=self.at.optimizer,
            team=self.team,
        )
        seeds = functools.partial(_seed, self.seed, number)
        batches = Batches(self.draw, seeds, stage.steps, self.device)
        for step in range(self.at.step, stage.steps):
            if self._time_is_up():
                self._save(number, step)
                return False
            loss = run_step(batches.take(step), stage.rate(step), seeds(step) + 1)
            if run_step.is_captured:
                batches.draw_ahead(step + 1)
            done, last = step + 1, step + 1 == stage.steps
            validates = self.validate is not None and (last or done % self.validate_every == 0)
            if last or validates or done % self.log_every == 0:
                self._log(number, done, loss)
            if validates:
                batches.wait()  # a validation may capture graphs of its own
                self._validate(number, done)
            if not last and done % self.save_every == 0:
                self._save(number, done)
        self.at = replace(self.at, stage=number + 1, step=0, skipped=self._skipped(), optimizer=None)
        self.folder.save(self.at, self.model, self.metadata)
        return True

    def _time_is_up(self) -> bool:
        if self.seconds is None:
            return False
        return self.team.as_leader(time.monotonic() - self.start > self.seconds, self.device)

    def _skipped(self) -> int:
        return self.at.skipped + int(self.run_step.skipped)

    def _save(self, stage: int, step: int) -> None:
        adam = self.run_step.optimizer.state_dict()
        at = replace(self.at, stage=stage, step=step, skipped=self._skipped(), optimizer=adam)
        self.folder.save(at, self.model, self.metadata)

    def _log(self, stage: int, step: int, loss: Loss) -> None:
        seconds = time.monotonic() - self.start
        progress = Progress(stage, step, loss.floats(), self._skipped(), seconds, self.run_step.folds())
        self.folder.log(asdict(progress))
        if self.callback is not None:
            self.callback(progress)
        in_a_row = int(self.run_step.skipped_in_a_row)
        if in_a_row > self.most_skipped:
            raise TrainingError(
                f"{in_a_row} steps in a row had gradients that are not finite, up to step {step} of stage {stage}; the "
                f"last good checkpoint is in {self.folder.path}"
            )

    def _validate(self, stage: int, step: int) -> None:
        assert self.validate is not None
        with torch.no_grad():
            score = float(self.validate(self.model.eval()))
        self._training_mode()
        self.folder.log({"stage": stage, "step": step, "validation": score})
        if math.isnan(score):
            logger.warning("validation gave no score at step %d of stage %d", step, stage)
        elif self.at.best is None or score > self.at.best:
            self.at = replace(self.at, best=score)
            self.folder.save_best(self.model, self.metadata)

    def _training_mode(self) -> None:
        self.model.train()
        if self.freeze_batch_norm:
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()


def _resume(
    model: RegistrationAlgorithm, folder: RunFolder, identity: Mapping[str, object]
) -> tuple[RegistrationAlgorithm, Checkpoint]:
    """The model with the weights of the folder's last checkpoint, if it has one, and that checkpoint."""
    at = folder.read_checkpoint()
    if at is None:
        return model, Checkpoint(identity)
    refuse_other_run(folder.path, at.run, identity)
    for stage in at.refined:
        model = _refine(model, at.run["seed"], stage)
    model.load_state_dict(at.weights or {})
    logger.info("resuming at step %d of stage %d", at.step, at.stage)
    return model, replace(at, weights=None)


def _refine(model: RegistrationAlgorithm, seed: int, stage: int) -> RegistrationAlgorithm:
    with torch.random.fork_rng():
        torch.manual_seed(_seed(seed, stage, 0))
        return add_refinement(model)


def _seed(seed: int, stage: int, step: int) -> int:
    """The seed of one step."""
    return ((seed * 1_000_003 + stage) * 10_000_019 + 2 * step) % 2**62
