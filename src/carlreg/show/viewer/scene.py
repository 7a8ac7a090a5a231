"""The volumes of a result folder by name, and the match of any point.

The folder may come from a stranger. A path in its report, or a link out of the folder, is followed only to the very
file that was registered, as its checksum shows, or if the user trusts the folder.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from carlreg.errors import InputError, user_message
from carlreg.files import images, transform_files, world_transform
from carlreg.files.checksums import sha256
from carlreg.files.choice import CHOICES, Choice
from carlreg.files.images import Image, ImageError, Matrix, map_points
from carlreg.files.label_names import guess_names
from carlreg.files.results import (
    EXPECTED_ERROR,
    INVERSE,
    NAMES,
    PAGE,
    TRANSFORM,
    WARPED,
    WARPED_LABELS,
    InputRecord,
    Report,
    ResultFolder,
)
from carlreg.files.world_transform import ItkTransform, WorldTransform
from carlreg.registration.options import RegisterOptions
from carlreg.show.display import DOUBLINGS, determinant, grey_scale, high_end

MAP_VOXELS = 2_000_000
"""Largest number of voxels of the Jacobian determinant, which is smooth."""
RAS = np.array([-1.0, -1.0, 1.0])
"""Signs that convert LPS to RAS and back."""
OTHERS = ("initial_transform", "rigid_mask", "moving_rigid_mask")
"""Inputs that are not shown, but needed to register again."""


@dataclass(frozen=True, eq=False)
class Scene:
    """A result folder of `carl register`, with its input images where they can be shown.

    >>> load_scene("out").match(np.zeros(3))["moving"]["lps"]
    """

    folder: Path
    images: Mapping[str, Image]  # "fixed", "moving", "warped", and each of them with "_labels"; "expected_error"
    names: Mapping[str, str]  # the file name of each image
    notes: tuple[str, ...]  # inputs that are missing, have changed or are not shown
    transform: WorldTransform | ItkTransform
    inverse: WorldTransform | ItkTransform
    report: Path | None
    paths: Mapping[str, Path] = field(default_factory=dict)
    """The files of the inputs, by their names in report.json, where they were found and may be used."""
    record: Report | None = None
    """report.json, if it can be read."""

    @functools.cached_property
    def labels(self) -> Mapping[str, list[int]]:
        """The labels of each label map, without the background."""
        maps = {name: image for name, image in self.images.items() if name.endswith("labels")}
        found = {name: [int(n) for n in np.unique(image.data) if n != 0] for name, image in maps.items()}
        return found | ({"warped_labels": found["moving_labels"]} if "moving_labels" in found else {}) | {"folds": [1]}

    @functools.cached_property
    def label_names(self) -> Mapping[int, str]:
        """Names of labels, as recorded, or FreeSurfer's if the labels are its."""
        recorded = {} if self.record is None else self.record.label_names
        return recorded or guess_names(
            {label for name, found in self.labels.items() if name != "folds" for label in found}
        )

    @functools.cached_property
    def determinant(self) -> Image:
        mirrored = self.record is not None and self.record.is_mirrored
        fixed = self.images["warped"]  # on its grid
        return determinant(self.transform, fixed, MAP_VOXELS, mirrored=mirrored)

    @functools.cached_property
    def warped_labels(self) -> Image:
        """The moving image's labels on the fixed image's grid."""
        return world_transform.apply(self.transform, self.images["moving_labels"], self.images["warped"], "nearest")

    @functools.cached_property
    def high_error(self) -> float:
        """Where the colours of the expected error end, as in the report; the warped image stands in for a fixed image
        that is missing."""
        fixed = self.images.get("fixed", self.images["warped"])
        return high_end(self.images["expected_error"], fixed)

    @property
    def volumes(self) -> tuple[str, ...]:
        """Names of all volumes that can be shown."""
        computed = ("jacobian", "folds", *(["warped_labels"] if "moving_labels" in self.images else []))
        return tuple(dict.fromkeys([*self.images, *computed]))

    def volume(self, name: str) -> Image:
        """One of `volumes`. `jacobian` is log₂ det ∇T within ±2; `folds` is 1 where det ∇T is not positive."""
        if name == "jacobian":
            doublings = np.log2(np.clip(self.determinant.data, 1e-6, None))
            return Image(np.clip(doublings, -DOUBLINGS, DOUBLINGS), self.determinant.affine)
        if name == "folds":
            return Image((self.determinant.data <= 0).astype(np.uint8), self.determinant.affine)
        if name == "warped_labels" and name not in self.images:
            return self.warped_labels
        return self.images[name]

    def guide(self) -> list[list[float]]:
        """The pairs of points that guided this result, fixed and moving (2 × 3) in LPS mm."""
        rows, dim = () if self.record is None else self.record.guide, self.transform.dim
        empty = [0.0] * (3 - dim)
        return [[*row[:dim], *empty, *row[dim:], *empty] for row in rows if len(row) == 2 * dim]

    def describe(self) -> dict[str, Any]:
        """What the page needs before it requests volumes."""
        volumes: dict[str, dict[str, Any]] = {"jacobian": {"window": [0.0, DOUBLINGS]}}
        volumes |= {name: {"window": window(image)} for name, image in self.images.items() if name not in self.labels}
        volumes |= {name: {"labels": found} for name, found in self.labels.items()}
        if "expected_error" in self.images:
            volumes["expected_error"] = {"window": [0.0, self.high_error]}
        confidence = None if self.record is None else self.record.to_json().get("confidence")
        return {
            "folder": self.folder.name or str(self.folder),
            "dim": self.transform.dim,
            "notes": self.notes,
            "names": self.names,
            "guide": self.guide(),
            "volumes": volumes,
            "label_names": self.label_names,
            "metrics": {} if self.record is None else self.record.to_json()["metrics"],
            "confidence": confidence,
        }

    @property
    def sides(self) -> list[str]:
        """The names of the images that are not label maps."""
        return [name for name in ("fixed", "warped", "moving") if name in self.images]

    def file(self, name: str) -> Path | None:
        """A file of the result folder itself, by one of its usual names."""
        path = self.folder / name
        inside = name in NAMES and path.is_file() and path.resolve().parent == self.folder.resolve()
        return path if inside else None

    def at(self, side: str, point: Matrix) -> dict[str, Any]:
        """The value of an image at a world point (3,), LPS mm, and the name of the label there, if there is any."""
        found: dict[str, Any] = {"value": _value(self.images[side], point), "label": None}
        if f"{side}_labels" in self.labels and (label := _value(self.volume(f"{side}_labels"), point)):
            found["label"] = self.label_names.get(int(label), f"label {label:g}")
        if "expected_error" in self.images and side != "moving":
            found["expected_error_mm"] = _value(self.images["expected_error"], point)
        return found

    def match(self, point: Matrix, *, start: str = "fixed") -> dict[str, Any]:
        """Map a world point (3,), LPS mm, of the fixed image to the moving one, or back by the inverse.

        The third coordinate of 2-D images is zero.
        """
        function, dim = self.transform if start == "fixed" else self.inverse, self.transform.dim
        other = np.zeros(3)
        other[:dim] = function(point[None, :dim])[0]
        pair = {"fixed": point, "moving": other} if start == "fixed" else {"fixed": other, "moving": point}
        match: dict[str, Any] = {side: {"lps": at.tolist(), "ras": (RAS * at).tolist()} for side, at in pair.items()}
        if "moving" in self.images:
            unit = map_points(self.images["moving"].world_to_unit(), pair["moving"][:dim])
            match["inside"] = bool(((unit >= 0) & (unit <= 1)).all())
        return match


def load_scene(folder: str | os.PathLike[str], *, trust: bool = False) -> Scene:
    """Read a result folder of `carl register` and the input images that its report.json names.

    With `trust`, inputs are read whatever their checksums, and links may lead out of the folder.
    """
    return _Loader(Path(folder), trust).load()


class _Loader:
    """Collects the images of a scene, and notes about those that are not shown."""

    def __init__(self, folder: Path, trust: bool) -> None:
        self.folder, self.trust = folder, trust
        self.images: dict[str, Image] = {}
        self.names: dict[str, str] = {}
        self.notes: list[str] = []
        self.paths: dict[str, Path] = {}
        self.record: Report | None = None
        self.options: Mapping[str, Any] = {}

    def load(self) -> Scene:
        transform, inverse = (transform_files.read(self.result(name)) for name in (TRANSFORM, INVERSE))
        self.add("warped", self.result(WARPED), images.read(self.folder / WARPED))
        inputs = self.recorded_inputs()
        for side in ("fixed", "moving"):
            self.add_input(side, inputs.get(side, InputRecord()))
            self.add_input(f"{side}_labels", inputs.get(f"{side}_seg", InputRecord()))
            self.find_input(f"{side}_mask", inputs)
        for name in OTHERS:
            self.find_input(name, inputs)
        if (labels := self.folder / WARPED_LABELS).is_file():
            self.add("warped_labels", self.result(WARPED_LABELS), images.read_labels(labels))
        if (errors := self.folder / EXPECTED_ERROR).is_file():
            self.add("expected_error", self.result(EXPECTED_ERROR), images.read(errors))
        report = self.result(PAGE) if (self.folder / PAGE).is_file() else None
        notes = tuple(self.notes)
        return Scene(self.folder, self.images, self.names, notes, transform, inverse, report, self.paths, self.record)

    def recorded_inputs(self) -> Mapping[str, InputRecord]:
        try:
            report = ResultFolder(self.folder).read_report()
            self.options, self.record = {} if report.request is None else report.request.options, report
            return report.inputs
        except InputError as error:
            self.notes.append(str(error))
            return {}

    def choice(self, side: str, path: Path) -> Choice:
        """Which series, frame and channel of an input were registered."""
        chosen: dict[str, Any] = {name: self.options.get(name) for name in CHOICES}
        return Choice.of_pair(vars(RegisterOptions(**chosen)), side, path)

    def result(self, name: str) -> Path:
        """The path of one of the folder's own files."""
        path = self.folder / name
        if not path.is_file():
            missing = "it is a file" if self.folder.exists() else "the folder does not exist"
            reason = f"it has no {name}" if self.folder.is_dir() else missing
            raise InputError(f"{self.folder} is not a registration: {reason}; expected a folder of `carl register`")
        if not self.allows(path):
            raise InputError(f"{path} is a link to a file outside the folder; give --trust if you trust the folder")
        return path

    def allows(self, path: Path) -> bool:
        """Whether a path may be shown without a checksum."""
        return self.trust or path.resolve().is_relative_to(self.folder.resolve())

    def add(self, name: str, path: Path, image: Image) -> None:
        self.images[name], self.names[name] = image, path.name

    def add_input(self, name: str, entry: InputRecord) -> None:
        """Add an input of the registration, or a note why it is not shown."""
        labels = name.endswith("labels")
        problem = "" if labels else f"was not found; put it back or into {self.folder}"
        for path in self.candidates(entry.path, f"{name}.nii.gz"):
            try:
                self.add(name, path, self.read_input(path, entry, name))
                self.paths[name.replace("labels", "seg")] = path
                return
            except (ValueError, OSError) as error:
                problem = f"is not shown: {user_message(error)}"
        if problem:
            title = name.replace("_", " ") if labels else f"{name} image"
            recorded = "" if entry.path is None else f", {entry.path!r},"
            self.notes.append(f"the {title}{recorded} {problem}")

    def find_input(self, name: str, inputs: Mapping[str, InputRecord]) -> None:
        """Keep the path of an input that is not shown, if its checksum or the user allows it."""
        entry = inputs.get(name, InputRecord())
        paths = [] if entry.path is None else self.candidates(entry.path, Path(entry.path).name)
        for path in paths:
            with suppress(OSError, ValueError):
                if self.trust or entry.sha256 == sha256(path):
                    self.paths[name] = path
                    return

    def candidates(self, recorded: str | None, usual: str) -> list[Path]:
        """Existing paths where an input may be: the recorded one, then its name or the usual one in the folder."""
        paths = [self.folder / usual]
        if recorded is not None:
            paths = [self.folder / recorded, self.folder / Path(recorded).name, *paths]
        # Even a look at a Windows share sends the user's credentials to its host.
        return [path for path in paths if (self.trust or not path.drive.startswith("\\\\")) and os.path.exists(path)]

    def read_input(self, path: Path, entry: InputRecord, name: str) -> Image:
        """Read an input if its checksums or the user allow it."""
        labels = name not in ("fixed", "moving")
        unchanged = entry.sha256 == sha256(path)
        if unchanged or self.allows(path):
            image = images.read_labels(path) if labels else images.read(path, self.choice(name, path))
            # A header may have its voxels in another file.
            unchanged = unchanged and (labels or entry.sha256_voxels == _voxel_checksum(image))
            if unchanged or self.allows(path):
                if not unchanged and entry.sha256 is not None:
                    self.notes.append(f"{str(path)!r} has changed since the registration")
                return image
        raise InputError("report.json has another checksum or none; give --trust if you trust the folder")


def _voxel_checksum(image: Image) -> str:
    return hashlib.sha256(np.ascontiguousarray(image.data).tobytes()).hexdigest()


def _value(image: Image, point: Matrix) -> float | None:
    """The value of the voxel at a world point, or None outside the image."""
    index = np.rint(map_points(np.linalg.inv(image.affine), point[: image.dim])).astype(int)
    inside = all(0 <= i < n for i, n in zip(index, image.shape, strict=True))
    return float(image.data[tuple(index)]) if inside else None


def window(image: Image) -> tuple[float, float] | None:
    """The range of values to display; None leaves it to the viewer."""
    try:
        return next(iter(grey_scale(image).windows.values()))
    except ImageError:  # a constant image, for example
        return None


def nifti(image: Image) -> bytes:
    """Encode an image as a 3-D NIfTI file of a type that NiiVue reads."""
    data, affine = image.data, image.affine
    if data.dtype.itemsize == 8 or data.dtype == np.uint32:
        data = data.astype(np.float32)
    if image.dim == 2:
        data, affine = data[..., None], np.eye(4)
        affine[:2, :2], affine[:2, 3] = image.affine[:2, :2], image.affine[:2, 2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "volume.nii"
        images.write(Image(data, affine, image.name), path)
        return path.read_bytes()
