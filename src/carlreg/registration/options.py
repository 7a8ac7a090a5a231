"""The request for `register`: the inputs of a pair, and how to register it. Imports neither torch nor numpy.

The text beside each field is its documentation and the help of its command-line option; the last word is the section
of `carl register --help` that shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal, get_args

from carlreg.errors import InputError

TransformKind = Literal["deformable", "affine", "rigid"]
Optimize = Literal["auto", "weights", "fields"]
FitSource = Literal["network", "attention"]
ConfidenceLevel = Literal["auto", "full", "off"]
SimilarityName = Literal["lncc", "lncc2", "mind", "ssd"]
SimilarityChoice = Literal["auto", "lncc", "lncc2", "mind", "ssd"]
IMAGES, QUALITY, LABELS, OUTPUT, ADVANCED = "Images", "Quality", "Labels and landmarks", "Output", "Advanced"
"""Sections of `carl register --help`, in this order."""


@dataclass(frozen=True, kw_only=True)
class PairInputs:
    """A fixed and a moving image and what belongs to them, each in any form that `register` accepts."""

    fixed: Annotated[Any, "The fixed image: a file or a DICOM folder. [required, or --pairs]", IMAGES]
    moving: Annotated[Any, "The moving image. [required, or --pairs]", IMAGES]
    fixed_mask: Annotated[
        Any, "Mask of the fixed image, on its grid: the similarity is measured inside it.", IMAGES
    ] = None
    moving_mask: Annotated[
        Any, "Mask of the moving image, on its grid: the similarity is measured inside it.", IMAGES
    ] = None
    fixed_seg: Annotated[Any, "Labels of the fixed image, on its grid, for scoring only.", LABELS] = None
    moving_seg: Annotated[
        Any, "Labels of the moving image, on its grid, for scoring only; also written warped.", LABELS
    ] = None
    fixed_landmarks: Annotated[Any, "Landmarks of the fixed image, for scoring only.", LABELS] = None
    moving_landmarks: Annotated[Any, "The same landmarks in the moving image, in the same order.", LABELS] = None
    initial_transform: Annotated[
        Any,
        "An initial transform from fixed to moving points: a transform file, or a folder of an earlier result.",
        IMAGES,
    ] = None
    guide: Annotated[
        Any,
        "Corresponding points that pull the result, such as corrections by hand: a CSV file with the columns fixed_x, "
        "fixed_y, fixed_z, moving_x, moving_y, moving_z in mm (LPS), or fixed_r, fixed_a, fixed_s, … (RAS).",
        LABELS,
    ] = None
    guide_fixed: Annotated[
        Any, "Instead of --guide: points of the fixed image, in any format of landmarks.", LABELS
    ] = None
    guide_moving: Annotated[Any, "The corresponding points of the moving image, in the same order.", LABELS] = None
    rigid_mask: Annotated[
        Any,
        "Regions of the fixed image, on its grid, that move but do not bend, such as a tumour or bones: each number "
        "other than 0 is one.",
        LABELS,
    ] = None
    moving_rigid_mask: Annotated[Any, "Such regions of the moving image, on its grid.", LABELS] = None

    def __post_init__(self) -> None:
        if self.fixed_seg is not None and self.moving_seg is None:
            raise InputError("fixed_seg was given without moving_seg; expected labels of both images, to be compared")
        if (self.fixed_landmarks is None) != (self.moving_landmarks is None):
            raise InputError("landmarks were given for one image only; expected them for both, in the same order")
        if (self.guide_fixed is None) != (self.guide_moving is None):
            raise InputError("guide points were given for one image only; expected guide_fixed and guide_moving")
        if self.guide is not None and self.guide_fixed is not None:
            raise InputError("guide and guide_fixed were both given; expected one of them")

    @property
    def has_rigid_regions(self) -> bool:
        return self.rigid_mask is not None or self.moving_rigid_mask is not None

    @property
    def is_guided(self) -> bool:
        return self.guide is not None or self.guide_fixed is not None

    def sources(self) -> dict[str, Any]:
        """The inputs that were given, by name."""
        everything = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: source for name, source in everything.items() if source is not None}


@dataclass(frozen=True, kw_only=True)
class RegisterOptions:
    """How to register a pair. `carlreg.register` and `carl register` take their defaults from here."""

    transform: Annotated[TransformKind, "The kind of transform.", QUALITY] = "deformable"
    io_iterations: Annotated[
        int | None,
        "Steps of instance optimisation; 0 skips it. By default 50 when optimising the weights; 20 when optimising "
        "the fields, and three times as many on each of three coarser grids; none for rigid and affine transforms.",
        QUALITY,
    ] = None
    io_sim: Annotated[
        SimilarityChoice | Callable[..., Any],
        "The similarity measure to optimise. auto: lncc, with one scan recoloured like the other if their contrasts "
        "differ; lncc2 for the weights of the network then.",
        QUALITY,
    ] = "auto"
    optimize: Annotated[
        Optimize,
        "Optimise the displacement fields on the scans' own voxels, or the network's weights, as in the paper. auto: "
        "the fields.",
        QUALITY,
    ] = "auto"
    regularity: Annotated[
        float | None,
        "Weight of the regulariser. By default 1.5 when optimising the weights, 0.75 when optimising the fields; "
        "3 if --io-sim auto finds that the contrasts differ.",
        QUALITY,
    ] = None
    fit_source: Annotated[
        FitSource, "Fit rigid and affine transforms to the network's dense result, or to its attention alone.", ADVANCED
    ] = "network"
    allow_identity: Annotated[
        bool,
        "Start the optimisation from the unregistered images if they match better than the network's result.",
        ADVANCED,
    ] = True
    confidence: Annotated[
        ConfidenceLevel,
        "Judge how far the result can be trusted. auto: by evidence that takes at most a quarter of the registration's "
        "time. full: by all evidence. off: not at all; then no other ways are tried either.",
        QUALITY,
    ] = "auto"
    fix_orientation: Annotated[
        bool,
        "If the moving scan seems mirrored, or turned by quarter turns, because of a wrong header, register it the "
        "other way round. Without this, no result is ever mirrored.",
        "--fix-orientation",
        ADVANCED,
    ] = False
    certainty: Annotated[
        bool, "Show in report.html how certain the network is of its matches: quick on a GPU, slow elsewhere.", OUTPUT
    ] = False
    nan: Annotated[float | None, "Replace NaN and infinite values by this number.", IMAGES] = None
    frame: Annotated[
        Any, "The time point of 4-D images, or the page of TIFF files, from 0; N,M for fixed and moving.", IMAGES
    ] = None
    channel: Annotated[
        Any, "The channel of images in colour, from 0, or luminance, as for pictures; N,M for fixed and moving.", IMAGES
    ] = None
    series: Annotated[
        str | None,
        "The series of DICOM folders that hold several: its number, UID, or a part of its description.",
        IMAGES,
    ] = None
    fixed_series: Annotated[str | None, "The same for the fixed image alone.", IMAGES] = None
    moving_series: Annotated[str | None, "The same for the moving image alone.", IMAGES] = None
    device: Annotated[str, "auto, cpu, cuda, cuda:0 or mps.", ADVANCED] = "auto"
    seed: Annotated[int, "Random seed: the same seed gives the same result.", ADVANCED] = 0

    def __post_init__(self) -> None:
        for name, choices in (("transform", TransformKind), ("optimize", Optimize), ("fit_source", FitSource)):
            _check_choice(name, getattr(self, name), get_args(choices))
        _check_choice("confidence", self.confidence, get_args(ConfidenceLevel))
        if not callable(self.io_sim):
            _check_choice("io_sim", self.io_sim, get_args(SimilarityChoice))
        if self.io_iterations is not None and self.io_iterations < 0:
            raise InputError(f"io_iterations is {self.io_iterations}; expected 0 or more")
        if self.regularity is not None and not (math.isfinite(self.regularity) and self.regularity >= 0):
            raise InputError(f"regularity is {self.regularity}; expected a number, 0 or more")
        if self.nan is not None and not (isinstance(self.nan, (int, float)) and math.isfinite(self.nan)):
            raise InputError(f"nan is {self.nan}; expected a finite number")
        _check_numbers("frame", self.frame)
        _check_numbers("channel", self.channel, "luminance")
        if self.io_iterations and self.transform != "deformable" and self.fit_source == "attention":
            raise InputError("fit_source='attention' has nothing to optimise; expected 'network', or io_iterations=0")

    def check_guided(self) -> None:
        """Refuse options with which guide points would have no effect."""
        self._check_fields("guide")
        if self.io_iterations == 0:
            raise InputError("guide was given with io_iterations=0, but acts in the optimisation; expected 1 or more")

    def check_rigid_regions(self) -> None:
        """Refuse options with which regions cannot be kept from bending."""
        self._check_fields("rigid_mask")

    def _check_fields(self, given: str) -> None:
        for name, values in (("transform", ("deformable",)), ("optimize", ("auto", "fields"))):
            if (value := getattr(self, name)) not in values:
                raise InputError(f"{given} was given with {name}={value!r}; expected {' or '.join(map(repr, values))}")

    @property
    def optimizes_fields(self) -> bool:
        """Whether the fields are optimised after the network, by default or as chosen."""
        return self.transform == "deformable" and self.optimize != "weights" and self.io_iterations != 0

    @property
    def similarity_name(self) -> str:
        """`io_sim` by its name, or that of the function."""
        return self.io_sim if isinstance(self.io_sim, str) else getattr(self.io_sim, "__name__", "a function")

    def as_json(self) -> dict[str, Any]:
        """The options as they were asked for, for a report."""
        values = asdict(self) | {"io_sim": self.similarity_name}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _check_numbers(name: str, value: Any, word: str = "") -> None:
    """Refuse anything but a number from 0, the word, or two of these."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    if value is not None and not all(part == word or (isinstance(part, int) and part >= 0) for part in parts):
        raise InputError(f"{name} is {value!r}; expected a number from 0{f' or {word!r}' if word else ''}")
    if len(parts) not in (1, 2):
        raise InputError(f"{name} is {value!r}; expected one for both images, or one for each")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        raise InputError(f"unknown {name}={value!r}; expected {expected}")
