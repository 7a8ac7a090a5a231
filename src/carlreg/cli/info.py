"""`carl info`: describe a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from carlreg.cli._options import command
from carlreg.cli.transforms import is_transform
from carlreg.errors import InputError
from carlreg.files.results import REPORT, ResultFolder


@command()
def info(
    path: Annotated[Path, typer.Argument(help="An image, a transform, a model, or a folder of `carl register`.")],
    as_json: Annotated[bool, "Print JSON.", "--json"] = False,
    space: Annotated[
        Literal["LPS", "RAS"], "The frame of coordinates: LPS as in ITK, ANTs and DICOM, or RAS as in NIfTI."
    ] = "LPS",
    series: Annotated[
        str | None, "The series of a DICOM folder that holds several: its number, UID, or a part of its description."
    ] = None,
) -> None:
    """Describe an image, a transform, a model or a result folder; of a folder with DICOM, the series in it."""
    if not path.exists():
        raise InputError(f"{path} does not exist; expected an image, a transform, a model or a folder: check the path")
    if (result := ResultFolder(path)).holds_registration():
        facts = _registration(result)
    elif path.suffix.lower() == ".safetensors":
        facts = model_facts(path)
    elif is_transform(path):
        facts = _transform(path, space)
    else:
        facts = _image(path, space, series)
    typer.echo(json.dumps(facts, indent=2) if as_json else as_text(facts))


def as_text(facts: dict[str, Any], indent: str = "") -> str:
    """Facts as lines, nested ones indented."""
    lines = []
    for name, value in facts.items():
        label = f"{indent}{name.replace('_', ' ')}"
        if isinstance(value, dict):
            lines.append(f"{label}:\n{as_text(value, indent + '  ')}")
        elif isinstance(value, list) and value and isinstance(value[0], list):
            rows = "\n".join(f"{indent}  {'  '.join(f'{number:10.4f}' for number in row)}" for row in value)
            lines.append(f"{label}:\n{rows}")
        elif isinstance(value, list):
            lines.append(f"{label}: {' × '.join(f'{item:g}' for item in value)}")
        else:
            lines.append(f"{label}: {value:.6g}" if isinstance(value, float) else f"{label}: {value}")
    return "\n".join(lines)


def _image(path: Path, space: str, series: str | None) -> dict[str, Any]:
    from carlreg import preparation
    from carlreg.files import images, orientation
    from carlreg.files.images import Choice, ImageError

    if path.is_dir() and series is None and len(found := images.list_series(path)) > 1:
        advice = "choose one by --series, its number, UID, or a part of its description"
        return {"kind": f"{len(found)} DICOM series: {advice}", "series": {one.uid: str(one) for one in found}}
    image = images.read(path, Choice(series=series))
    first = (_frame(image.dim, space) @ image.affine)[:-1, -1].round(4)
    facts: dict[str, Any] = {
        "kind": f"{image.dim}-D image",
        "voxels": list(image.shape),
        "spacing_mm": [round(s, 6) for s in image.spacing],
        "orientation": orientation.orientation(image),
        f"first_voxel_{space}_mm": " ".join(f"{x:g}" for x in first),
        "type": str(image.data.dtype),
        "lowest": image.data.min().item(),
        "highest": image.data.max().item(),
        "looks_like_labels": images.looks_like_labels(image),
    }
    try:
        facts["for_the_network"] = preparation.preprocess(orientation.to_closest_ras(image))[1].note
    except ImageError as error:
        facts["for_the_network"] = f"cannot be registered: {error}"
    return facts


def _frame(dim: int, space: str) -> Any:
    """(D + 1, D + 1): from LPS to a frame of coordinates, and back."""
    import numpy as np

    return np.diag([-1.0, -1.0, *[1.0] * (dim - 1)]) if space == "RAS" else np.eye(dim + 1)


def _transform(path: Path, space: str) -> dict[str, Any]:
    import numpy as np

    from carlreg.files import transform_files
    from carlreg.files.world_transform import ItkTransform

    if transform_files.is_learn2reg(path):
        return {
            "kind": "Learn2Reg's displacements, in voxels: `carl convert` with --reference makes a transform of them"
        }
    transform = transform_files.read(path)
    facts: dict[str, Any] = {"kind": f"{transform.dim}-D transform from fixed to moving world points, {space} mm"}
    if isinstance(transform, ItkTransform):
        return facts | {"type": str(transform.to_sitk().GetName())}
    facts |= {"type": "affine" if transform.is_linear else "affine after displacements"}
    frame = _frame(transform.dim, space)
    facts["affine"] = ((frame @ transform.affine @ frame).round(6) + 0.0).tolist()
    if not transform.is_linear:
        lengths = np.linalg.norm(transform.displacement, axis=-1)
        facts["displacements"] = {
            "voxels": list(lengths.shape),
            "spacing_mm": [round(float(s), 6) for s in np.linalg.norm(transform.lattice[:-1, :-1], axis=0)],
            "mean_mm": float(lengths.mean()),
            "largest_mm": float(lengths.max()),
        }
    return facts


def model_facts(path: Path) -> dict[str, Any]:
    """A model file's metadata, size and checksum."""
    from carlreg.files.checksums import sha256
    from carlreg.model.files import read_metadata

    about = read_metadata(path)
    hidden = ("architecture", "format")
    return {
        "kind": "model",
        **{name: text for name, text in sorted(about.items()) if name not in hidden},
        "megabytes": round(path.stat().st_size / 1e6, 1),
        "sha256": sha256(path),
    }


def _registration(result: ResultFolder) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": "folder of `carl register`"}
    if not result[REPORT].is_file():
        return facts
    record = result.read_report()
    report = record.to_json()
    if record.confidence is not None:
        facts["verdict"] = record.confidence.line()
    shown = ("inputs", "model", "transform", "io_iterations", "io_over", "metrics", "seconds", "versions", "warnings")
    facts |= {name: report[name] for name in shown if report[name] not in (None, [], {})}
    if "warnings" in facts:
        facts["warnings"] = "; ".join(facts["warnings"])
    for entry in facts.get("inputs", {}).values():
        entry.pop("sha256_voxels", None)
    return facts
