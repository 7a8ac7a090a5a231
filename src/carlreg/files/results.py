"""The result folder of a registration: its file names, its report, and whether it answers a request.

Imports neither torch nor numpy.

A folder with `report.json` holds a finished result. Overwriting removes the files called `NAMES` and nothing else: all
other files of the folder are the user's.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from carlreg.errors import InputError
from carlreg.files.atomic import SUFFIX, PathLike, refuse_inputs, refuse_result, write_atomically, write_together

WARPED, WARPED_LABELS = "warped.nii.gz", "warped_seg.nii.gz"
TRANSFORM, INVERSE, WARP = "transform.h5", "inverse_transform.h5", "warp.nii.gz"
EXPECTED_ERROR = "expected_error.nii.gz"
REPORT, PAGE, THUMBNAIL = "report.json", "report.html", "thumbnail.jpg"
FILES = (WARPED, TRANSFORM, INVERSE, REPORT)
"""The files of every result."""
PICTURES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")  # formats without positions
NAMES = (*FILES, WARP, WARPED_LABELS, EXPECTED_ERROR, PAGE, THUMBNAIL, *(f"warped{ending}" for ending in PICTURES))
"""All files that a result may have."""
WITHIN = 0.01
"""The stored transforms are within this distance of the exact ones, in mm and in voxels."""
SCHEMA = 1
"""The version of `report.json`; raised when the meaning of a key changes. Unknown keys are ignored."""


@dataclass(frozen=True)
class InputRecord:
    """An input of a registration, as its report describes it."""

    path: str | None = None
    sha256: str | None = None
    """Checksum of the file, or of all files of a DICOM folder."""
    given_as: str | None = None
    """The type of an input in memory."""
    shape: Sequence[int] | None = None
    spacing_mm: Sequence[float] | None = None
    sha256_voxels: str | None = None
    intensities: str | None = None
    seen: str | None = None
    """What the network sees of the image."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | None):
            raise TypeError(f"{self.path!r} is not a path")


@dataclass(frozen=True)
class Request:
    """Everything that decides a result. Equal requests have equal results, up to rounding on another device."""

    model: str | None
    """Checksum of the model file, or "none" without one; None for a model in memory, which equals no other."""
    options: Mapping[str, Any]
    """Those of `RegisterOptions` that change the result, as JSON values."""
    inputs: Mapping[str, str | None]
    """Checksum of each input by name; None for an input in memory."""

    def differences(self, other: Request) -> list[str]:
        """What `other` asks for that this request does not, in words."""
        different = [] if self.model is not None and self.model == other.model else ["another model"]
        for name in sorted({*self.inputs, *other.inputs}):
            mine, theirs = self.inputs.get(name), other.inputs.get(name)
            if mine is None or mine != theirs:
                article = "a" if name not in other.inputs else "no" if name not in self.inputs else "another"
                different.append(f"{article} {f'{name} image' if name in ('fixed', 'moving') else name}")
        for name in sorted({*self.options, *other.options}):
            mine, theirs = self.options.get(name), other.options.get(name)
            if mine != theirs:
                different.append(f"{name}={mine!r} instead of {theirs!r}")
        return different


Verdict = Literal["good", "doubtful", "failed", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """How far a registration can be trusted, judged without labels."""

    verdict: Verdict
    expected_error_mm: float | None = None
    failure_probability: float | None = None
    reasons: Sequence[str] = ()
    """Why it is not good, in words."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers that the verdict comes from, by name."""
    tried: Sequence[str] = ()
    """The ways to register that were tried because the first was not good, and what was thought of each."""

    def line(self) -> str:
        """The verdict in one line."""
        error = "" if self.expected_error_mm is None else f", expected error {self.expected_error_mm:.1f} mm"
        return f"{self.verdict}{error}{': ' if self.reasons else ''}{'; '.join(self.reasons)}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """`report.json`: how a registration was made, and how good it is. The fields are the keys of the file."""

    schema: int = SCHEMA
    versions: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    look: Mapping[str, Any] | None = None
    """What the search for a rotation or an affine map found, if there was one."""
    device: str | None = None
    transform: str | None = None
    fit_to: str | None = None
    io_iterations: int | None = None
    io_over: str | None = None
    io_sim: str | None = None
    io_sim_reason: str | None = None
    """Why this similarity was chosen, if it was."""
    io_kept: str | None = None
    """Why the optimisation left its start as it was, if it did."""
    regularity: float | None = None
    allow_identity: bool | None = None
    seed: int | None = None
    grid: Sequence[int] | None = None
    io_grid: Sequence[int] | None = None
    inputs: Mapping[str, InputRecord] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_memory_gb: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    dice: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """"before" and "after": the Dice overlap of each label, where both images had labels."""
    label_names: Mapping[int, str] = field(default_factory=dict)
    """Names of labels, if they were given."""
    losses: Sequence[Mapping[str, float]] = ()
    """Total, similarity and regularity at each step of the optimisation."""
    guide: Sequence[Sequence[float]] = ()
    """Corresponding points that pulled the result, if any: in each row the fixed and the moving one, in LPS mm."""
    warnings: Sequence[str] = ()
    orientation: Mapping[str, Any] | None = None
    """How the axes of the moving scan seem to run against those of the fixed one, if that was looked into."""
    confidence: Confidence | None = None
    """How far the result can be trusted; None if that was not asked for, and in reports of earlier versions."""
    stored_within_mm: float = 0.0
    """How far the points of the stored transforms are from those of the exact ones, at most."""
    request: Request | None = None
    """What was asked for; None in reports of earlier versions."""

    @property
    def is_mirrored(self) -> bool:
        """Whether two sides of the moving scan were exchanged on purpose, so that no determinant is as usual."""
        return bool((self.orientation or {}).get("mirrored"))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values, without numbers that are not finite."""
        values = asdict(self)
        values["inputs"] = {
            name: {key: value for key, value in described.items() if value is not None}
            for name, described in values["inputs"].items()
        }
        values["label_names"] = {str(label): name for label, name in self.label_names.items()}
        values["dice"] = {when: {str(k): score for k, score in scores.items()} for when, scores in self.dice.items()}
        finite: dict[str, Any] = _finite(values)
        return finite

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Report:
        """Read a report of any version: keys that it lacks have their defaults, others are ignored."""
        known = _known(cls, values)
        known["inputs"] = {k: InputRecord(**_known(InputRecord, v)) for k, v in known.get("inputs", {}).items()}
        for key in ("seconds", "peak_memory_gb", "metrics"):
            known[key] = _numbers(known.get(key, {}))
        known["dice"] = {
            when: {int(label): score for label, score in _numbers(scores).items()}
            for when, scores in known.get("dice", {}).items()
        }
        known["label_names"] = {int(label): str(name) for label, name in known.get("label_names", {}).items()}
        known["guide"] = tuple(tuple(map(_coordinate, row)) for row in known.get("guide", ()))
        known["warnings"] = tuple(str(text) for text in known.get("warnings", ()))
        if known.get("confidence"):
            known["confidence"] = Confidence(**_known(Confidence, known["confidence"]))
        known["request"] = Request(**_known(Request, known["request"])) if known.get("request") else None
        return cls(**known)


def _known(kind: type, values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise TypeError(f"{values!r} is not an object")
    return {one.name: values[one.name] for one in fields(kind) if one.name in values}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: math.nan if number is None else float(number) for name, number in values.items()}


def _coordinate(value: Any) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a coordinate")
    return float(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class ResultFolder:
    """A folder that `carl register` writes.

    >>> ResultFolder(Path("out")).read_report().metrics["dice_after"]
    """

    path: Path
    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Other names of its files, by their usual ones; results with different names can share a folder."""

    def __getitem__(self, name: str) -> Path:
        """The path of one of `NAMES`."""
        return self.path / self.names.get(name, name)

    def holds_registration(self) -> bool:
        return self[TRANSFORM].is_file()

    def missing(self, *more: str, files: Iterable[str] = FILES) -> list[str]:
        """The files that a complete result, and one with `more` files, would have and this folder has not."""
        return [name for name in (*files, *more) if not self[name].is_file()]

    def read_report(self) -> Report:
        try:
            return Report.from_json(json.loads(self[REPORT].read_text(encoding="utf-8")))
        except OSError as error:
            raise InputError(f"{self[REPORT]} cannot be read: {error.strerror}; expected a result folder") from error
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(f"{self[REPORT]} is damaged ({error}); expected the report of a registration") from error

    def differences(
        self, request: Request, *more: str, full_precision: bool = False, files: Iterable[str] = FILES
    ) -> list[str]:
        """How the result differs from a complete one for this request, in words; empty if it does not. `more` are files
        that are written on request, beside `files`."""
        if missing := self.missing(*more, files=files):
            return [f"no {missing[0]}"]
        report = self.read_report()
        if report.request is None:
            return ["a report of an earlier version, which does not list its options"]
        coarse = [f"transforms rounded to {report.stored_within_mm:g} mm"]
        return report.request.differences(request) + coarse * (full_precision and report.stored_within_mm > 0)

    def check_free(self, *, overwrite: bool, inputs: Mapping[str, object] | None = None) -> None:
        """Raise unless a result may be written here, before any work is done for it; `inputs` are those of the pair."""
        paths = [self[name] for name in NAMES]
        refuse_result(self.path, [path.name for path in paths], last=self[REPORT].name, overwrite=overwrite)
        given = dict(inputs or {})
        first = given.get("initial_transform")
        if isinstance(first, (str, os.PathLike)) and Path(first).is_dir():
            given["initial_transform"] = ResultFolder(Path(first))[TRANSFORM]
        refuse_inputs(paths, given.values())

    @contextmanager
    def replaced(self, *, overwrite: bool) -> Iterator[ResultFolder]:
        """Give a folder for a new result, which replaces the old one as a whole at the end of the block."""
        names = [self[name].name for name in NAMES]
        with write_together(self.path, names, last=self[REPORT].name, overwrite=overwrite) as staging:
            yield ResultFolder(staging, self.names)

    def remove(self) -> None:
        """Remove the files of the result, and the folder if it holds no others."""
        for name in NAMES:
            self[name].unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    def write_report(self, report: Report) -> None:
        write_atomically(self[REPORT], (json.dumps(report.to_json(), indent=2) + "\n").encode())


def find_results(root: PathLike) -> list[ResultFolder]:
    """All finished results in a folder and below, in order."""
    return [
        ResultFolder(path.parent)
        for path in sorted(Path(root).glob(f"**/{REPORT}"))
        if not any(part.endswith(SUFFIX) for part in path.parts)
    ]
