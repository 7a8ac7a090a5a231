"""The work of a cohort: register a pair into its folder, unless that was done already."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from carlreg.cohort.bids import result_folder
from carlreg.cohort.rows import Row, Status
from carlreg.cohort.work import Slot, Stages
from carlreg.errors import OVERWRITE, ExistsError
from carlreg.fast.devices import choose_device
from carlreg.files.checksums import sha256
from carlreg.files.results import FILES, PAGE, PICTURES, REPORT, THUMBNAIL, WARP, WARPED_LABELS, Report, ResultFolder
from carlreg.files.tables import Pair
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.registration.api import Alignment, Model, ReadPair, align_pair, complete
from carlreg.registration.options import PairInputs, RegisterOptions
from carlreg.registration.progress import Progress
from carlreg.registration.result import make_request
from carlreg.show import report
from carlreg.show.thumbnail import thumbnail


def device_of(slot: Slot, device: str) -> str:
    """The device of a worker: those of one machine share its GPUs."""
    if slot.count == 1 or device not in ("auto", "cuda") or not torch.cuda.is_available():
        return device
    device = f"cuda:{slot.number % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True)
class RegisterPairs:
    """Register pairs with one model and one set of options, each into its folder in `out`."""

    out: Path
    model: Model
    options: RegisterOptions
    keep: frozenset[str]
    """The names of the files to write, beside `report.json` and the thumbnail."""
    full_precision: bool = False
    label_names: Mapping[int, str] = field(default_factory=dict)
    overwrite: bool = False
    overwritten: bool = False
    """Replace results with another model or other options: they are of before the cohort was overwritten."""
    bids: bool = False
    """Name the results as a BIDS derivative."""

    def open(self, slot: Slot) -> Callable[[Pair], Row]:
        """Load the model; with several workers, on this worker's GPU."""
        device = device_of(slot, self.options.device)
        worker = _Worker(self, replace(self.options, device=device))
        stages = Stages(worker.read, worker.compute, worker.write)
        return stages if self._overlaps(device) else stages.__call__

    def _overlaps(self, device: str) -> bool:
        """Whether reading and writing are worth threads of their own: beside a GPU. On a CPU all need the same cores.
        The certainty map is computed after the registration, by the network."""
        return choose_device(device).type == "cuda" and not self.options.certainty

    def folder(self, pair: Pair) -> ResultFolder:
        return result_folder(self.out, pair) if self.bids else ResultFolder(self.out / pair.name)

    def row(self, pair: Pair, status: Status, made: Report) -> Row:
        folder = self.folder(pair)
        held = [name for name in (PAGE, REPORT, THUMBNAIL) if folder[name].is_file()]
        paths = {name: folder[name].relative_to(self.out).as_posix() for name in held}
        page, picture = paths.get(PAGE) or paths.get(REPORT, ""), paths.get(THUMBNAIL, "")
        return Row.of(pair.name, status, made, page=page, thumbnail=picture)


@dataclass(frozen=True, eq=False)
class _Read:
    """A pair whose scans are in memory."""

    pair: Pair
    inputs: PairInputs
    scans: ReadPair
    replaced: bool
    """Whether an older result is in its folder."""


@dataclass(frozen=True, eq=False)
class _Aligned:
    """A pair whose map was found."""

    pair: Pair
    inputs: PairInputs
    found: Alignment
    progress: Progress
    replaced: bool


class _Worker:
    """A worker that has loaded the model."""

    def __init__(self, work: RegisterPairs, options: RegisterOptions) -> None:
        self._work, self._options = work, options
        self._loaded = load_model(work.model, options.device)
        self._checksum = functools.cache(sha256)  # many pairs share an image
        self._for_pictures: LoadedModel | None = None

    def read(self, pair: Pair) -> _Read | Row:
        """Read the scans of a pair, unless it was registered before."""
        work, folder = self._work, self._work.folder(pair)
        folder.check_free(overwrite=True)
        replaced = work.overwrite
        if folder[REPORT].is_file() and not work.overwrite:
            if not (different := self._differences(pair, folder)):
                return work.row(pair, "was done", folder.read_report())
            replaced = work.overwritten and self._is_older(pair, folder)
            if not replaced:
                held = f"{folder.path} holds a registration with {', '.join(different)}"
                raise ExistsError(f"{held}; choose another name, or {OVERWRITE}")
        inputs = PairInputs(**pair.files())
        folder.check_free(overwrite=replaced, inputs=pair.files())
        return _Read(pair, inputs, ReadPair.of(inputs, self._options), replaced)

    def compute(self, read: _Read | Row) -> _Aligned | Row:
        """Find the map."""
        if isinstance(read, Row):
            return read
        progress = Progress()
        found = align_pair(read.inputs, self._model(read.pair), self._options, progress, read=read.scans)
        return _Aligned(read.pair, read.inputs, found, progress, read.replaced)

    def write(self, made: _Aligned | Row) -> Row:
        """Warp and score the scans, and write the folder of the pair."""
        if isinstance(made, Row):
            return made
        work = self._work
        result = complete(made.found, made.inputs, self._options, made.progress, full_precision=work.full_precision)
        result = replace(result, record=replace(result.record, label_names=work.label_names))
        extra = {THUMBNAIL: functools.partial(thumbnail, result)} | (
            {PAGE: functools.partial(report.page, result)} if PAGE in work.keep else {}
        )
        result.save(
            work.folder(made.pair),
            overwrite=made.replaced,
            full_precision=work.full_precision,
            ants_warp=WARP in work.keep,
            extra=extra,
            keep=work.keep,
        )
        return work.row(made.pair, "done", result.record)

    def _model(self, pair: Pair) -> LoadedModel:
        """The model; for pictures that of 2-D images, if no other one was chosen."""
        if not str(pair.fixed).lower().endswith(PICTURES):
            return self._loaded
        if self._for_pictures is None:
            self._for_pictures = self._loaded.for_dimension(2)
        return self._for_pictures

    def _differences(self, pair: Pair, folder: ResultFolder) -> list[str]:
        checksums = {name: self._checksum(path) for name, path in pair.files().items()}
        request = make_request(self._model(pair), self._options, checksums)
        work = self._work
        files = [name for name in (*FILES, WARP) if name in work.keep or name == REPORT]
        if pair.moving_seg is not None and WARPED_LABELS in work.keep:
            files.append(WARPED_LABELS)
        return folder.differences(request, full_precision=work.full_precision, files=files)

    def _is_older(self, pair: Pair, folder: ResultFolder) -> bool:
        """Whether a result differs by its model or its options."""
        asked = make_request(self._model(pair), self._options, {})
        held = folder.read_report().request
        return held is None or (held.model, dict(held.options)) != (asked.model, dict(asked.options))
