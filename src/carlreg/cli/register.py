"""`carl register`: two scans, or a table of pairs."""

from __future__ import annotations

import csv
import io
import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carlreg.cli._shared import IMAGES, REPORT, Overwrite, Quiet, Verbose, check_new, say, set_loudness, working

if TYPE_CHECKING:
    from carlreg.files.tables import Pair


class Kind(str, Enum):
    """What the transform may do."""

    rigid = "rigid"
    affine = "affine"
    deformable = "deformable"


class Similarity(str, Enum):
    """What the instance optimisation compares the images by."""

    lncc = "lncc"
    lncc2 = "lncc2"
    mind = "mind"
    ssd = "ssd"


class Over(str, Enum):
    """What the instance optimisation changes."""

    auto = "auto"
    weights = "weights"
    fields = "fields"


class FitTo(str, Enum):
    """What rigid and affine maps are fitted to."""

    network = "network"
    attention = "attention"


def _iterations(text: str) -> int | None:
    """`auto`, `None` (which is 0 in other tools' scripts) or a number."""
    if text.lower() == "auto":
        return None
    if text.lower() == "none":
        return 0
    try:
        steps = int(text)
    except ValueError:
        steps = -1
    if steps < 0:
        raise typer.BadParameter(
            f"{text!r} is no number of steps; expected 0 or more, auto, or None", param_hint="--io-iterations"
        )
    return steps


Some = Path | None
PAGE = "report.html"


def register(
    fixed: Annotated[Some, typer.Option("--fixed", "-f", help="The fixed image: a file or a DICOM folder.")] = None,
    moving: Annotated[Some, typer.Option("--moving", "-m", help="The moving image.")] = None,
    out: Annotated[Some, typer.Option("--out", "-o", help="The folder for all results; made if need be.")] = None,
    pairs: Annotated[
        Some,
        typer.Option(
            help="A CSV file with a pair in each row instead of --fixed and --moving. Columns: fixed, moving, and if "
            "you like name, fixed_seg, moving_seg, fixed_mask, moving_mask, fixed_landmarks, moving_landmarks, "
            "initial_transform. Paths are relative to the CSV file. Each pair gets a folder in --out; those that are "
            "there already are skipped."
        ),
    ] = None,
    transform_out: Annotated[Some, typer.Option(help="A file for the transform alone: .h5, .hdf5 or .tfm.")] = None,
    warped_moving_out: Annotated[Some, typer.Option(help="A file for the warped moving image alone.")] = None,
    transform: Annotated[Kind, typer.Option(help="What the transform may do.")] = Kind.deformable,
    initial_transform: Annotated[
        Some, typer.Option(help="A transform file with a first guess of the map from fixed to moving points.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="A model of `carl models list`, or a model file. auto is the default model after a look whether the "
            "scans are turned against each other: the moving one is then turned back first."
        ),
    ] = "default",
    io_iterations: Annotated[
        str,
        typer.Option(
            help="Steps of instance optimisation. 0 or None leaves it out; auto is 50 over the weights, 20 over the "
            "fields (and three times as many on each of two coarser grids), none for rigid and affine transforms."
        ),
    ] = "auto",
    io_sim: Annotated[Similarity, typer.Option(help="The similarity that is optimised.")] = Similarity.lncc,
    over: Annotated[
        Over,
        typer.Option(
            help="Optimise the network's weights, as in the paper, or the fields; auto: fields without a GPU."
        ),
    ] = Over.auto,
    regularity: Annotated[
        float | None,
        typer.Option(
            help="The weight of smoothness in the optimisation. If not given: 1.5 over the weights, 0.75 over fields.",
            show_default=False,
        ),
    ] = None,
    fit_to: Annotated[
        FitTo,
        typer.Option(help="Fit rigid and affine maps to the whole network's answer, or to its attention alone."),
    ] = FitTo.network,
    allow_identity: Annotated[
        bool,
        typer.Option(
            help="Start from the two boxes laid onto one another where they match better than by the network."
        ),
    ] = True,
    fixed_mask: Annotated[Some, typer.Option(help="Where the fixed image counts, on its own grid.")] = None,
    moving_mask: Annotated[Some, typer.Option(help="Where the moving image counts, on its own grid.")] = None,
    fixed_seg: Annotated[Some, typer.Option(help="Labels of the fixed image: scored, not used.")] = None,
    moving_seg: Annotated[Some, typer.Option(help="Labels of the moving image: warped, and scored.")] = None,
    fixed_landmarks: Annotated[Some, typer.Option(help="Points of the fixed image: scored, not used.")] = None,
    moving_landmarks: Annotated[Some, typer.Option(help="The same points in the moving image.")] = None,
    certainty: Annotated[
        bool | None,
        typer.Option(
            "--certainty/--no-certainty",
            help="Show in report.html how sure the network is of its matches. Without either: only on a GPU.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[bool, typer.Option(help="Write report.html, a page to look at the result.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 or mps.")] = "auto",
    seed: Annotated[int, typer.Option(help="The same seed gives the same result.")] = 0,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Find where each point of the fixed image lies in the moving one.

    The folder gets warped.nii.gz, transform.h5, inverse_transform.h5, warp.nii.gz, report.json, report.html, and
    warped_seg.nii.gz if the moving image has labels.
    """
    set_loudness(quiet, verbose)
    options = {
        "transform": transform.value,
        "io_iterations": _iterations(io_iterations),
        "io_sim": io_sim.value,
        "over": over.value,
        "regularity": regularity,
        "fit_to": fit_to.value,
        "allow_identity": allow_identity,
        "certainty": certainty,
        "device": device,
        "seed": seed,
    }
    alone = {
        "--fixed": fixed,
        "--moving": moving,
        "--transform-out": transform_out,
        "--warped-moving-out": warped_moving_out,
        "--initial-transform": initial_transform,
        "--fixed-mask": fixed_mask,
        "--moving-mask": moving_mask,
        "--fixed-seg": fixed_seg,
        "--moving-seg": moving_seg,
        "--fixed-landmarks": fixed_landmarks,
        "--moving-landmarks": moving_landmarks,
    }
    if pairs is not None:
        given = [name for name, value in alone.items() if value is not None]
        if given:
            raise typer.BadParameter(f"{given[0]} was given with --pairs; expected it in the table of pairs")
        if out is None:
            raise typer.BadParameter("--pairs was given without --out; expected a folder for the pairs' folders")
        return _many(pairs, out, model, options, overwrite, quiet, html)
    if fixed is None or moving is None:
        raise typer.BadParameter("expected --fixed and --moving, or --pairs with a table of them")
    if out is None and transform_out is None and warped_moving_out is None:
        raise typer.BadParameter("nowhere to write to: expected --out, or --transform-out or --warped-moving-out")
    from carlreg.files.tables import Pair

    pair = Pair(
        "",
        fixed,
        moving,
        fixed_seg,
        moving_seg,
        fixed_mask,
        moving_mask,
        fixed_landmarks,
        moving_landmarks,
        initial_transform,
    )
    if transform_out is not None:
        check_new(transform_out, overwrite, (".h5", ".hdf5", ".tfm", ".txt"))
    if warped_moving_out is not None:
        check_new(warped_moving_out, overwrite, IMAGES)
    _one(pair, out, transform_out, warped_moving_out, model, options, overwrite, quiet, html)
    return 0


def _one(
    pair: Pair,
    out: Path | None,
    transform_out: Path | None,
    warped_out: Path | None,
    model: Any,
    options: dict[str, Any],
    overwrite: bool,
    quiet: bool,
    html: bool,
) -> dict[str, float]:
    """Register and save a pair; its metrics."""
    from carlreg.files import images, transform_files
    from carlreg.registration.api import register as register_pair
    from carlreg.registration.result import check_folder
    from carlreg.show import report

    if out is not None:
        check_folder(out, overwrite=overwrite, also=(PAGE,) if html else ())
    with working("reading", quiet) as progress:
        steps = _steps(options["io_iterations"], options["over"], options["device"])
        result = register_pair(
            **pair.files(),
            model=model,
            **options,
            progress=progress.say,
            callback=lambda step, _: progress.step(step, max(step, steps)),
        )
        progress.say("writing")
        if out is not None:
            result.save(out, overwrite=overwrite, extra={PAGE: report.page(result)} if html else None)
        if transform_out is not None:
            transform_files.write(result.transform, transform_out, overwrite=overwrite)
        if warped_out is not None:
            images.write(result.warped, warped_out, overwrite=overwrite)
    seconds = result.settings["seconds"]["total"]
    look = result.settings["look"]
    turned = f"turned back by {look['degrees']:.0f}°, " if look and look["turned_back"] else ""
    say(f"{out or transform_out or warped_out}: {turned}{_summary(result.metrics)}{seconds:.0f} s", quiet)
    return {**result.metrics, "seconds": seconds}


def _steps(asked: int | None, over: str, device: str) -> int:
    """How many there will be, for a bar."""
    from carlreg.fast.devices import choose_device
    from carlreg.objective.instance import FIELD_STEPS, WEIGHT_STEPS, steps_in_all

    if over == "weights" or (over == "auto" and choose_device(device).type == "cuda"):
        return WEIGHT_STEPS if asked is None else asked
    return steps_in_all(FIELD_STEPS if asked is None else asked)


def _summary(metrics: dict[str, float]) -> str:
    parts = []
    if "dice_after" in metrics:
        parts.append(f"Dice {metrics['dice_before']:.3f} before, {metrics['dice_after']:.3f} after, ")
    if "tre_after_mm" in metrics:
        parts.append(
            f"landmarks {metrics['tre_before_mm']:.1f} mm apart before, {metrics['tre_after_mm']:.1f} mm after, "
        )
    if "folds_percent" in metrics:
        parts.append(f"{metrics['folds_percent']:.3f} % folds, ")
    return "".join(parts)


# ---- many pairs -----------------------------------------------------------------------------------------------------


def _many(table: Path, out: Path, model: str, options: dict[str, Any], overwrite: bool, quiet: bool, html: bool) -> int:
    """Every pair of the table with one model. What fails does not stop the others; the exit code is 1 if any did."""
    from carlreg.files.tables import read_pairs

    rows = read_pairs(table, unique=True)  # all of them, before anything heavy begins
    from carlreg.files.atomic import write_atomically
    from carlreg.model.loaded import load_model

    loaded = load_model(model, options["device"])
    out.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    for number, pair in enumerate(rows, start=1):
        name = pair.name
        say(f"pair {number} of {len(rows)}: {name}", quiet)
        line: dict[str, Any] = {"name": name, "status": "done"}
        try:
            if not overwrite and _is_done(out / name, pair):
                line["status"] = "was done"
            else:
                line |= _one(pair, out / name, None, None, loaded, options, overwrite, quiet, html)
        except (ValueError, TypeError, OSError, RuntimeError, ImportError, MemoryError, ArithmeticError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            line |= {"status": "failed", "error": text}
            say(f"{name}: {text}")
        lines.append(line)
        write_atomically(out / "summary.csv", _table(lines))
    count = {status: sum(line["status"] == status for line in lines) for status in ("done", "was done", "failed")}
    failed = f", {count['failed']} failed: {', '.join(n['name'] for n in lines if n['status'] == 'failed')}"
    say(
        f"{count['done']} pairs done, {count['was done']} were done already{failed if count['failed'] else ''}",
        quiet and not count["failed"],
    )
    return 1 if count["failed"] else 0


def _is_done(folder: Path, pair: Pair) -> bool:
    """Whether the folder holds this pair's registration; a registration of other files is an error."""
    from carlreg.files.checksums import sha256

    if not (folder / REPORT).is_file():
        return False
    try:
        inputs = json.loads((folder / REPORT).read_text(encoding="utf-8"))["inputs"]
        before = {side: inputs[side].get("sha256") for side in ("fixed", "moving")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / REPORT} is not readable; remove the folder, or say --overwrite") from error
    now = {
        side: sha256(path) if path.is_file() else None
        for side, path in (("fixed", pair.fixed), ("moving", pair.moving))
    }
    if before != now:
        raise ValueError(f"{folder} holds a registration of other images; choose another name, or say --overwrite")
    return True


def _table(lines: list[dict[str, Any]]) -> bytes:
    columns = list(dict.fromkeys(key for line in lines for key in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.4f}" if isinstance(v, float) else v for k, v in line.items()} for line in lines)
    return text.getvalue().encode()
