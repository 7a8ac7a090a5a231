"""The options of `carl template` and `carl segment`. Imports neither torch nor numpy.

The text beside each field is its documentation and the help of its command-line option.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, get_args

from carlreg.errors import InputError
from carlreg.registration.options import RegisterOptions, SimilarityChoice, TransformKind

Fusion = Literal["majority", "local", "joint"]
MANY, NEAREST = 30, 20
"""With more atlases than `MANY`, the `NEAREST` are used by default."""


@dataclass(frozen=True, kw_only=True)
class AlignmentOptions:
    """How scans are registered, as for `carl register`."""

    io_iterations: Annotated[int | None, "Steps of instance optimisation, as for `carl register`."] = None
    io_sim: Annotated[SimilarityChoice, "The similarity measure to optimise, as for `carl register`."] = "auto"
    regularity: Annotated[float | None, "Weight of the regulariser, as for `carl register`."] = None
    device: Annotated[str, "auto, cpu, cuda, cuda:0 or mps."] = "auto"
    seed: Annotated[int, "Random seed: the same seed gives the same result."] = 0

    def register_options(self, kind: TransformKind = "deformable") -> RegisterOptions:
        """Registrations are not judged: verdicts are calibrated for scans, not averages, and fusion weights atlases."""
        names = ("io_sim", "regularity", "device", "seed", *(["io_iterations"] if kind == "deformable" else []))
        return RegisterOptions(transform=kind, confidence="off", **{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class TemplateOptions(AlignmentOptions):
    """How to build a template. `carlreg.template` and `carl template` take their defaults from here."""

    iterations: Annotated[int, "Deformable registrations of every scan, after an affine one."] = 4
    spacing: Annotated[float | None, "Side of the template's cubic voxels in mm. By default as the scans have."] = None
    sharpen: Annotated[float, "How much every average is sharpened; 0 is not at all."] = 0.5

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise InputError(f"iterations is {self.iterations}; expected 1 or more")
        if self.spacing is not None and not 0 < self.spacing < math.inf:
            raise InputError(f"spacing is {self.spacing}; expected a number of mm above 0")
        if not 0 <= self.sharpen <= 5:
            raise InputError(f"sharpen is {self.sharpen}; expected a number from 0 to 5")
        self.register_options()

    def pinned(self) -> dict[str, Any]:
        """Options that change the result, but for the number of iterations: more of them go on from there."""
        return {name: value for name, value in asdict(self).items() if name not in ("iterations", "device")}


@dataclass(frozen=True, kw_only=True)
class SegmentOptions(AlignmentOptions):
    """How to segment a scan. `carlreg.segment` and `carl segment` take their defaults from here."""

    fusion: Annotated[
        Fusion,
        "How the atlases' labels become one. majority: all count the same. local: by their local correlation with the "
        "scan. joint: joint label fusion, which also notices atlases that make the same mistakes.",
    ] = "joint"
    nearest: Annotated[
        int | None,
        "Use only so many atlases: those that resemble the scan most after a quick registration by the network alone. "
        "By default all, and 20 if there are more than 30.",
    ] = None

    def __post_init__(self) -> None:
        if self.fusion not in get_args(Fusion):
            raise InputError(f"unknown fusion={self.fusion!r}; expected one of {', '.join(get_args(Fusion))}")
        if self.nearest is not None and self.nearest < 1:
            raise InputError(f"nearest is {self.nearest}; expected 1 or more")
        self.register_options()

    def chosen(self, count: int) -> int:
        """The number of atlases to use out of so many."""
        usual = NEAREST if count > MANY else count
        return min(count, usual if self.nearest is None else self.nearest)
