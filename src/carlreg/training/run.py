"""A training run, from images on disk to a model file: what `carl train` does.

Everything that can be checked is checked before the first step: images, labels, the folder, the model, the device.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import carlreg
from carlreg.fast.devices import choose_device
from carlreg.fast.precision import Precision
from carlreg.files.atomic import write_atomically
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.encoder import Encoder, Symmetrized
from carlreg.model.files import load, read_metadata
from carlreg.model.loaded import CT_RANGE, ct_range_of, find_model, voxel_of
from carlreg.model.shipped import available
from carlreg.model.unet import UNet
from carlreg.model.zoo import carl, carl_rot, gradicon, xi
from carlreg.objective.losses import SIMILARITIES
from carlreg.training import cache
from carlreg.training import cohort as manifest
from carlreg.training.augmentation import Augmentation
from carlreg.training.distributed import launch, processes
from carlreg.training.logging import Board, is_installed, picture, plot_curves
from carlreg.training.loop import Progress, train
from carlreg.training.pairs import TrainingPairs
from carlreg.training.stages import Stage
from carlreg.training.validation import Validation

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]

FORMAT = "carlreg-run-1"
FILES = ("config.json", "state.pt", "last.safetensors", "best.safetensors", "log.jsonl", "curves.png")
BOARD = "tensorboard"
NETWORKS: dict[str, Callable[..., RegistrationAlgorithm]] = {
    "carl": carl,
    "carl_rot": carl_rot,
    "gradicon": gradicon,
    "xi": xi,
}
SIZES: dict[str, dict[str, Any]] = {
    "paper": {"width": 128, "unet_down": (16, 32, 64, 256, 512), "unet_up": (256, 128, 64, 32, 16)},
    "small": {"width": 64, "unet_down": (16, 32, 64, 128, 160), "unet_up": (128, 96, 64, 32, 16)},
    "tiny": {"width": 8, "unet_down": (4, 8, 8, 8, 8), "unet_up": (8, 8, 8, 8, 8)},
}
"""The paper's network; that of `carl-base`; and one to try things out with."""


@dataclass(frozen=True)
class Settings:
    """All that decides what a run learns, or how often it looks at it."""

    model: str = "carl"
    """`carl`, `carl_rot`, `gradicon` or `xi` for a new network; the name or path of a trained model to go on from."""
    size: str = "small"
    """Of a new network: `paper`, `small` or `tiny`."""
    width: int | None = None
    """Channels of a new network's encoder, where not those of its size."""
    handed: int | None = None
    """Determinants in a new `carl_rot`'s encoder that tell left from right; the paper has none."""
    grid: tuple[int, ...] | None = None
    """Sides of the network's grid; that of the trained model, or the images' own, where not given."""
    voxel: float | None = None
    """Millimetres of cubic voxels in which images are laid into the grid, around what they show, instead of being
    stretched to it: for rotations. That of the trained model, or none, where not given."""
    batch: int = 4
    """Pairs in a step, over all processes."""
    diffusion_steps: int | None = None
    """First, with diffusion: 1500 for a new network, 4500 if it learns rotations, none for a trained one."""
    steps: int = 50_000
    """With GradICON."""
    refine_steps: int = 0
    """Then, with one more refinement."""
    rate: float = 1e-4
    final_rate: float | None = None
    regularity: float = 1.5
    """λ."""
    similarity: str = "lncc"
    label_weight: float = 0.0
    """Of the overlap of the training images' labels; the paper does without."""
    affine_noise: float = 0.05
    flips: bool = True
    permutations: bool = False
    rotate: bool | None = None
    """Rotations inside the loss; by default for `carl_rot`, and for what goes on from such a network."""
    freeze_batch_norm: bool = False
    seed: int = 0
    precision: Precision = "auto"
    validation_fraction: float | None = None
    validation_pairs: int = 20
    validate_every: int = 500
    save_every: int = 500
    log_every: int = 20

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "validation_pairs", "validate_every", "save_every", "log_every"):
            if getattr(self, name) < (name != "steps"):
                raise ValueError(f"{name} is {getattr(self, name)}; expected {int(name != 'steps')} or more")
        for name in ("rate", "regularity", "label_weight", "affine_noise"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number of 0 or more")
        if self.handed is not None and (self.model != "carl_rot" or self.handed < 0):
            raise ValueError(f"handed is {self.handed} for {self.model}; expected 0 or more, for a new carl_rot alone")
        if self.voxel is not None and not (self.voxel > 0 and math.isfinite(self.voxel)):
            raise ValueError(f"voxel is {self.voxel}; expected a number of millimetres above 0")
        if self.similarity not in SIMILARITIES:
            raise ValueError(f"unknown similarity {self.similarity!r}; expected one of {', '.join(SIMILARITIES)}")
        if self.precision not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"unknown precision {self.precision!r}; expected auto, float32 or bfloat16")
        if self.size not in SIZES:
            raise ValueError(f"unknown size {self.size!r}; expected one of {', '.join(SIZES)}")
        if not any(stage.steps for stage in self.stages()):
            raise ValueError("there are no steps to train; expected some of either kind")

    @property
    def is_new(self) -> bool:
        """Whether a new network is trained."""
        return self.model in NETWORKS

    @property
    def turns(self) -> bool:
        """Whether the network is a CARL{ROT}, whose encoder is averaged over rotations."""
        if self.is_new:
            return self.model == "carl_rot"
        try:
            return Symmetrized.__name__ in read_metadata(find_model(self.model))["architecture"]
        except (ValueError, FileNotFoundError):
            return False  # what is wrong with the model is told where it is loaded

    def stages(self) -> list[Stage]:
        rotate = self.turns if self.rotate is None else self.rotate
        turns_anew = rotate and self.is_new  # as the authors begin with CARL{ROT}: Ξ alone, three times as long
        first = 4_500 if turns_anew else 1_500 if self.is_new else 0
        if self.diffusion_steps is not None:
            first = self.diffusion_steps
        common: dict[str, Any] = {
            "weight": self.regularity,
            "learning_rate": self.rate,
            "similarity": self.similarity,
            "label_weight": self.label_weight,
            "rotate": rotate,
        }
        begin = {**common, "weight": (7 if turns_anew else 1) * self.regularity, "first_step_alone": turns_anew}
        later = {**common, "final_learning_rate": self.final_rate}
        careful = 0 if self.is_new else min(100, self.steps // 10)  # Adam knows nothing yet of a trained network
        stages = [
            Stage(first, "diffusion", **begin),
            Stage(self.steps, warm_up=careful, **later),
            Stage(self.refine_steps, refine=True, **later),
        ]
        return [stage for stage in stages if stage.steps > 0]


FREE = ("validate_every", "save_every", "log_every")
"""Settings that may change when a run goes on."""


@dataclass(frozen=True)
class Watch:
    """What a run tells as it goes, for whoever shows it."""

    say: Callable[[str], None] = logger.info
    preparing: Callable[[int, int], None] = lambda done, of: None
    begin: Callable[[int, int], None] = lambda done, of: None
    """Steps done before, and steps in all."""
    progress: Callable[[Progress, int], None] = lambda progress, step: None
    """With the step counted over all stages."""
    validated: Callable[[str], None] = lambda words: None


def run(
    data: PathLike,
    out: PathLike,
    settings: Settings | None = None,
    *,
    val: PathLike | None = None,
    cache_folder: PathLike | None = None,
    device: str | torch.device = "auto",
    devices: int = 1,
    nodes: int = 1,
    seconds: float | None = None,
    overwrite: bool = False,
    tensorboard: bool | None = None,
    watch: Watch | None = None,
) -> Path:
    """Train on a CSV file or a folder of images, and give the path of the model: the best by validation, or the last.

    A folder `out` with a run of the same settings on the same images goes on where it stands; of others, it is refused
    unless `overwrite` says to start anew. `tensorboard` is used where it is installed, unless it says otherwise.

    >>> model = run("scans.csv", "run", Settings(steps=20_000))
    """
    settings, folder, shown = settings or Settings(), Path(out), watch or Watch()
    place = choose_device(device)
    count = math.prod(processes(devices, nodes))
    if settings.batch % count:
        raise ValueError(f"a batch of {settings.batch} cannot be shared by {count} processes; expected a multiple")
    path = None if settings.is_new else _model_file(settings)
    known = {} if path is None else read_metadata(path)
    training, validation = manifest.read(data, val=val, fraction=settings.validation_fraction)
    if settings.label_weight and sum(case.labels is not None for case in training.cases) < 2:
        raise manifest.DatasetError(
            f"label_weight is {settings.label_weight:g}, but fewer than two of the training images in {data} have "
            "labels; expected label maps for some of them, or a weight of 0"
        )
    cohorts = [cohort for cohort in (training, validation) if cohort is not None]
    cases = [case for cohort in cohorts for case in cohort.cases]
    dim = cache.dimension(cases)
    model = _new_network(settings, dim) if path is None else _trained_network(path, dim)
    sides = settings.grid or (tuple(int(n) for n in known["grid"].split()) if "grid" in known else None)
    grid = cache.choose_grid(cases, sides)
    ct_range = CT_RANGE if path is None else ct_range_of(known, path)
    voxel = settings.voxel or (None if path is None else voxel_of(known, path))
    prepared = cache.prepare(
        cases, grid, cache_folder, lambda done: shown.preparing(done, len(cases)), ct_range=ct_range, voxel=voxel
    )
    split = len(training.cases)
    config = {
        "format": FORMAT,
        "settings": json.loads(json.dumps(asdict(settings))),
        "grid": list(grid),
        "ct_range": list(ct_range),
        "voxel": voxel,
        "start": "new" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:32],
        "data": {
            "source": os.fspath(data),
            "training": {"images": split, training.unit: len(training)},
            "validation": None
            if validation is None
            else {"images": len(validation.cases), validation.unit: len(validation)},
            "digest": cache.digest(prepared),
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {"carlreg": carlreg.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    resumes = _check_folder(folder, config, overwrite)
    if tensorboard and not is_installed("tensorboard"):
        raise ImportError("TensorBoard is not installed: pip install tensorboard, or do without it")

    team, place = launch(place, devices, nodes)
    if not team.leads:
        shown = Watch()
    if team.leads and not resumes:
        _start_folder(folder, config)
    team.barrier()
    stages = settings.stages()
    offsets = [sum(stage.steps for stage in stages[:i]) for i in range(len(stages) + 1)]
    done = _steps_done(folder, offsets) if resumes else 0
    shown.say(
        f"{split} images to train on, {len(cases) - split} to validate with, grid {' × '.join(map(str, grid))}"
        f"{f' with voxels of {voxel:g} mm' if voxel else ''}, "
        f"{config['parameters'] / 1e6:.2f} M parameters, on {place}" + (f" × {team.size}" if team.size > 1 else "")
    )
    if resumes:
        what = f"going on after step {done} of {offsets[-1]}" if done < offsets[-1] else "it is finished"
        shown.say(f"{folder} holds this run already: {what}")
    pairs = TrainingPairs(
        training,
        prepared[:split],
        batch=settings.batch,
        device=place,
        augmentation=Augmentation(settings.affine_noise, settings.flips, settings.permutations),
        labelled=settings.label_weight > 0,
    )
    judge = None
    if validation is not None and team.leads:
        judge = Validation(
            validation,
            prepared[split:],
            device=place,
            most_pairs=settings.validation_pairs,
            similarity=settings.similarity,
            precision=settings.precision,
        )
        judge()
        assert judge.latest is not None
        shown.say(f"{len(judge.pairs)} pairs to validate with: {judge.measure} {judge.latest.value:.4f} unregistered")
    wanted = is_installed("tensorboard") if tensorboard is None else tensorboard
    board = Board(folder / BOARD, done) if wanted and team.leads else None
    now = done

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        nonlocal now
        now += 1
        return pairs(generator)

    def progress(at: Progress) -> None:
        shown.progress(at, now)
        if board is not None:
            board.progress(at, now)

    def validate(candidate: RegistrationAlgorithm) -> float:
        assert judge is not None
        score = judge(candidate)
        assert judge.latest is not None
        value, folds = judge.latest.value, judge.latest.folds
        shown.validated(f"validation: {judge.measure} {value:.4f}, folds {folds:.3f} %")
        if board is not None:
            pair = judge.pairs[0]
            board.validation(judge.measure, value, folds, now)
            board.picture(picture(*judge.images(pair), judge.register(candidate, pair)), now)
        return score

    shown.begin(done, offsets[-1])
    try:
        train(
            model.to(place),
            draw,
            stages,
            out=folder,
            seed=settings.seed,
            validate=None if judge is None else validate,
            validate_every=settings.validate_every,
            save_every=settings.save_every,
            log_every=settings.log_every,
            precision=settings.precision,
            seconds=seconds,
            callback=progress if team.leads else None,
            metadata=_metadata(folder, config, prepared[0].intensities, known),
            freeze_batch_norm=settings.freeze_batch_norm,
        )
    finally:
        if board is not None:
            board.close()
    if team.leads and (folder / "log.jsonl").exists():
        plot_curves(folder, None if judge is None else judge.measure)
    team.shut_down()
    best = folder / "best.safetensors"
    return best if best.exists() else folder / "last.safetensors"


# ---- the network ----------------------------------------------------------------------------------------------------


def _model_file(settings: Settings) -> Path:
    """The trained model to go on from."""
    if settings.width is not None:
        raise ValueError(f"a width is for a new network, but the model is {settings.model}; expected one of the two")
    try:
        return find_model(settings.model)
    except ValueError as error:
        raise ValueError(
            f"no model {settings.model!r}; expected one of {', '.join(NETWORKS)} for a new network, or to go on from "
            f"{', '.join(available())} or the path of a model file"
        ) from error


def _new_network(settings: Settings, dim: int) -> RegistrationAlgorithm:
    sizes = dict(SIZES[settings.size])
    if settings.width is not None:
        sizes["width"] = settings.width
    if settings.model == "gradicon":
        del sizes["width"]
    if settings.model == "carl_rot":
        sizes["handed"] = settings.handed or 0
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        if settings.model == "xi":
            return xi(dim, width=sizes["width"])
        return NETWORKS[settings.model](dim, 2, **sizes)


def _trained_network(path: Path, dim: int) -> RegistrationAlgorithm:
    model = load(path)
    network = next((m for m in model.modules() if isinstance(m, (Encoder, UNet))), None)
    if network is None:
        raise ValueError(f"{path} has no weights to train; expected a network with an Encoder or a UNet")
    if (network.dim, network.channels) != (dim, 1):
        raise ValueError(
            f"{path} is for {network.dim}-D images with {network.channels} channels, but these are {dim}-D with one; "
            "expected a model that fits: choose another, or train a new one"
        )
    return model


def _metadata(folder: Path, config: dict[str, Any], intensities: str, known: Mapping[str, str]) -> dict[str, str]:
    """What the model file says of itself; `carlreg.register` reads the grid. The terms of the model that training
    started from hold for what became of it."""
    data, settings = config["data"], config["settings"]
    counts = [f"{data['training']['images']} images for training"]
    if data["validation"] is not None:
        counts.append(f"{data['validation']['images']} for validation")
    return {
        "name": folder.resolve().name,
        "grid": " ".join(str(n) for n in config["grid"]),
        "intensities": "0 to 1",
        "ct_range": "{:g} {:g}".format(*config["ct_range"]),
        **({} if config["voxel"] is None else {"voxel": f"{config['voxel']:g}"}),
        "orientation": "axes closest to RAS",
        "data": ", ".join(counts),
        "preprocessing": f"of the first image: {intensities}",
        "training": json.dumps({"start": config["start"], **settings}),
        **{name: known[name] for name in ("licence",) if name in known},
    }


# ---- the folder -----------------------------------------------------------------------------------------------------


def _check_folder(folder: Path, config: dict[str, Any], overwrite: bool) -> bool:
    """Whether the folder holds this very run. Refuses it where it holds another, or something else."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; expected a folder for the run")
    found = sorted(p.name for p in folder.iterdir() if not _is_leftover(p)) if folder.exists() else []
    if not found:
        return False
    try:
        old = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        is_run = old["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        is_run = False
    if not is_run:
        raise FileExistsError(
            f"{folder} holds {found[0]}, but no run of carl train; expected a new or empty folder, or that of a run"
        )
    if overwrite:
        return False
    names = [name for name in config["settings"] if name not in FREE]
    pairs = [(name, old["settings"].get(name), config["settings"][name]) for name in names]
    pairs += [("grid", old["grid"], config["grid"]), ("starting weights", old["start"], config["start"])]
    pairs.append(("images", old["data"]["digest"], config["data"]["digest"]))
    for name, before, now in pairs:
        if before != now:
            raise FileExistsError(
                f"{folder} holds a run with other {name.replace('_', ' ')} ({before}, now {now}); expected the same "
                "command to go on with it, another folder, or --overwrite to start anew"
            )
    return True


def _is_leftover(path: Path) -> bool:
    """A file that was being written when a run was killed."""
    return any(path.name.startswith(f".{name}.") for name in FILES)


def _start_folder(folder: Path, config: dict[str, Any]) -> None:
    """Remove what an older run left, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    old = [folder / name for name in FILES] + [p for p in folder.iterdir() if _is_leftover(p)]
    old += list((folder / BOARD).glob("events.out.tfevents.*"))
    for path in old:
        path.unlink(missing_ok=True)
    write_atomically(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def _steps_done(folder: Path, offsets: Sequence[int]) -> int:
    """Steps of all stages up to the last checkpoint."""
    path = folder / "state.pt"
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return offsets[state["stage"]] + int(state["step"])
