"""`carl template`, `carl segment` and `carl atlas`: averages of scans, and labels from labelled scans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from carlreg.atlases.options import SegmentOptions, TemplateOptions
from carlreg.cli._options import command
from carlreg.cli._shared import Overwrite, check_new, message, working
from carlreg.cli._threads import Threads

SkipBad = Annotated[bool, "Leave out files that cannot be used, instead of listing them and stopping.", "--skip-bad"]


@dataclass(frozen=True)
class Running:
    """How all scans of a command are registered and written."""

    model: Annotated[str, "A model from `carl models list`, or a model file; auto or none, as for `carl register`."] = (
        "default"
    )
    workers: Annotated[int, typer.Option(help="Processes that register at the same time.", min=1)] = 1
    skip_bad: SkipBad = False
    overwrite: Overwrite = False


@command(usage=True)
def template(
    *,
    scans: Annotated[
        list[Path],
        typer.Argument(
            help="Two or more scans, or folders with scans. NAME_labels, NAME_seg, NAME_dseg and NAME_mask are left "
            "out."
        ),
    ],
    out: Annotated[Path, "Folder for the template and every scan's transforms; created if needed.", "-o"],
    initial: Annotated[
        Path | None, "An image to start from. By default the average of the scans, centred on each other."
    ] = None,
    options: TemplateOptions,
    running: Running,
    threads: Threads = None,
) -> None:
    """Build the average shape and image of a group of scans.

    Writes template.nii.gz, template.html, which shows it and how it converged, template.json, and a folder
    subjects/NAME for each scan with its transforms to the template both ways, as `carl register` writes them with the
    template as the fixed image. The same command goes on where it was stopped, and with more --iterations from a
    finished template.
    """
    from carlreg.atlases import template as build

    with working("reading") as part:
        result = build.template(
            scans,
            out=out,
            initial=initial,
            progress=part.begin,
            **vars(options),
            **vars(running),
        )
    last = result.iterations[-1]
    moved = f"moved by {last.moved_mm:.2f} mm in the last iteration"
    message(f"{out}: {len(result.subjects)} scans, {moved}, mean displacement {last.residual_mm:.3f} mm")


@command(usage=True)
def segment(
    *,
    scan: Annotated[Path, typer.Argument(help="The scan to segment: a file or a DICOM folder.")],
    atlases: Annotated[
        Path,
        "Labelled scans: a folder with NAME.nii.gz and NAME_labels.nii.gz (or NAME_seg, NAME_dseg), a CSV file with "
        "the columns image and labels, or a .carlatlas file of `carl atlas`.",
        "-a",
    ],
    out: Annotated[Path, "Folder for the labels; created if needed.", "-o"],
    label_names: Annotated[
        str | None,
        "Names of the labels, for volumes.csv: a CSV file with the columns label and name, a colour table, or one of "
        "freesurfer, btcv, amos, acdc, hippocampus, totalsegmentator. By default those of the atlases.",
    ] = None,
    probabilities: Annotated[bool, "Write a probability map for each structure.", "--probabilities"] = False,
    keep_registrations: Annotated[
        bool, "Keep the registration of every atlas, in OUT/registrations.", "--keep-registrations"
    ] = False,
    options: SegmentOptions,
    running: Running,
    threads: Threads = None,
) -> None:
    """Find the structures of a scan from scans that have labels.

    Registers every atlas to the scan and fuses their labels. Writes labels.nii.gz, uncertainty.nii.gz (how much the
    atlases disagree, in bits), volumes.csv and segment.json. The same command does not repeat registrations that were
    finished before it was stopped.
    """
    from carlreg.atlases import segment as fusing

    with working("reading") as part:
        result = fusing.segment(
            scan,
            atlases,
            out=out,
            label_names=label_names,
            probabilities=probabilities,
            keep_registrations=keep_registrations,
            progress=part.begin,
            **vars(options),
            **vars(running),
        )
    used, left = len(result.record["atlases"]), len(result.record["not_used"])
    found = sum(one.voxels > 0 for one in result.volumes)
    message(f"{out}: {found} structures from {used} atlases{f', {left} not used' if left else ''}")


@command()
def atlas(
    *,
    folder: Annotated[
        Path,
        typer.Argument(
            help="A folder with NAME.nii.gz and NAME_labels.nii.gz (or NAME_seg, NAME_dseg), or a CSV file with the "
            "columns image and labels."
        ),
    ],
    out: Annotated[Path, "The .carlatlas file to write.", "-o"],
    label_names: Annotated[
        str | None, "Names of the labels, as for `carl segment`. By default label_names.csv in the folder."
    ] = None,
    skip_bad: SkipBad = False,
    overwrite: Overwrite = False,
) -> None:
    """Pack labelled scans into one file for `carl segment`.

    Floating-point images are stored in 65536 steps between their extremes; integers and labels as they are.
    """
    from carlreg.atlases.pack import ENDING, write_pack
    from carlreg.atlases.segment import read_atlases

    check_new(out, overwrite, (ENDING,))
    atlases, names = read_atlases(folder, skip_bad=skip_bad, label_names=label_names)
    write_pack(atlases, out, names, overwrite=overwrite)
    message(f"{out}: {len(atlases)} atlases, {out.stat().st_size / 2**20:.1f} MiB")
