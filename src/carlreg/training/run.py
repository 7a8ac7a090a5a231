"""A training run, from images on disk to a model file: what `carl train` does.

Everything that can be checked is checked before the first step: images, labels, the folder, the model, the device.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import carlreg
from carlreg.fast.devices import choose_device
from carlreg.files.atomic import PathLike
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.training import cache, cohort
from carlreg.training.checkpoint import BOARD, FORMAT, Checkpoint, RunFolder
from carlreg.training.cohort import Cohort, DatasetError
from carlreg.training.distributed import Team, check_batch, launch, ranks
from carlreg.training.logging import Board, picture, plot_curves, wants_board
from carlreg.training.loop import Progress, train
from carlreg.training.monitor import Monitor
from carlreg.training.pairs import Augmentation, TrainingPairs, check_modalities
from carlreg.training.settings import SHARES, Execution, Settings
from carlreg.training.start import Start
from carlreg.training.validation import Validation, is_higher_better

logger = logging.getLogger(__name__)


def run(
    data: PathLike,
    out: PathLike,
    settings: Settings | None = None,
    execution: Execution | None = None,
    *,
    val: PathLike | None = None,
    overwrite: bool = False,
    monitor: Monitor | None = None,
) -> Path:
    """Train on a CSV file or a folder of images, and return the path of the model: the best by validation, or the last.

    A folder `out` that holds a run with the same settings and images is resumed; another run is refused unless
    `overwrite` is set.

    >>> model = run("scans.csv", "run", Settings(steps=20_000))
    """
    settings, execution = settings or Settings(), execution or Execution()
    device = choose_device(execution.device)
    rank, local_rank, size = ranks(execution.devices, execution.nodes)
    check_batch(settings.batch, size)
    monitor = monitor if monitor is not None and rank == 0 else Monitor()
    with_board = wants_board(execution.tensorboard) and rank == 0
    # One process of each machine prepares the images, before it joins the others. They take them from the cache.
    plan = _Plan.make(data, val, settings, execution.cache, monitor) if local_rank == 0 else None
    with RunFolder.claim(out, writes=rank == 0) as folder:
        resumes = plan is not None and rank == 0 and folder.check(plan.config(), overwrite)
        if plan is not None and rank == 0 and not resumes:
            folder.start(plan.config())
        team, device = launch(device, execution.devices, execution.nodes)
        plan = plan or _Plan.make(data, val, settings, execution.cache, monitor)
        session = _Session(plan, folder, monitor, device, team, with_board)
        session.announce(resumes)
        session.train(execution.seconds, "the same command" + " without --overwrite" * overwrite)
        team.shut_down()
        return folder.model_file


@dataclass(frozen=True)
class _Plan:
    """Everything that a run needs, checked and prepared."""

    source: PathLike
    settings: Settings
    start: Start
    network: RegistrationAlgorithm
    grid: tuple[int, ...]
    training: Cohort
    validation: Cohort | None
    prepared: Sequence[cache.Prepared]
    """First the cases for training, then those for validation."""
    maps: Sequence[cache.Prepared]

    @classmethod
    def make(
        cls, source: PathLike, val: PathLike | None, settings: Settings, folder: Path | None, monitor: Monitor
    ) -> _Plan:
        start = Start.of(settings)
        training, validation = cohort.read(source, val=val, fraction=settings.validation_fraction)
        maps = () if settings.label_maps is None else cohort.read_label_maps(settings.label_maps)
        if settings.label_weight and not maps and sum(case.labels is not None for case in training.cases) < 2:
            raise DatasetError(
                f"label_weight is {settings.label_weight:g}, but fewer than two of the training images in {source} "
                "have labels; add label maps, or use a weight of 0"
            )
        images = [*training.cases, *(validation.cases if validation is not None else ())]
        cases, count = [*images, *maps], len(images)
        network = start.network(settings, cache.dimension(images))
        grid = cache.choose_grid(images, start.grid)
        tell = functools.partial(monitor.preparing, total=len(cases))
        prepared = cache.prepare(cases, grid, folder, tell, ct_range=start.ct_range, voxel=start.voxel)
        check_modalities(training, prepared)
        return cls(source, settings, start, network, grid, training, validation, prepared[:count], prepared[count:])

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.network.parameters())

    def config(self) -> dict[str, Any]:
        """A record of the run, for `config.json`."""
        cohorts = {"training": self.training, "validation": self.validation}
        counts = {name: part and {"images": len(part.cases), part.unit: len(part)} for name, part in cohorts.items()}
        count = len(self.training.cases)
        versions = {"carlreg": carlreg.__version__, "torch": torch.__version__, "python": platform.python_version()}
        config = {
            "format": FORMAT,
            "settings": asdict(self.settings),
            "grid": self.grid,
            "ct_range": self.start.ct_range,
            "voxel": self.start.voxel,
            "start": self.start.checksum,
            "data": {"source": os.fspath(self.source), **counts},
            "digests": {
                "training set": cache.digest(self.prepared[:count], self.training),
                "validation set": cache.digest(self.prepared[count:], self.validation),
                "set of label maps": cache.digest(self.maps),
            },
            "parameters": self.parameters,
            "versions": versions,
        }
        return json.loads(json.dumps(config))  # tuples become lists, as they are read back

    def metadata(self, name: str) -> dict[str, str]:
        """The metadata of the model files. `register` reads grid, ct_range and voxel; the licence is inherited."""
        counts = [f"{len(self.training.cases)} images for training"]
        if self.validation is not None:
            counts.append(f"{len(self.validation.cases)} for validation")
        counts += [f"{len(self.maps)} label maps"] * bool(self.maps)
        voxel, licence = self.start.voxel, self.start.metadata.get("licence")
        return {
            "name": name,
            "grid": " ".join(str(side) for side in self.grid),
            "intensities": "0 to 1",
            "ct_range": "{:g} {:g}".format(*self.start.ct_range),
            "orientation": "axes closest to RAS",
            "data": ", ".join(counts),
            "preprocessing": f"of the first image: {self.prepared[0].intensities}",
            "training": json.dumps({"start": self.start.checksum, **asdict(self.settings)}),
            **({} if voxel is None else {"voxel": f"{voxel:g}"}),
            **({} if licence is None else {"licence": licence}),
        }


class _Session:
    """A run on this process's device, with its validation and its logs."""

    def __init__(
        self, plan: _Plan, folder: RunFolder, monitor: Monitor, device: torch.device, team: Team, with_board: bool
    ) -> None:
        self.plan, self.folder, self.monitor, self.device, self.team = plan, folder, monitor, device, team
        settings, count = plan.settings, len(plan.training.cases)
        self.stages = settings.stages()
        self.offsets = [sum(stage.steps for stage in self.stages[:i]) for i in range(len(self.stages) + 1)]
        self.done = self._steps_of(folder.read_checkpoint())
        self.step = self.done
        self.pairs = TrainingPairs(
            plan.training,
            plan.prepared[:count],
            batch=settings.batch,
            device=device,
            augmentation=Augmentation(
                settings.affine_noise,
                settings.flips,
                settings.permutations,
                settings.mirror,
                **{name: getattr(settings, name) for name in SHARES},
            ),
            labelled=settings.overlap_weight > 0,
            maps=plan.maps,
            map_share=settings.map_share,
        )
        self.validation = None
        if plan.validation is not None and team.leads:
            self.validation = Validation(
                plan.validation,
                plan.prepared[count:],
                device=device,
                most_pairs=settings.validation_pairs,
                similarity=settings.similarity,
                precision=settings.precision,
            )
        self.board = Board(folder.path / BOARD, self.done) if with_board else None

    def announce(self, resumes: bool) -> None:
        plan, total = self.plan, self.offsets[-1]
        training, voxel = len(plan.training.cases), plan.start.voxel
        self.monitor.report(
            f"{training} images for training, {len(plan.prepared) - training} for validation, "
            f"{f'{len(plan.maps)} label maps, ' if plan.maps else ''}"
            f"grid {' × '.join(map(str, plan.grid))}{f' with voxels of {voxel:g} mm' if voxel else ''}, "
            f"{plan.parameters / 1e6:.2f} M parameters, on {self.device}"
            + (f" × {self.team.size}" if self.team.size > 1 else "")
        )
        if resumes:
            state = f"resuming after step {self.done} of {total}" if self.done < total else "it is finished"
            self.monitor.report(f"{self.folder.path} already holds this run: {state}")
        if self.validation is not None:
            better = "higher" if is_higher_better(self.validation.measure) else "lower"
            self.unregistered = self.validation.score()
            self.monitor.report(
                f"{len(self.validation.pairs)} validation pairs: {self.unregistered.measure} "
                f"{self.unregistered.value:.4f} unregistered; {better} is better"
            )
        self.monitor.begin(self.done, total)

    def train(self, seconds: float | None, command: str) -> None:
        """`command` is the user's, in words, that would continue."""
        settings = self.plan.settings
        try:
            train(
                self.plan.network.to(self.device),
                self.pairs,
                self.stages,
                out=self.folder,
                seed=settings.seed,
                validate=None if self.validation is None else self._validate,
                validate_every=settings.validate_every,
                save_every=settings.save_every,
                log_every=settings.log_every,
                precision=settings.precision,
                seconds=seconds,
                callback=self._progress if self.team.leads else None,
                metadata=self.plan.metadata(self.folder.path.resolve().name),
                freeze_batch_norm=settings.freeze_batch_norm,
            )
        finally:
            if self.board is not None:
                self.board.close()
        if self.team.leads:
            self._report_unfinished(seconds, command)
            plot_curves(self.folder.path, None if self.validation is None else self.validation.measure)
            self._warn_if_useless()

    def _report_unfinished(self, seconds: float | None, command: str) -> None:
        checkpoint, total = self.folder.read_checkpoint(), self.offsets[-1]
        done = self._steps_of(checkpoint)
        if seconds is not None and done < total:
            again = f"{command} continues from there; its model so far is in {self.folder.path}"
            self.monitor.report(f"stopped after {seconds:g} seconds, at step {done} of {total}: {again}")

    def _steps_of(self, checkpoint: Checkpoint | None) -> int:
        """The number of steps up to a checkpoint, over all stages."""
        return 0 if checkpoint is None else self.offsets[min(checkpoint.stage, len(self.stages))] + checkpoint.step

    def _progress(self, progress: Progress) -> None:
        self.step = self.offsets[progress.stage] + progress.step
        self.monitor.progress(progress, self.step)
        if self.board is not None:
            self.board.progress(progress, self.step)

    def _validate(self, candidate: RegistrationAlgorithm) -> float:
        assert self.validation is not None
        score = self.validation.score(candidate)
        self.monitor.report(f"validation: {score.measure} {score.value:.4f}, folds {score.folds:.3f} %")
        if self.board is not None:
            pair = self.validation.pairs[0]
            image = picture(*self.validation.images(pair), self.validation.transform(candidate, pair))
            self.board.validation(score, image, self.step)
        return score.merit

    def _warn_if_useless(self) -> None:
        checkpoint = self.folder.read_checkpoint()
        if self.validation is None or checkpoint is None or checkpoint.best is None:
            return
        before = self.unregistered
        if checkpoint.best < before.merit:
            logger.warning(
                f"the best model is worse than no registration: {before.measure} {abs(checkpoint.best):.4f}, "
                f"unregistered {before.value:.4f}; train longer, or check the images and labels"
            )
