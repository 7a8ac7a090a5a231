"""The result of a registration, and how it is saved."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import carlreg
from carlreg.files import images, transform_files
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image
from carlreg.files.world_transform import WorldTransform

FILES = ("warped.nii.gz", "transform.h5", "inverse_transform.h5", "warp.nii.gz", "report.json")
LABELS = "warped_seg.nii.gz"
"""Written beside `FILES` where the moving image came with labels."""


@dataclass(frozen=True, eq=False)
class Registration:
    """What a registration gives. Points of the fixed image go to the moving one by `transform`, back by `inverse`."""

    transform: WorldTransform
    inverse: WorldTransform
    warped: Image
    """The moving image's intensities, in its own type, on the fixed image's grid."""
    fixed: Image
    moving: Image
    metrics: dict[str, float]
    settings: dict[str, Any]
    losses: list[dict[str, float]] = field(default_factory=list)
    """Of the optimisation: total, similarity, regularity at each step."""
    warnings: tuple[str, ...] = ()
    labels: Image | None = None
    """The moving image's labels on the fixed image's grid, if there were any."""
    dice: dict[str, dict[int, float]] = field(default_factory=dict)
    """"before" and "after": the Dice overlap of each label, where both images had labels."""
    spread: Image | None = None
    """Of each fixed point's attention, in mm, on a coarse grid: small where the network is sure of its match."""

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> Path:
        """Write `warped.nii.gz`, `transform.h5`, `inverse_transform.h5`, `warp.nii.gz` and `report.json`, and
        `warped_seg.nii.gz` where there were labels. `extra` are further texts, by the names of their files.

        All appear or none: they are written to a temporary folder first. Folders made for them go if they fail.
        """
        target = check_folder(folder, overwrite=overwrite, also=extra or ())
        made = [one for one in target.parents if not one.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        new, moved = not target.exists(), list[Path]()
        waiting = Path(tempfile.mkdtemp(dir=target.parent if new else target, prefix=f".{target.name}."))
        try:
            images.write(self.warped, waiting / "warped.nii.gz")
            transform_files.write(self.transform, waiting / "transform.h5")
            transform_files.write(self.inverse, waiting / "inverse_transform.h5")
            transform_files.write_warp(self.transform, self.fixed, waiting / "warp.nii.gz")
            if self.labels is not None:
                images.write(self.labels, waiting / LABELS)
            for name, text in (extra or {}).items():
                write_atomically(waiting / name, text.encode())
            write_atomically(waiting / "report.json", (json.dumps(self.report(), indent=2) + "\n").encode())
            if new:
                waiting.chmod(0o755)
                waiting.rename(target)
            else:
                for path in sorted(waiting.iterdir(), key=lambda path: path.name == "report.json"):  # that one last
                    moved.append(target / path.name)
                    os.replace(path, moved[-1])
        except BaseException:
            for path in () if overwrite else moved:
                path.unlink(missing_ok=True)
            shutil.rmtree(waiting, ignore_errors=True)
            for one in made:
                one.rmdir()
            raise
        shutil.rmtree(waiting, ignore_errors=True)
        return target

    def report(self) -> dict[str, Any]:
        """Versions, inputs, settings, metrics and warnings, for a machine to read."""
        return {
            "versions": _versions(),
            **self.settings,
            "metrics": {name: value if math.isfinite(value) else None for name, value in self.metrics.items()},
            "dice": {
                when: {str(label): score for label, score in scores.items()} for when, scores in self.dice.items()
            },
            "losses": self.losses,
            "warnings": list(self.warnings),
        }


def check_folder(folder: str | os.PathLike[str], *, overwrite: bool = False, also: Iterable[str] = ()) -> Path:
    """The folder as a path, if a registration may be saved there: it can be made or written to, and it holds none."""
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; expected a folder for the results: choose another name")
    taken = [name for name in (*FILES, LABELS, *also) if (target / name).exists()]
    if taken and not overwrite:
        raise FileExistsError(f"{target} already holds {taken[0]}; choose another folder, or allow overwriting")
    above = next(one for one in (target, *target.absolute().parents) if one.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{target} cannot be written: no permission in {above}; expected a folder one may write to"
        )
    return target


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
