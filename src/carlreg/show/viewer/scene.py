"""What a folder of `carl register` has to show: volumes by name, and the match of any point."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from carlreg import preparation
from carlreg.files import images, transform_files, world_transform
from carlreg.files.checksums import sha256
from carlreg.files.images import Image, Matrix, map_points
from carlreg.files.world_transform import ItkTransform, WorldTransform
from carlreg.geometry.grids import Grid
from carlreg.show.report import CT_WINDOWS, DOUBLINGS, display_shape

FORWARD, INVERSE, WARPED, WARPED_LABELS = "transform.h5", "inverse_transform.h5", "warped.nii.gz", "warped_seg.nii.gz"
MAP_VOXELS = 2_000_000
"""Of the map of volume changes at most: it is smooth."""
RAS = np.array([-1.0, -1.0, 1.0])
"""Signs that turn LPS into RAS, and back."""


@dataclass(frozen=True, eq=False)
class Scene:
    """A folder of `carl register`, and the images that it was made from where they still are.

    >>> find("out").match(np.zeros(3))["moving"]["lps"]
    """

    folder: Path
    files: Mapping[str, Path]  # "fixed", "moving", "warped", and each of them with "_labels"
    notes: tuple[str, ...]  # what is missing or has changed, in words

    @functools.cached_property
    def transform(self) -> WorldTransform | ItkTransform:
        return transform_files.read(self.folder / FORWARD)

    @functools.cached_property
    def inverse(self) -> WorldTransform | ItkTransform:
        return transform_files.read(self.folder / INVERSE)

    @functools.cached_property
    def images(self) -> dict[str, Image]:
        """Every file's image."""
        return {
            name: (images.read_labels if name.endswith("labels") else images.read)(path)
            for name, path in self.files.items()
        }

    @functools.cached_property
    def determinant(self) -> Image:
        """det ∇T over the fixed image, no finer than a display needs."""
        fixed = self.images["warped"]  # has the fixed image's grid
        shape = display_shape(fixed, MAP_VOXELS)
        affine = fixed.unit_to_world() @ np.diag([*Grid.of(shape).spacing, 1.0])
        return world_transform.jacobian_determinant(self.transform, Image(np.zeros(shape, np.uint8), affine))

    @functools.cached_property
    def warped_labels(self) -> Image:
        """The moving image's labels on the fixed image's grid."""
        return world_transform.apply(self.transform, self.images["moving_labels"], self.images["warped"], "nearest")

    @property
    def volumes(self) -> tuple[str, ...]:
        """The names of everything that there is to see."""
        computed = ("jacobian", "folds", *(["warped_labels"] if "moving_labels" in self.files else []))
        return tuple(dict.fromkeys([*self.files, *computed]))

    def volume(self, name: str) -> Image:
        """One of `volumes`. `jacobian` is log₂ det ∇T within ±2, `folds` is 1 where det ∇T is not above zero."""
        if name == "jacobian":
            doublings = np.log2(np.clip(self.determinant.data, 1e-6, None))
            return Image(np.clip(doublings, -DOUBLINGS, DOUBLINGS), self.determinant.affine)
        if name == "folds":
            return Image((self.determinant.data <= 0).astype(np.uint8), self.determinant.affine)
        if name == "warped_labels" and name not in self.files:
            return self.warped_labels
        return self.images[name]

    def describe(self) -> dict[str, Any]:
        """What a page needs to know before it asks for volumes."""
        about: dict[str, dict[str, Any]] = {"jacobian": {"window": [0.0, DOUBLINGS]}, "folds": {"labels": 1}}
        for name, image in self.images.items():
            labels = name.endswith("labels")
            about[name] = {"labels": int(image.data.max())} if labels else {"window": _window(image)}
        if "moving_labels" in about:
            about.setdefault("warped_labels", about["moving_labels"])
        names = {name: path.name for name, path in self.files.items()}
        return {"dim": self.transform.dim, "notes": self.notes, "names": names, "volumes": about}

    def match(self, point: Matrix, *, start: str = "fixed") -> dict[str, Any]:
        """A world point (3,) in LPS mm of the fixed image, and its match on the moving one. Or from the moving image,
        by the inverse. For 2-D images the third coordinate is zero."""
        function, dim = self.transform if start == "fixed" else self.inverse, self.transform.dim
        other = np.zeros(3)
        other[:dim] = function(point[None, :dim])[0]
        pair = {"fixed": point, "moving": other} if start == "fixed" else {"fixed": other, "moving": point}
        found: dict[str, Any] = {side: {"lps": at.tolist(), "ras": (RAS * at).tolist()} for side, at in pair.items()}
        if "moving" in self.files:
            unit = map_points(self.images["moving"].world_to_unit(), pair["moving"][:dim])
            found["inside"] = bool(((unit >= 0) & (unit <= 1)).all())
        return found


def find(folder: str | os.PathLike[str]) -> Scene:
    """What can be shown of a folder of `carl register`; its report.json says where the two images are."""
    place = Path(folder)
    for name in (FORWARD, INVERSE, WARPED):
        if not (place / name).is_file():
            what = f"it has no {name}" if place.is_dir() else "there is no such folder"
            raise ValueError(f"{folder} is no registration: {what}; expected a folder that `carl register` wrote")
    inputs, files, notes = _inputs(place), dict[str, Path](), list[str]()
    for side in ("fixed", "moving"):
        described = inputs.get(side, {})
        path = _locate(place, described, f"{side}.nii.gz")
        if path is None:
            stated = f", {described['path']}," if "path" in described else ""
            notes.append(f"the {side} image{stated} was not found, so it is not shown: put it back or into {place}")
            continue
        files[side] = path
        if path.is_file() and described.get("sha256") not in (None, sha256(path)):
            notes.append(f"the {side} image, {path}, is not the file that was registered: it has changed")
    files["warped"] = place / WARPED
    for side in ("fixed", "moving"):
        if labels := _locate(place, inputs.get(f"{side}_seg", {}), f"{side}_labels.nii.gz"):
            files[f"{side}_labels"] = labels
    if (place / WARPED_LABELS).is_file():
        files["warped_labels"] = place / WARPED_LABELS
    return Scene(place, files, tuple(notes))


def _inputs(folder: Path) -> dict[str, dict[str, Any]]:
    """What the report says of each input; nothing where it is missing or damaged."""
    try:
        found = json.loads((folder / "report.json").read_text(encoding="utf-8"))["inputs"]
        return {str(name): described for name, described in found.items() if isinstance(described, dict)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _locate(folder: Path, described: Mapping[str, Any], usual: str) -> Path | None:
    """An input where the report says, or in the folder itself under its own or the usual name."""
    stated = [Path(described["path"])] if isinstance(described.get("path"), str) else []
    places = [*stated, *(folder / path.name for path in stated), folder / usual]
    return next((path for path in places if path.exists()), None)


def _window(image: Image) -> list[float] | None:
    """From which value to which an image is shown; None leaves it to the viewer."""
    try:
        _, done = preparation.preprocess(image)
    except ValueError:  # constant, say: nothing to see, but no reason to stop
        return None
    return list(CT_WINDOWS["soft tissue"]) if done.kind == "CT" else [done.low, done.high]


def nifti(image: Image) -> bytes:
    """The image as a NIfTI file, 3-D and of a type that NiiVue knows."""
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
