"""`carl segment`: labels for a scan, from scans that have labels.

Every atlas is registered to the scan; its labels vote (see `fusion`).
"""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import carlreg
from carlreg.atlases.fusion import DEFAULT, Fused, FusionSettings, fuse
from carlreg.atlases.inputs import Atlas, list_atlases, read_atlas, read_each, read_scan
from carlreg.atlases.options import SegmentOptions
from carlreg.atlases.pack import is_pack, read_pack, smallest_type
from carlreg.atlases.work import REQUEST, Keep, Registered, Task, check_workers, register_each, source_of
from carlreg.errors import OVERWRITE, ExistsError, InputError
from carlreg.fast.devices import choose_device
from carlreg.files import images
from carlreg.files.atomic import PathLike, refuse_inputs, refuse_result, write_atomically, write_together
from carlreg.files.images import Image
from carlreg.files.label_names import Names, guess_names, read_names
from carlreg.model.loaded import SOFT_TISSUE, load_model
from carlreg.objective.losses import local_correlation
from carlreg.preparation import FOREGROUND, preprocess
from carlreg.registration.api import Model
from carlreg.registration.options import PairInputs, RegisterOptions

logger = logging.getLogger(__name__)

LABELS, UNCERTAINTY, VOLUMES, RECORD = "labels.nii.gz", "uncertainty.nii.gz", "volumes.csv", "segment.json"
PROBABILITY = "probability_{}.nii.gz"
REGISTRATIONS, WORK = "registrations", ".carl-work"
"""The folders of registrations that are kept, and of those that are removed once the labels are written."""
QUICK_SIGMA = 2.0


@dataclass(frozen=True)
class Volume:
    """A structure of a segmentation. The fields are the columns of `volumes.csv`."""

    label: int
    name: str
    voxels: int
    volume_mm3: float
    """Of 2-D images, the area in mm²."""
    expected_volume_mm3: float
    """The sum of its probability: for small structures, less biased than counting voxels."""
    uncertainty_bits: float
    """The mean uncertainty of its voxels."""


@dataclass(frozen=True, eq=False)
class Segmentation:
    """The labels of a scan."""

    labels: Image
    uncertainty: Image
    """How much the atlases disagree: the entropy of the votes, in bits."""
    volumes: tuple[Volume, ...]
    fused: Fused
    record: Mapping[str, Any]
    """How it was made, as in `segment.json`."""

    def probability(self, label: int) -> Image:
        """The share of the votes for a label."""
        values = self.fused.probability(label).cpu().numpy()
        return Image(np.round(values, 3), self.labels.index_to_world(), f"probability of {label}")

    def save(self, folder: PathLike, *, probabilities: bool = False, overwrite: bool = False) -> Path:
        """Write `labels.nii.gz`, `uncertainty.nii.gz`, `volumes.csv` and `segment.json`, and with `probabilities` a map
        for each structure, `probability_LABEL.nii.gz`. All appear together or not at all."""
        target = Path(folder)
        with write_together(target, _names(target), last=RECORD, overwrite=overwrite) as staging:
            images.write(self.labels, staging / LABELS)
            images.write(self.uncertainty, staging / UNCERTAINTY)
            if probabilities:
                for one in self.volumes:
                    images.write(self.probability(one.label), staging / PROBABILITY.format(one.label))
            write_atomically(staging / VOLUMES, self.table().encode())
            write_atomically(staging / RECORD, (json.dumps(self.record, indent=2) + "\n").encode())
        return target

    def table(self) -> str:
        """The content of `volumes.csv`."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [one.name for one in fields(Volume)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(one) for one in self.volumes)
        return text.getvalue()


def _names(folder: Path) -> list[str]:
    """The names of the files of a segmentation, and of the probability maps that a folder holds."""
    found = (path.name for path in folder.glob(PROBABILITY.format("*")))
    maps = [name for name in found if re.fullmatch(PROBABILITY.format(r"\d+"), name)]
    return [LABELS, UNCERTAINTY, VOLUMES, RECORD, *maps]


Atlases = PathLike | Mapping[str, tuple[Any, Any]] | Sequence[Atlas]


def read_atlases(
    source: Atlases, *, skip_bad: bool = False, label_names: PathLike | Names | None = None
) -> tuple[list[Atlas], dict[int, str]]:
    """Labelled scans, and the names of their labels: from a folder with NAME.nii.gz and NAME_labels.nii.gz, a CSV file
    with the columns image and labels, a `.carlatlas` file, or a mapping from names to an image and its labels.

    The names are those in `label_names`, in the pack, in `label_names.csv` of the folder, or FreeSurfer's if the labels
    can hardly be others.
    """
    names: dict[int, str] = {}
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes)):
        atlases = list(source)
    elif isinstance(source, Mapping):
        atlases = _checked(list(source.items()), skip_bad)
    elif is_pack(source):
        packed, names = read_pack(source)
        atlases = _checked([(one.name, (one.image, one.labels)) for one in packed], skip_bad)
    else:
        atlases = _checked(list_atlases(source), skip_bad)
        beside = Path(source) / "label_names.csv"
        names = read_names(beside) if beside.is_file() else {}
    if label_names is not None:
        names = read_names(label_names)
    if len({one.image.dim for one in atlases}) > 1:
        raise InputError("some atlases are 2-D and others 3-D; expected the same")
    return atlases, names or guess_names(sorted({int(n) for one in atlases for n in np.unique(one.labels.data)}))


def _checked(sources: list[tuple[str, Any]], skip_bad: bool) -> list[Atlas]:
    skipped: Callable[[str], None] = lambda text: logger.warning("%s", text)  # noqa: E731
    return read_each(sources, read_atlas, what="atlases", least=1, skip_bad=skip_bad, skipped=skipped)


def segment(
    scan: Any,
    atlases: Atlases,
    *,
    out: PathLike | None = None,
    model: Model = "default",
    workers: int = 1,
    label_names: PathLike | Names | None = None,
    probabilities: bool = False,
    keep_registrations: bool = False,
    skip_bad: bool = False,
    overwrite: bool = False,
    settings: FusionSettings = DEFAULT,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Segmentation:
    """Find the labels of a scan, which is anything that `register` accepts, from atlases (see `read_atlases`).

    `options` are the fields of `SegmentOptions`, `settings` those of the fusion. With `out`, the result is saved there;
    if it is stopped, the same call does not repeat finished registrations. `keep_registrations` writes those of all
    atlases to `out/registrations`. `workers` are processes that register at the same time.

    >>> result = segment("scan.nii.gz", "atlases", out="labels")
    """
    chosen, show = SegmentOptions(**options), progress or (lambda _: None)
    check_workers(workers)
    if out is not None:
        refuse_result(out, _names(Path(out)), last=RECORD, overwrite=overwrite)
    show("reading")
    _, image = read_scan("scan", scan)
    found, names = read_atlases(atlases, skip_bad=skip_bad, label_names=label_names)
    if found[0].image.dim != image.dim:
        raise InputError(f"{image.name} is {image.dim}-D but the atlases are {found[0].image.dim}-D; expected the same")
    if out is not None:
        paths = [path for one in found for path in (one.path, one.labels_path)]
        refuse_inputs((Path(out) / name for name in _names(Path(out))), [scan, atlases, label_names, *paths])
        if keep_registrations and not overwrite:
            _refuse_others(Path(out) / REGISTRATIONS, found)
    loaded = load_model(model, choose_device(chosen.device)).for_dimension(image.dim)
    used = loaded if workers == 1 else model  # each process loads its own
    job = _Job(source_of(image, scan), image, used, chosen, workers, show)
    selected, likeness = job.select(found)
    work = None if out is None else Path(out) / (REGISTRATIONS if keep_registrations else WORK)
    stack, voters, seconds = job.register(selected, work, "all" if keep_registrations else "warped")
    show("fusing")
    fused = _fused(job.scaled_scan(), stack, voters, chosen, settings)
    record = {
        "versions": {"carlreg": carlreg.__version__, "torch": torch.__version__},
        "model": loaded.provenance,
        "options": asdict(chosen),
        "fusion": asdict(settings),
        "atlases": [
            {"name": one.name, "similarity": likeness.get(one.name), "seconds": seconds[one.name]} for one in selected
        ],
        "not_used": [one.name for one in found if one not in selected],
    }
    result = _segmentation(fused, image, names, record)
    if out is not None:
        result.save(out, probabilities=probabilities, overwrite=overwrite)
        if not keep_registrations:
            shutil.rmtree(Path(out) / WORK, ignore_errors=True)
    return result


def _refuse_others(folder: Path, atlases: Sequence[Atlas]) -> None:
    """Raise if a folder of an atlas holds anything but a registration by an earlier run."""
    for one in (folder / atlas.name for atlas in atlases):
        if any(one.glob("*")) and not (one / REQUEST).is_file():
            raise ExistsError(f"{one} exists already; choose another folder, or {OVERWRITE}")


@dataclass(frozen=True, eq=False)
class _Job:
    given: Any
    scan: Image
    model: Model
    options: SegmentOptions
    workers: int
    show: Callable[[str], None]

    def scaled_scan(self) -> Tensor:
        return scaled(self.scan, window_of(self.scan))

    def select(self, atlases: Sequence[Atlas]) -> tuple[list[Atlas], dict[str, float]]:
        """The atlases that resemble the scan most once the network has aligned them, and how much each does."""
        count = self.options.chosen(len(atlases))
        if count == len(atlases):
            return list(atlases), {}
        quick = replace(self.options.register_options(), io_iterations=0)
        scan, likeness = self.scaled_scan(), {}
        inside = scan > FOREGROUND
        by_name = {one.name: one for one in atlases}
        for number, done in enumerate(self._each(atlases, quick, None, "warped"), 1):
            self.show(f"comparing, {number} of {len(atlases)}")
            assert done.warped is not None
            warped = scaled(done.warped[0], window_of(by_name[done.name].image))
            correlation = local_correlation(warped[None, None], scan[None, None], QUICK_SIGMA)[0, 0]
            likeness[done.name] = round(float(correlation[inside].mean()), 4)
        ranked = sorted(atlases, key=lambda one: -likeness[one.name])[:count]
        return [one for one in atlases if one in ranked], likeness

    def register(
        self, atlases: Sequence[Atlas], folder: Path | None, keep: Keep
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """The images (M, *shape), from 0 to 1, and labels of the atlases on the scan's voxels; seconds of each."""
        number = {one.name: n for n, one in enumerate(atlases)}
        largest = max(int(one.labels.data.max()) for one in atlases)
        kind = torch.int16 if largest < 2**15 else torch.int32
        stack = torch.zeros(len(atlases), *self.scan.shape, dtype=torch.float16)
        voters, seconds = torch.zeros(stack.shape, dtype=kind), {}
        self.show(f"registering, 0 of {len(atlases)}")
        for done in self._each(atlases, self.options.register_options(), folder, keep):
            assert done.warped is not None
            image, labels = done.warped
            at = number[done.name]
            stack[at] = scaled(image, window_of(atlases[at].image)).half()
            voters[at] = torch.from_numpy(labels.data.astype(np.int64)).to(kind)
            seconds[done.name] = done.seconds
            self.show(f"registering, {len(seconds)} of {len(atlases)}")
        return stack, voters, seconds

    def _each(
        self, atlases: Sequence[Atlas], options: RegisterOptions, folder: Path | None, keep: Keep
    ) -> Iterator[Registered]:
        tasks = [
            Task(
                one.name,
                PairInputs(
                    fixed=self.given,
                    moving=source_of(one.image, one.path),
                    moving_seg=source_of(one.labels, one.labels_path),
                ),
                None if folder is None else folder / one.name,
            )
            for one in atlases
        ]
        return register_each(tasks, self.model, options, keep, self.workers)


def window_of(image: Image) -> tuple[float, float]:
    """The intensities that become 0 and 1."""
    _, done = preprocess(image, ct_range=SOFT_TISSUE)
    return done.low, done.high


def scaled(image: Image, window: tuple[float, float]) -> Tensor:
    """(*shape): intensities from 0 to 1. Warped scans are scaled as they were before: they may lack their extremes."""
    low, high = window
    return ((torch.from_numpy(image.data.astype(np.float32)) - low) / (high - low)).clamp(0, 1)


def _fused(scan: Tensor, stack: Tensor, voters: Tensor, options: SegmentOptions, settings: FusionSettings) -> Fused:
    """Fuse on the device, or on the CPU if it has too little memory."""
    device = choose_device(options.device)
    try:
        return fuse(scan.to(device), stack.to(device), voters.to(device), options.fusion, settings)
    except torch.cuda.OutOfMemoryError:
        logger.warning("the GPU has too little memory to fuse labels: they are fused on the CPU, which is slower")
    return fuse(scan, stack, voters, options.fusion, settings)


def _segmentation(fused: Fused, scan: Image, names: Names, record: Mapping[str, Any]) -> Segmentation:
    values = [int(value) for value in fused.values.tolist()]
    data = fused.labels.cpu().numpy().astype(smallest_type(max(values)))
    entropy = np.round(fused.entropy.cpu().numpy(), 3)
    voxel = float(np.prod(scan.spacing))
    agreed, counts = np.unique(data[~fused.active.cpu().numpy()], return_counts=True)
    sure = dict(zip(agreed.tolist(), counts.tolist(), strict=True))
    shares = fused.shares.float().sum(dim=1).tolist()
    volumes = [
        Volume(
            label,
            names.get(label, ""),
            count := int((data == label).sum()),
            round(count * voxel, 3),
            round((sure.get(label, 0) + share) * voxel, 3),
            round(float(entropy[data == label].mean()), 4) if count else 0.0,
        )
        for label, share in zip(values, shares, strict=True)
        if label
    ]
    affine = scan.index_to_world()
    return Segmentation(
        Image(data, affine, "labels"), Image(entropy, affine, "uncertainty"), tuple(volumes), fused, record
    )
