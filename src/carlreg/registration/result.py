"""The result of a registration, and how it is saved."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import carlreg
from carlreg.files import images, transform_files
from carlreg.files.atomic import write_atomically
from carlreg.files.choice import is_picture
from carlreg.files.images import Image
from carlreg.files.results import INVERSE, TRANSFORM, WARP, WARPED, WARPED_LABELS, WITHIN, Report, Request, ResultFolder
from carlreg.files.world_transform import WorldTransform
from carlreg.model.loaded import NONE, LoadedModel
from carlreg.registration.options import RegisterOptions


@dataclass(frozen=True, eq=False)
class Registration:
    """The result of `register`. `transform` maps points of the fixed image to the moving one, `inverse` back."""

    transform: WorldTransform
    inverse: WorldTransform
    warped: Image
    """The moving image's intensities, in its own type, on the fixed image's grid."""
    fixed: Image
    moving: Image
    record: Report
    """How it was made, and how good it is."""
    labels: Image | None = None
    """The moving image's labels on the fixed image's grid, if there were any."""
    spread: Image | None = None
    """The spread of each fixed point's attention, in mm, on a coarse grid: small where the match is certain."""
    fixed_labels: Image | None = None
    """The labels that were given, on the grids of their images."""
    moving_labels: Image | None = None

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.record.metrics

    @property
    def losses(self) -> list[Mapping[str, float]]:
        """Total, similarity and regularity at each step of the optimisation."""
        return list(self.record.losses)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self.record.warnings)

    @property
    def dice(self) -> Mapping[str, Mapping[int, float]]:
        """ "before" and "after": the Dice overlap of each label, where both images had labels."""
        return self.record.dice

    @property
    def settings(self) -> dict[str, Any]:
        """How the registration was made, as in `report.json`."""
        results = ("schema", "versions", "metrics", "dice", "label_names", "losses", "warnings", "request")
        return {key: value for key, value in self.record.to_json().items() if key not in results}

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        full_precision: bool = False,
        ants_warp: bool = False,
        extra: Mapping[str, str | Callable[[], str]] | None = None,
    ) -> Path:
        """Write `warped.nii.gz`, `transform.h5`, `inverse_transform.h5` and `report.json`; `warped_seg.nii.gz` if there
        were labels; a warped picture, such as `warped.png`, if the moving image is one, in its format and colours; and
        with `ants_warp` the transform once more as `warp.nii.gz`. `extra` are further texts, or functions that return
        them, by the names of their files.

        The transforms are rounded, to 0.01 mm and 0.01 voxels or less, so that they compress well, unless
        `full_precision`. All files appear together or not at all. Overwriting also removes files of the old result that
        the new one does not have; files with other names stay.
        """
        result = ResultFolder(Path(folder))
        within = 0.0 if full_precision else WITHIN * min(1, *self.fixed.spacing, *self.moving.spacing)

        def write_text(text: str | Callable[[], str], path: Path) -> None:
            write_atomically(path, (text() if callable(text) else text).encode())

        pictures = {WARPED: self.warped, WARPED_LABELS: self.labels}
        if is_picture(self.moving.name) and self.warped.dim == 2:
            pictures[f"warped{Path(self.moving.name).suffix.lower()}"] = self.warped
        with result.replaced(overwrite=overwrite) as staged, ThreadPoolExecutor() as pool:
            work = [
                *(pool.submit(images.write, one, staged[name]) for name, one in pictures.items() if one is not None),
                pool.submit(transform_files.write, self.transform, staged[TRANSFORM], within=within),
                pool.submit(transform_files.write, self.inverse, staged[INVERSE], within=within),
                *(pool.submit(write_text, text, staged[name]) for name, text in (extra or {}).items()),
            ]
            if ants_warp:
                work.append(pool.submit(transform_files.write_warp, self.transform, self.fixed, staged[WARP]))
            for one in work:
                one.result()
            memory = peak_memory(self.record.device or "cpu")  # writing may take more than registering
            stored = replace(self.record, versions=_versions(), peak_memory_gb=memory, stored_within_mm=within)
            staged.write_report(stored)
        return result.path

    def report(self) -> dict[str, Any]:
        """The content of `report.json`."""
        return replace(self.record, versions=_versions()).to_json()


def make_request(model: LoadedModel, options: RegisterOptions, checksums: Mapping[str, str | None]) -> Request:
    """A registration of inputs with these checksums. The device changes its result by no more than rounding."""
    asked = options.as_json() | {"search_rotation": model.searches_rotation}
    del asked["device"]
    return Request(NONE if model.searches_affine else model.provenance.get("sha256"), asked, checksums)


def peak_memory(device: str) -> dict[str, float]:
    """The most memory that this process has ever held, and the most tensors on its GPU, in GiB."""
    peak = {}
    with suppress(ImportError):  # Windows
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak["process"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)
    if device.startswith("cuda"):
        peak["gpu"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 3)
    return peak


def _versions() -> dict[str, str]:
    sitk = sys.modules.get("SimpleITK")
    return {
        "carlreg": carlreg.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        **({} if sitk is None else {"SimpleITK": sitk.__version__}),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
