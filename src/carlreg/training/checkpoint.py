"""The folder of a run: its files, the checkpoint that it resumes from, and whether it holds the same run."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carlreg.errors import ExistsError, InputError
from carlreg.files.atomic import PathLike, only_writer, write_atomically
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.files import save
from carlreg.training.distributed import TrainingError
from carlreg.training.settings import MAY_CHANGE

FORMAT, EARLIER = "carlreg-run-2", ("carlreg-run-1",)
STATE, LAST, BEST, LOG = "state.pt", "last.safetensors", "best.safetensors", "log.jsonl"
CONFIG, CURVES, BOARD = "config.json", "curves.png", "tensorboard"
FILES = (CONFIG, STATE, LAST, BEST, LOG, CURVES)


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run resumes from."""

    run: Mapping[str, Any]
    """Model, stages and seed: a run with others does not resume from here."""
    stage: int = 0
    """Stage of the next step; the number of stages if all of them are finished."""
    step: int = 0
    skipped: int = 0
    best: float | None = None
    """The best validation score so far; larger is better."""
    refined: tuple[int, ...] = ()
    """Stages that have appended their refinement."""
    weights: Mapping[str, Tensor] | None = None
    optimizer: dict[str, Any] | None = None


@dataclass(frozen=True)
class RunFolder:
    """The files of a run. If several processes train together, only the leading one writes."""

    path: Path
    writes: bool = True

    @classmethod
    @contextmanager
    def claim(cls, path: PathLike, *, writes: bool = True) -> Iterator[RunFolder]:
        """Make the folder and lock it, so that no second run writes there, and remove what a killed run left behind."""
        folder = cls(Path(path), writes)
        if folder.path.exists() and not folder.path.is_dir():
            raise ExistsError(f"{path} is a file; expected a folder for the run")
        if not writes:
            yield folder
            return
        busy = ExistsError(f"{path} is in use by another training run; wait for it to end, or choose another folder")
        with only_writer(path, busy):
            for leftover in filter(_is_leftover, folder.path.iterdir()):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield folder

    @property
    def model_file(self) -> Path:
        """The best model, or the last one if none was validated."""
        return self.path / (BEST if (self.path / BEST).exists() else LAST)

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append a line to the log."""
        if self.writes:
            with self._writing(LOG) as path, path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")

    def save_best(self, model: RegistrationAlgorithm, metadata: Mapping[str, str] | None) -> None:
        with self._writing(BEST) as path:
            save(model, path, metadata=metadata)

    def save(
        self, checkpoint: Checkpoint, model: RegistrationAlgorithm, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write the model, then the checkpoint: whenever the run is killed, a finished checkpoint has its model."""
        if not self.writes:
            return
        with self._writing(LAST) as path:
            save(model, path, metadata=metadata)
        content = {field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)}
        buffer = io.BytesIO()
        torch.save({**content, "refined": list(checkpoint.refined), "weights": model.state_dict()}, buffer)
        with self._writing(STATE) as path:
            write_atomically(path, buffer.getvalue())
        if checkpoint.best is None and (self.path / CONFIG).exists():
            (self.path / BEST).unlink(missing_ok=True)  # of a run that this one replaces

    def read_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint, on the CPU; None if there is none yet."""
        path = self.path / STATE
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            return Checkpoint(**{**content, "refined": tuple(content["refined"])})
        except FileNotFoundError:
            return None
        except (RuntimeError, ValueError, TypeError, KeyError, EOFError, pickle.UnpicklingError) as error:
            raise InputError(
                f"{path} is damaged ({type(error).__name__}); delete it to train from the start, or restore a copy"
            ) from error

    def truncate_log(self, stage: int, step: int) -> None:
        """Remove lines about later steps, which will be repeated, and lines that were cut off."""
        path = self.path / LOG
        if self.writes and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            write_atomically(path, "".join(line for line in lines if _is_until(line, stage, step)).encode())

    def check(self, config: Mapping[str, Any], overwrite: bool = False) -> bool:
        """Whether the folder holds this run, which is then resumed. Raises if it holds another run, or other files."""
        names = sorted(entry.name for entry in self.path.iterdir() if not _is_leftover(entry))
        if not names:
            return False
        before = _read_json(self.path / CONFIG)
        damaged = before is None and CONFIG in names and {*names} <= {*FILES, BOARD}
        if not damaged and (before is None or before.get("format") not in (FORMAT, *EARLIER)):
            raise ExistsError(
                f"{self.path} holds {names[0]}, but no run of carl train; expected a new or empty folder, or that of a "
                "run"
            )
        if overwrite:
            return False
        if before is not None and before["format"] in EARLIER:
            raise InputError(
                f"{self.path} holds a run of an earlier version, which did not record what it was trained and validated "
                "with; choose another folder, or start again with --overwrite"
            )
        try:
            refuse_other_run(self.path, _identity(before or {}), _identity(config))
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{self.path / CONFIG} is damaged; choose another folder, or start again with --overwrite"
            ) from error
        return True

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin a new run. Models of an earlier one stay until this run has its own."""
        for name in (STATE, LOG, CURVES):  # the state first: it must never be beside the config of another run
            (self.path / name).unlink(missing_ok=True)
        for events in (self.path / BOARD).glob("events.out.tfevents.*"):
            events.unlink()
        write_atomically(self.path / CONFIG, (json.dumps(config, indent=2) + "\n").encode())

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        """A file that cannot be written ends the run; existing files stay as they are."""
        path = self.path / name
        try:
            yield path
        except OSError as error:
            raise TrainingError(
                f"{path} cannot be written: {error.strerror or error}; training has stopped, earlier files are intact: "
                "free some space and run the same command, without --overwrite, to resume from the last checkpoint"
            ) from error


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in a run's config that must be the same for the run to be resumed."""
    settings = {name: value for name, value in config["settings"].items() if name not in MAY_CHANGE}
    prepared = {name: config[name] for name in ("grid", "ct_range", "voxel")}
    return {**settings, **prepared, "starting weights": config["start"], **config["digests"]}


def _read_json(path: Path) -> dict[str, Any] | None:
    """A file's JSON object, or None if it has none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _is_leftover(path: Path) -> bool:
    """Whether this was being written when a run was killed."""
    return any(path.name.startswith(f".{name}.") for name in FILES)


def refuse_other_run(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise if a folder holds a run that differs in anything that decides its outcome."""
    for name, value in now.items():
        if before.get(name) != value:
            values = f" ({before.get(name)}, now {value})"
            difference = name.replace("_", " ") + (values if len(values) < 60 else "")
            raise InputError(
                f"{folder} holds a run with another {difference}; repeat the command that started it to resume it, "
                "choose another folder, or start again with --overwrite"
            )


def _is_until(line: str, stage: int, step: int) -> bool:
    try:
        entry = json.loads(line)
        return line.endswith("\n") and (entry["stage"], entry["step"]) <= (stage, step)
    except (ValueError, KeyError, TypeError):
        return False
