"""`carl explain`: how a network matches two images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from carlreg.cli._options import command
from carlreg.cli._shared import Device, numbers
from carlreg.errors import ExistsError
from carlreg.files.results import REPORT, ResultFolder

NAMES = ("mask.nii.gz", "certainty.nii.gz", "point.png", "masks.png", "certainty.png", "probe.png", REPORT)
"""The files that this command writes, and replaces with --overwrite."""


@command()
def explain(
    fixed: Annotated[Path, "The fixed image.", "-f"],
    moving: Annotated[Path, "The moving image.", "-m"],
    out: Annotated[Path, "Folder for pictures, maps and report.json.", "-o"],
    point: Annotated[
        str | None, "A point of the fixed image in mm, for example 12,-40.5,130. By default its centre."
    ] = None,
    space: Annotated[
        Literal["LPS", "RAS"], "The frame of --point and of the printed match: LPS as in ITK, or RAS as in NIfTI."
    ] = "LPS",
    model: Annotated[str, "A model's name or file."] = "default",
    fixed_seg: Annotated[Path | None, "Labels of the fixed image."] = None,
    moving_seg: Annotated[Path | None, "Labels of the moving image. With both, a linear probe is trained."] = None,
    labels: Annotated[str | None, "Probe only these labels, for example 1,2,6."] = None,
    voxels: Annotated[int, typer.Option(help="Number of random voxels whose masks are drawn.", min=1)] = 25,
    seed: Annotated[int, "The same seed draws the same voxels."] = 0,
    device: Device = "auto",
    overwrite: Annotated[bool, "Replace the files of an earlier run."] = False,
) -> None:
    """Show how a network matches two images, before its refinements.

    Writes a point's attention on the moving image (mask.nii.gz, point.png), the masks of random voxels (masks.png),
    the spread of every voxel's attention in mm (certainty.nii.gz, certainty.png), and with labels of both images the
    heat of a linear probe, trained on the moving image's features, on the fixed one (probe.png).
    """
    import json

    from carlreg import explain
    from carlreg.files import images
    from carlreg.files.atomic import refuse_inputs, refuse_result, write_atomically, write_together
    from carlreg.files.images import map_points

    if (fixed_seg is None) != (moving_seg is None):
        raise typer.BadParameter("a probe needs the labels of both images: --fixed-seg and --moving-seg")
    if ResultFolder(out).holds_registration():  # whose report must not be replaced by this command's
        raise ExistsError(f"{out} holds a registration, which --overwrite does not replace here; choose another folder")
    refuse_result(out, NAMES, last=REPORT, overwrite=overwrite)
    refuse_inputs((out / name for name in NAMES), (fixed, moving, fixed_seg, moving_seg))
    seen = explain.explain(fixed=fixed, moving=moving, model=model, device=device)
    middle = map_points(seen.fixed.unit_to_world(), [0.5] * seen.fixed.dim).tolist()
    expected = f"{seen.fixed.dim} numbers in {space} millimetres, separated by commas"
    signs = [-1.0, -1.0, 1.0] if space == "RAS" else [1.0] * 3
    given = middle if point is None else numbers(point, float, "--point", expected, seen.fixed.dim)
    voxel = seen.voxel_at(given if point is None else [x * s for x, s in zip(given, signs, strict=False)])
    mask, certainty = seen.mask(voxel), seen.certainty()
    centre, spread = seen.match(mask)
    drawn = seen.random_voxels(voxels, seed)
    spreads = [float(certainty.data[one]) for one in drawn]
    report: dict[str, Any] = {
        "model": model,
        "space": "LPS",
        "point_mm": map_points(seen.fixed_lattice(), voxel).tolist(),
        "match_mm": centre.tolist(),
        "spread_mm": spread,
        "random_voxels": len(drawn),
        "random_voxels_spread_mm": {"mean": sum(spreads) / len(spreads), "largest": max(spreads)},
    }
    pictures = {
        "point.png": explain.draw_point(seen, voxel),
        "masks.png": explain.draw_masks(seen, drawn),
        "certainty.png": explain.draw_certainty(seen, certainty),
    }
    if fixed_seg is not None and moving_seg is not None:
        maps = images.read_labels(moving_seg), images.read_labels(fixed_seg)
        wanted = None if labels is None else numbers(labels, int, "--labels", "whole numbers: 1,2,6")
        trained, heat, scores = explain.probe(seen, *maps, wanted)
        pictures["probe.png"] = explain.draw_probe(seen, trained, heat, scores, {})
        report["probe_dice"] = {str(label): score for label, score in scores.items()}
    with write_together(out, NAMES, last=REPORT, overwrite=overwrite) as staging:
        images.write(mask, staging / "mask.nii.gz")
        images.write(certainty, staging / "certainty.nii.gz")
        for name, picture in pictures.items():
            write_atomically(staging / name, picture)
        write_atomically(staging / REPORT, (json.dumps(report, indent=2) + "\n").encode())
    near = ", ".join(f"{x * s:.1f}" for x, s in zip(centre, signs, strict=False))
    typer.echo(f"the point's match is ({near}) mm, {space}, with a spread of {spread:.1f} mm; pictures are in {out}")
