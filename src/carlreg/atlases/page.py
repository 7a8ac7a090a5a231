"""`template.html`: one file that shows a template and how it converged in any browser, offline."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

import carlreg
from carlreg.files.images import Image
from carlreg.files.orientation import to_closest_ras
from carlreg.show.display import grey_scale

if TYPE_CHECKING:
    from carlreg.atlases.template import Iteration

PLANES = (("sagittal", 0, "APSI"), ("coronal", 1, "RLSI"), ("axial", 2, "RLAP"))
"""Names, the axis across, and the directions of the left, right, upper and lower edge, of volumes closest to RAS."""
CHARTS = (
    ("moved_mm", "how far the average moved", "mm RMS"),
    ("spread", "spread of the scans' intensities", "relative to the mean"),
    ("sharpness", "sharpness", "mean gradient per mm"),
)
COLUMNS = {
    "displacement_mm": ("displacement, mm", "{:.1f}"),
    "folds_percent": ("folds, %", "{:.3f}"),
    "inverse_error_mm": ("error of the inverse, mm", "{:.3f}"),
}


def page(
    image: Image, iterations: Sequence[Iteration], subjects: Sequence[Mapping[str, Any]], record: Mapping[str, Any]
) -> str:
    """The page as HTML. Links to scans lead to their folders beside it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("carlreg.atlases", ""), autoescape=True, undefined=StrictUndefined)
    last = iterations[-1]
    size = " × ".join(str(n) for n in image.shape)
    voxel = " × ".join(f"{mm:.3g}" for mm in image.spacing)
    settings = {"model": record["model"].get("name"), "device": record["device"], **record["options"]}
    return environment.get_template("page.html").render(
        style=(resources.files("carlreg.atlases") / "page.css").read_text("utf-8"),
        summary=f"{size} voxels of {voxel} mm. The mean displacement of its transforms is {last.residual_mm:.3f} mm.",
        planes=list(_planes(image)),
        charts=[{"title": t, "unit": u, "numbers": [getattr(row, key) for row in iterations]} for key, t, u in CHARTS],
        labels=[f"iteration {number}, {row.kind}" for number, row in enumerate(iterations)],
        head=["scan", *(title for title, _ in COLUMNS.values())],
        subjects=[
            (row["name"], f"subjects/{quote(row['name'])}/", *(f.format(row[key]) for key, (_, f) in COLUMNS.items()))
            for row in subjects
        ],
        settings=[
            (name.replace("io_", "optimisation: "), value) for name, value in settings.items() if value is not None
        ],
        version=carlreg.__version__,
    )


def _planes(image: Image) -> Iterator[dict[str, Any]]:
    """Slices through the middle of a volume, or a picture."""
    scale = grey_scale(image)
    intensities, greys = zip(*scale.knots, strict=True)
    upright = to_closest_ras(image)
    levels = np.rint(np.interp(upright.data, intensities, greys)).astype(np.uint8)
    if image.dim == 2:
        yield _picture("image", levels.T, upright.spacing, "")
        return
    for name, axis, edges in PLANES:
        cut = levels.take(levels.shape[axis] // 2, axis=axis)
        spacing = [mm for other, mm in enumerate(upright.spacing) if other != axis]
        yield _picture(name, cut[::-1, ::-1].T, spacing, edges)  # the patient's right is on the left of the picture


def _picture(name: str, levels: npt.NDArray[np.uint8], spacing: Sequence[float], edges: str) -> dict[str, Any]:
    from PIL import Image as Picture

    file = io.BytesIO()
    Picture.fromarray(np.ascontiguousarray(levels)).save(file, "PNG")
    height, width = levels.shape
    return {
        "name": name,
        "png": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}",
        "aspect": f"{width * spacing[0]:.4f} / {height * spacing[1]:.4f}",
        "edges": list(edges),
    }
