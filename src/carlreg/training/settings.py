"""Everything that can be set for `carl train`. Imports neither torch nor numpy.

The text beside each field is its documentation and the help of its command-line option; the last word is the panel of
`carl train --help` that shows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from carlreg.errors import InputError
from carlreg.registration.options import SimilarityName
from carlreg.training.stages import Stage

Size = Literal["paper", "small", "tiny"]
PrecisionName = Literal["auto", "float32", "bfloat16"]
NETWORKS = ("carl", "carl_rot", "gradicon", "xi")
NETWORK, SCHEDULE, AUGMENTATION = "Network", "Schedule", "Augmentation"
VALIDATION, EXECUTION = "Validation", "Execution"
SHARES = ("contrast", "deform", "margins", "crop", "thick_slices")
MAY_CHANGE = ("validate_every", "save_every", "log_every")
"""Settings that may change when a run is resumed."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run learns, and how often it validates, saves and logs."""

    model: Annotated[
        str,
        "carl, carl_rot, gradicon or xi for a new network; carl-base, carl-2d, carl-rot or a model file to continue "
        "from.",
        NETWORK,
    ] = "carl"
    size: Annotated[Size, "Size of a new network; small is the size of carl-base.", NETWORK] = "small"
    width: Annotated[int | None, "Channels of a new network's encoder. By default set by --size.", NETWORK] = None
    handed: Annotated[
        int | None,
        "Number of determinant features in the encoder of a new carl_rot, for example 16. They distinguish left from "
        "right; the paper has none.",
        NETWORK,
    ] = None
    grid: Annotated[
        tuple[int, ...] | None,
        "Sides of the network's grid, for example 96 or 96,112,96. Images are stretched to it, without wide empty "
        "margins. By default that of the trained model, otherwise the images' median shape, up to 96 in 3-D and 256 in "
        "2-D.",
        NETWORK,
    ] = None
    voxel: Annotated[
        float | None,
        "Resample images to cubic voxels of this many millimetres, centred on the foreground, instead of stretching "
        "them to the grid: for rotations. By default that of the trained model, if it has one.",
        NETWORK,
    ] = None
    batch: Annotated[int, "Pairs per step, over all devices.", SCHEDULE] = 4
    diffusion_steps: Annotated[
        int | None,
        "Steps of the first stage, with the diffusion regulariser. By default 1500 for a new network, 4500 if it "
        "learns rotations, 0 for a trained one.",
        SCHEDULE,
    ] = None
    steps: Annotated[int, "Steps of the main stage, with the GradICON regulariser.", SCHEDULE] = 50_000
    refine_steps: Annotated[int, "Steps of a last stage, with one more refinement network.", SCHEDULE] = 0
    rate: Annotated[float, "Learning rate.", SCHEDULE] = 1e-4
    final_rate: Annotated[
        float | None, "Final learning rate, reached by cosine decay. By default the rate is constant.", SCHEDULE
    ] = None
    regularity: Annotated[float, "Weight λ of the regulariser.", SCHEDULE] = 1.5
    similarity: Annotated[SimilarityName, "Similarity measure in the loss.", SCHEDULE] = "lncc"
    window: Annotated[
        float | None,
        "Standard deviation of the windows of lncc and lncc2, in voxels of the grid. By default 4, as in the paper.",
        SCHEDULE,
    ] = None
    label_weight: Annotated[
        float | None,
        "Weight of label overlap (1 − Dice) in the loss. By default 1 with --label-maps, otherwise 0: the paper trains "
        "without labels.",
        SCHEDULE,
    ] = None
    freeze_batch_norm: Annotated[bool, "Keep BatchNorm's statistics fixed, for small batches.", SCHEDULE] = False
    seed: Annotated[int, "Random seed: the same seed gives the same run.", SCHEDULE] = 0
    affine_noise: Annotated[float, "Strength of each image's random affine map; 0 for none.", AUGMENTATION] = 0.05
    flips: Annotated[bool, "Mirror random axes, the same in both images.", AUGMENTATION] = True
    permutations: Annotated[bool, "Permute axes at random, the same in both images.", AUGMENTATION] = False
    mirror: Annotated[
        bool, "Mirror left and right at random, the same in both images, and no other axis.", AUGMENTATION
    ] = False
    contrast: Annotated[
        float,
        "Share of images that the network sees in a random contrast. The loss compares the originals.",
        AUGMENTATION,
    ] = 0.0
    deform: Annotated[float, "Share of images to deform smoothly at random.", AUGMENTATION] = 0.0
    margins: Annotated[
        float, "Share of pairs whose scans are placed at random in a larger, empty image.", AUGMENTATION
    ] = 0.0
    crop: Annotated[float, "Share of images to crop by slices at either end of the last axis.", AUGMENTATION] = 0.0
    thick_slices: Annotated[
        float,
        "Share of images that the network sees with thick slices along one axis. The loss compares the originals.",
        AUGMENTATION,
    ] = 0.0
    label_maps: Annotated[
        str | None,
        "Folder of label maps, or a quoted pattern, to make pairs from: each map is rendered in a random contrast, and "
        "the loss compares both in the same one.",
        AUGMENTATION,
    ] = None
    label_map_share: Annotated[
        float | None, "Share of pairs that are made from --label-maps. By default 0.3.", AUGMENTATION
    ] = None
    rotate: Annotated[
        bool | None,
        "Rotate both images by random angles, and rotate the result back before the loss. By default only for "
        "carl_rot, carl-rot and models trained from them.",
        AUGMENTATION,
    ] = None
    validation_fraction: Annotated[
        float | None,
        "Fraction of the images to keep for validation; 0 for none. By default 0.1 if there is no split.",
        VALIDATION,
    ] = None
    validation_pairs: Annotated[int, "Maximum number of validation pairs.", VALIDATION] = 20
    validate_every: Annotated[int, "Steps between validations.", VALIDATION] = 500
    save_every: Annotated[int, "Steps between checkpoints.", EXECUTION] = 500
    log_every: Annotated[int, "Steps between log lines.", EXECUTION] = 20
    precision: Annotated[PrecisionName, "Precision of the network. auto: bfloat16 if the GPU has it.", EXECUTION] = (
        "auto"
    )

    def __post_init__(self) -> None:
        for name in ("batch", "width", "validation_pairs", "validate_every", "save_every", "log_every"):
            _check_least(name, getattr(self, name), 1)
        for name in ("steps", "diffusion_steps", "refine_steps", "rate", "final_rate", "regularity", "label_weight"):
            _check_least(name, getattr(self, name), 0)
        _check_least("affine_noise", self.affine_noise, 0)
        if self.window is not None and not (0.5 <= self.window < math.inf and self.similarity in ("lncc", "lncc2")):
            raise InputError(
                f"window is {self.window:g} for {self.similarity}; expected at least half a voxel, for lncc or lncc2"
            )
        for name in (*SHARES, "label_map_share"):
            if (share := getattr(self, name)) is not None and not 0 <= share <= 1:
                raise InputError(f"{name} is {share}; expected a share from 0 to 1")
        if self.label_map_share is not None and self.label_maps is None:
            raise InputError(
                f"label_map_share is {self.label_map_share:g}, but there are no label maps; expected label_maps, the "
                "folder of these (--label-maps)"
            )
        if self.handed is not None and (self.model != "carl_rot" or self.handed < 0):
            raise InputError(
                f"handed is {self.handed} for {self.model}; expected 0 or more, and only for a new carl_rot"
            )
        if self.voxel is not None and not (self.voxel > 0 and math.isfinite(self.voxel)):
            raise InputError(f"voxel is {self.voxel}; expected a number of millimetres above 0")
        for name, kind in (("size", Size), ("similarity", SimilarityName), ("precision", PrecisionName)):
            if getattr(self, name) not in get_args(kind):
                raise InputError(f"unknown {name} {getattr(self, name)!r}; expected one of {', '.join(get_args(kind))}")
        if not self.stages():
            raise InputError("there are no steps to train; expected some with diffusion or with GradICON")

    @property
    def is_new(self) -> bool:
        """Whether a new network is trained."""
        return self.model in NETWORKS

    @property
    def is_rotation_equivariant(self) -> bool:
        """Whether the network is a CARL{ROT}, whose encoder is averaged over rotations."""
        if self.is_new:
            return self.model == "carl_rot"
        from carlreg.model.encoder import Symmetrized
        from carlreg.model.files import read_metadata
        from carlreg.model.loaded import find_model

        try:
            return Symmetrized.__name__ in read_metadata(find_model(self.model))["architecture"]
        except (ValueError, FileNotFoundError):
            return False  # reported when the model is loaded

    @property
    def overlap_weight(self) -> float:
        """The weight of label overlap in the loss."""
        return float(self.label_maps is not None) if self.label_weight is None else self.label_weight

    @property
    def map_share(self) -> float:
        """The share of pairs that are made from label maps."""
        return 0.3 if self.label_map_share is None else self.label_map_share

    def stages(self) -> list[Stage]:
        """The stages of the run, without those of 0 steps."""
        rotate = self.is_rotation_equivariant if self.rotate is None else self.rotate
        starts_rotating = rotate and self.is_new  # as the authors begin with CARL{ROT}: Ξ alone, three times as long
        first = 4_500 if starts_rotating else 1_500 if self.is_new else 0
        if self.diffusion_steps is not None:
            first = self.diffusion_steps
        common: dict[str, Any] = {
            "learning_rate": self.rate,
            "similarity": self.similarity,
            "window": self.window,
            "label_weight": self.overlap_weight,
            "rotate": rotate,
        }
        later = {**common, "weight": self.regularity, "final_learning_rate": self.final_rate}
        warm_up = 0 if self.is_new else min(100, self.steps // 10)  # Adam has no statistics of a trained network yet
        weight = (7 if starts_rotating else 1) * self.regularity
        stages = [
            Stage(first, "diffusion", weight, first_step_alone=starts_rotating, **common),
            Stage(self.steps, warm_up=warm_up, **later),
            Stage(self.refine_steps, refine=True, **later),
        ]
        return [stage for stage in stages if stage.steps > 0]


@dataclass(frozen=True)
class Execution:
    """Where and for how long a run is executed. This does not change what it learns."""

    seconds: Annotated[float | None, "Write a checkpoint and stop after this many seconds.", EXECUTION] = None
    device: Annotated[str, "auto, cpu, cuda, cuda:0 or mps.", EXECUTION] = "auto"
    devices: Annotated[int, "Number of GPUs (or CPU processes) per machine.", EXECUTION] = 1
    nodes: Annotated[int, "Number of machines.", EXECUTION] = 1
    cache: Annotated[Path | None, "Folder for prepared images. By default ~/.cache/carlreg on Linux.", EXECUTION] = None
    tensorboard: Annotated[bool | None, "Log to TensorBoard. By default on if it is installed.", EXECUTION] = None

    def __post_init__(self) -> None:
        _check_least("seconds", self.seconds, 0)
        _check_least("devices", self.devices, 1)
        _check_least("nodes", self.nodes, 1)


def _check_least(name: str, value: float | None, least: int) -> None:
    if value is not None and not (value >= least and math.isfinite(value)):
        raise InputError(f"{name} is {value}; expected a number of {least} or more")
