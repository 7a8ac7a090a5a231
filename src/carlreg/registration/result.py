"""The result of a registration, and how it is saved."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

import carlreg
from carlreg.errors import InputError
from carlreg.files import images, transform_files, world_transform
from carlreg.files.atomic import write_atomically
from carlreg.files.checks import times
from carlreg.files.choice import is_picture
from carlreg.files.images import Image
from carlreg.files.results import (
    EXPECTED_ERROR,
    INVERSE,
    NAMES,
    TRANSFORM,
    WARP,
    WARPED,
    WARPED_LABELS,
    WITHIN,
    Confidence,
    Report,
    Request,
    ResultFolder,
)
from carlreg.files.world_transform import WorldTransform
from carlreg.geometry.grids import Interpolation
from carlreg.model.loaded import NONE, LoadedModel
from carlreg.registration.options import RegisterOptions

if TYPE_CHECKING:
    from carlreg.registration.viewing import Viewer

Content = str | bytes


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
    expected_error: Image | None = None
    """The expected error of each fixed point in mm, on the network's grid, if the result could be judged."""
    fixed_labels: Image | None = None
    """The labels that were given, on the grids of their images."""
    moving_labels: Image | None = None

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> tuple[str, str, str]:
        """What was registered, how, and how well: a line each."""
        record, image = self.record, self.fixed
        voxels = f"{times(image.shape)} voxels of {' × '.join(f'{mm:.3g}' for mm in image.spacing)} mm"
        names = [Path(one.name.partition(" (")[0]).name for one in (self.moving, self.fixed)]
        steps = f", {record.io_iterations} steps of {record.io_sim}" if record.io_iterations else ""
        model, total = record.model.get("name", "a model in memory"), record.seconds.get("total", 0.0)
        texts = {
            "dice_after": "Dice {dice_before:.3f} before, {dice_after:.3f} after",
            "tre_after_mm": "landmarks {tre_before_mm:.1f} mm apart before, {tre_after_mm:.1f} mm after",
            "folds_percent": "{folds_percent:.3f} % folds",
            "sd_log_jacobian": "SDlogJ {sd_log_jacobian:.3f}",
            "inverse_consistency_mm": "inverse consistent to {inverse_consistency_mm:.2f} mm",
        }
        scores = [text.format(**self.metrics) for name, text in texts.items() if name in self.metrics]
        verdict = "" if self.confidence is None else f"{replace(self.confidence, reasons=()).line()}; "
        return (
            f"Registration of {names[0]} to {names[1]}, {voxels}",
            f"{record.transform} by {model}{steps}, {total:.1f} s on {record.device}",
            verdict + ", ".join(scores),
        )

    def _repr_html_(self) -> str:
        """A picture and the numbers, for notebooks."""
        from carlreg.registration.picture import html

        return html(self)

    def plot(self) -> Any:
        """A Matplotlib figure: the fixed image, the moving one before and after, and a checkerboard of both."""
        from carlreg.registration.picture import plot

        return plot(self)

    def view(self, *, browser: bool = True) -> Viewer:
        """Show the result in the browser, as `carl view` does, until `close()` or the end of the program."""
        from carlreg.registration.viewing import Viewer

        return Viewer.of(self, browser=browser)

    def warp(
        self, source: Any, *, labels: bool | None = None, inverse: bool = False, outside: float | None = None
    ) -> Image:
        """An image of the moving space on the fixed image's grid, in any form that `register` takes; `inverse` for the
        other way. An array needs the shape of the moving image and lies where that does.

        Label maps are taken from the nearest voxel: `labels` says whether it is one; by default, its values do.

        >>> result.warp("moving_labels.nii.gz").to_nibabel()
        """
        own, like = (self.fixed, self.moving) if inverse else (self.moving, self.fixed)
        image = images.as_image(source, "image")
        if type(source).__module__.partition(".")[0] in ("numpy", "torch"):
            if image.shape != own.shape:
                side = "fixed" if inverse else "moving"
                raise InputError(f"the array has shape {image.shape}; expected the {side} image's, {own.shape}")
            image = replace(image, affine=own.affine)
        nearest = images.looks_like_labels(image) if labels is None else labels
        kind: Interpolation = "nearest" if nearest else "linear"
        return world_transform.apply(self.inverse if inverse else self.transform, image, like, kind, outside)

    def warp_points(
        self, points: npt.ArrayLike, side: Literal["fixed", "moving"] = "fixed", space: Literal["LPS", "RAS"] = "LPS"
    ) -> npt.NDArray[np.float64]:
        """World points (N, D) in mm of one image, at their places in the other; `side` is the image they belong to.

        >>> result.warp_points([[10.0, -20.0, 30.0]], "moving")
        """
        if side not in ("fixed", "moving") or space not in ("LPS", "RAS"):
            expected = "'fixed' or 'moving', and 'LPS' or 'RAS'"
            raise InputError(f"unknown side {side!r} or space {space!r}; expected {expected}")
        signs = np.array([-1.0, -1.0, 1.0][: self.fixed.dim]) if space == "RAS" else np.ones(self.fixed.dim)
        try:
            at = np.asarray(points, dtype=np.float64)
        except (TypeError, ValueError) as error:
            what = f"points are a {type(points).__name__} that is not numbers"
            raise InputError(
                f"{what}; expected an array (N, {self.fixed.dim}): `carl warp-points` maps files"
            ) from error
        if at.shape[-1:] != (self.fixed.dim,):
            raise InputError(f"points have shape {at.shape}; expected (N, {self.fixed.dim})")
        at = at * signs
        if side == "fixed":
            return self.transform(at) * signs
        flat, _ = world_transform.invert_points(self.transform, at.reshape(-1, self.fixed.dim))
        return flat.reshape(at.shape) * signs

    def jacobian(self) -> Image:
        """The Jacobian determinant on the fixed image's grid: above 1 where the moving image has more volume."""
        return world_transform.jacobian_determinant(self.transform, self.fixed, mirrored=self.record.is_mirrored)

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.record.metrics

    @property
    def confidence(self) -> Confidence | None:
        """How far the result can be trusted: a verdict with reasons, an expected error, and the evidence."""
        return self.record.confidence

    @property
    def losses(self) -> list[Mapping[str, float]]:
        """Total, similarity and regularity at each step of the optimisation. If fields were optimised on several grids,
        `level` is how many times as large as the finest grid's the voxels of a step's grid are."""
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
        results = ("schema", "versions", "metrics", "dice", "label_names", "losses", "guide", "warnings", "request")
        return {key: value for key, value in self.record.to_json().items() if key not in results}

    def save(
        self,
        folder: str | os.PathLike[str] | ResultFolder,
        *,
        overwrite: bool = False,
        full_precision: bool = False,
        ants_warp: bool = False,
        extra: Mapping[str, Content | Callable[[], Content]] | None = None,
        keep: Collection[str] = NAMES,
    ) -> Path:
        """Write `warped.nii.gz`, `transform.h5`, `inverse_transform.h5` and `report.json`; `warped_seg.nii.gz` if there
        were labels; `expected_error.nii.gz` if the result could be judged; a warped picture, such as `warped.png`, if
        the moving image is one, in its format and colours; and with `ants_warp` the transform once more as
        `warp.nii.gz`. `extra` are further texts or bytes, or functions that return them, by the names of their files.
        Files that are not among `keep` are left out, except `report.json`.

        The transforms are rounded, to 0.01 mm and 0.01 voxels or less, so that they compress well, unless
        `full_precision`. All files appear together or not at all. Overwriting also removes files of the old result that
        the new one does not have; files with other names stay.
        """
        result = folder if isinstance(folder, ResultFolder) else ResultFolder(Path(folder))
        result.check_free(overwrite=overwrite, inputs={name: one.path for name, one in self.record.inputs.items()})
        within = 0.0 if full_precision else precision(self.fixed, self.moving)

        def write_extra(given: Content | Callable[[], Content], path: Path) -> None:
            content = given() if callable(given) else given
            write_atomically(path, content.encode() if isinstance(content, str) else content)

        scans = ((WARPED, self.warped), (WARPED_LABELS, self.labels), (EXPECTED_ERROR, self.expected_error))
        pictures = {name: one for name, one in scans if name in keep}
        maps = {name: one for name, one in ((TRANSFORM, self.transform), (INVERSE, self.inverse)) if name in keep}
        if WARPED in keep and is_picture(self.moving.name) and self.warped.dim == 2:
            pictures[f"warped{Path(self.moving.name).suffix.lower()}"] = self.warped
        with result.replaced(overwrite=overwrite) as staged, ThreadPoolExecutor() as pool:
            work = [
                *(pool.submit(images.write, one, staged[name]) for name, one in pictures.items() if one is not None),
                *(pool.submit(transform_files.write, one, staged[name], within=within) for name, one in maps.items()),
                *(pool.submit(write_extra, content, staged[name]) for name, content in (extra or {}).items()),
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


def precision(fixed: Image, moving: Image) -> float:
    """How exactly transforms between two images are stored, in mm: to 0.01 mm and 0.01 voxels."""
    return WITHIN * min(1, *fixed.spacing, *moving.spacing)


def make_request(model: LoadedModel, options: RegisterOptions, checksums: Mapping[str, str | None]) -> Request:
    """A registration of inputs with these checksums. The device changes its result by no more than rounding."""
    asked = options.as_json() | {"search_rotation": model.searches_rotation, "ladder": model.climbs}
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
