"""The images of a folder, with the label maps and masks beside them, which are found by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from carlreg.errors import InputError
from carlreg.files.results import PICTURES
from carlreg.files.tables import stem

ENDINGS = (".nii.gz", ".nii", ".nrrd", ".nhdr", ".mha", ".mhd", ".hdr", *PICTURES)
LABELS, MASKS = ("_labels", "_seg", "_dseg"), ("_mask",)
"""Ends of the names of label maps and masks beside an image, without their extensions."""


@dataclass(frozen=True)
class Subject:
    """An image, and the labels and the mask that belong to it."""

    name: str
    image: Path
    labels: Path | None = None
    mask: Path | None = None

    @classmethod
    def beside(cls, image: Path, files: Mapping[str, Path]) -> Subject:
        """An image with the labels and the mask among files by their stems, which are those of the image and an end."""
        labels, mask = (next((files[one] for end in ends if (one := stem(image) + end) in files), None)
                        for ends in (LABELS, MASKS))  # fmt: skip
        return cls(stem(image), image, labels, mask)


def is_image(path: Path) -> bool:
    """Whether a path is a visible file that is an image by its name."""
    return path.name.lower().endswith(ENDINGS) and not path.name.startswith(".") and path.is_file()


def list_images(folder: Path) -> list[Path]:
    """The image files of a folder in order, label maps and masks among them."""
    return list(filter(is_image, sorted(folder.iterdir())))


def by_stem(paths: Iterable[Path]) -> dict[str, Path]:
    """Files by their names without extensions, of which there may be one each."""
    found: dict[str, Path] = {}
    for path in paths:
        if (other := found.setdefault(stem(path), path)) != path:
            raise InputError(f"{other} and {path.name} differ only in their formats; expected one of them")
    return found


def list_subjects(folder: Path) -> list[Subject]:
    """The images of a folder in order, each with its labels and its mask."""
    paths = list_images(folder)
    files = {stem(path): path for path in paths}
    return [Subject.beside(path, files) for path in paths if not stem(path).endswith((*LABELS, *MASKS))]
