"""Registrations by `carl register`, as a user would type it, and the pairs that are registered."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

from carlreg.files import orientation
from carlreg.files.images import Image
from carlreg.files.tables import Pair
from carlreg.files.world_transform import WorldTransform

SUBCORTICAL = (23, 30, 31, 32, 36, 37, 47, 48, 55, 56, 57, 58, 59, 60)
KINDS = {
    "network": ["--io-iterations", "0"],
    "fields": ["--optimize", "fields"],
    "affine": ["--transform", "affine"],
}
SEED = 0
KEPT = ("transform.h5", "inverse_transform.h5", "report.json")


def validation_pairs(folder: Path, name: str) -> list[tuple[str, str]]:
    """Ordered pairs of different subjects: all of them, or for the hippocampus 40 drawn with seed 0. Their order is
    random with a fixed seed, so that the first few are always the same and of various subjects."""
    subjects = sorted(
        path.name.removesuffix(".nii.gz") for path in folder.glob("*.nii.gz") if "_labels" not in path.name
    )
    pairs = [(fixed, moving) for fixed in subjects for moving in subjects if fixed != moving]
    if not pairs:
        sys.exit(f"{folder} has {len(subjects)} images; expected at least two, NAME.nii.gz with NAME_labels.nii.gz")
    if name == "hippocampus":
        pairs = random.Random(0).sample(pairs, min(40, len(pairs)))
    return random.Random(SEED).sample(pairs, len(pairs))


def command(pair: Pair, kind: str, work: Path, model: str) -> list[str]:
    """The command that registers a pair into a folder, with the options of this kind. The verdict on the result, and
    the other ways that are tried if it is bad, are no part of this comparison."""
    words = [sys.executable, "-m", "carlreg", "register", "--quiet", "--device", "cpu", "--seed", str(SEED)]
    words += ["--model", model, "-f", str(pair.fixed), "-m", str(pair.moving), "-o", str(work)]
    words += ["--fixed-seg", str(pair.fixed_seg), "--moving-seg", str(pair.moving_seg)]
    return [*words, "--confidence", "off", *KINDS[kind]]


def keep(work: Path, folder: Path) -> None:
    """Copy the transforms of a registration, and its report last."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in KEPT:
        shutil.copy(work / name, folder / name)


def is_kept(folder: Path, weights: str) -> bool:
    """Whether a pair's folder is complete and was made with these weights."""
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(report.get("model", {}).get("sha256") == weights) and all((folder / name).is_file() for name in KEPT)


def boxes(fixed: Image, moving: Image) -> WorldTransform:
    """T that maps the fixed image's box, with axes closest to RAS, onto the moving image's."""
    f, m = orientation.to_closest_ras(fixed), orientation.to_closest_ras(moving)
    return WorldTransform.linear(m.unit_to_world() @ f.world_to_unit())
