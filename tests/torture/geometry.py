"""Every axis order, oblique directions and far origins, against SimpleITK; and many registrations in one process."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from typing import Any

import numpy as np

from torture.bench import SIDE, scene
from torture.families import Family, generator

ORDERS = [
    (order, signs) for order in itertools.permutations(range(3)) for signs in itertools.product((1, -1), repeat=3)
]
TILTS = (0.0, 0.1, 0.7)
ORIGINS = ((0.0, 0.0, 0.0), (-120.5, 33.0, 900.0), (1e4, -2e4, 5e3), (-0.25, 0.125, 3.0))


def oriented(case: int, name: str) -> Any:
    """A small image with the case's axis order, tilt and origin."""
    from carlreg.files.images import from_array

    rng = np.random.default_rng(generator(name, case).randrange(2**32))
    (order, signs), tilt, origin = list(itertools.product(ORDERS, TILTS, ORIGINS))[case]
    axes = np.zeros((3, 3))
    for column, (row, sign) in enumerate(zip(order, signs, strict=True)):
        axes[row, column] = sign
    c, s = np.cos(tilt), np.sin(tilt)
    turn = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]]) @ np.array([[1, 0, 0], [0, c, -s], [0, s, c]])
    affine = np.eye(4)
    affine[:3, :3] = turn @ axes * rng.uniform(0.5, 3.0, 3)
    affine[:3, 3] = origin
    return from_array(rng.permutation(9 * 11 * 10).reshape(9, 11, 10).astype(np.float32), affine)


def against_simpleitk(case: int) -> str | None:
    """Resampling through a transform with both, and reorienting to RAS without moving a voxel."""
    import SimpleITK as sitk  # noqa: N813

    from carlreg.files import world_transform
    from carlreg.files.images import map_points
    from carlreg.files.orientation import to_closest_ras

    fixed, moving = oriented(case, "fixed"), oriented(case, "moving")
    rng = np.random.default_rng(case)
    centre = map_points(fixed.affine, (np.array(fixed.shape) - 1) / 2)
    target = map_points(moving.affine, (np.array(moving.shape) - 1) / 2)
    linear = np.eye(3) + 0.1 * rng.standard_normal((3, 3))
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = linear, target - linear @ centre
    field = (0.5 * rng.standard_normal((*fixed.shape, 3))).astype(np.float32)
    transform = world_transform.WorldTransform(matrix, field, fixed.affine)
    ours = world_transform.apply(transform, moving, fixed).data
    theirs = sitk.GetArrayFromImage(sitk.Resample(moving.to_sitk(), fixed.to_sitk(), transform.to_sitk())).T
    apart = float(np.abs(ours - theirs).max())
    if apart > 0.5:  # of 990, but for voxels that the two may place on either side of the border
        worst = np.abs(ours - theirs) > 0.5
        if worst.mean() > 0.01:
            return f"differs from SimpleITK by {apart:.3g} at {100 * worst.mean():.1f} % of the voxels"
    turned = to_closest_ras(fixed)
    cosines = np.diag([-1, -1, 1]) @ turned.affine[:3, :3] / np.array(turned.spacing)
    if cosines.diagonal().min() <= 0:
        return "an axis runs away from right, anterior or superior"
    before, after = (map_points(image.affine, np.argwhere(image.data >= 0)) for image in (fixed, turned))
    order = [np.argsort(image.data.ravel()) for image in (fixed, turned)]  # every value occurs once
    moved = float(np.abs(before[order[0]] - after[order[1]]).max())
    return f"a voxel moved by {moved:.3g} mm" if moved > 1e-9 * (1 + np.abs(fixed.affine).max()) else None


WATCHED: dict[str, float] = {}


@functools.cache
def model() -> Any:
    from carlreg.model.loaded import load_model

    return load_model(str(scene() / "tiny.safetensors"), "cpu")


def weights() -> str:
    total = hashlib.sha256()
    for tensor in model().network.state_dict().values():
        total.update(tensor.numpy().tobytes())
    return total.hexdigest()


def held() -> dict[str, float]:
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return {"MiB": resident, "descriptors": len(os.listdir("/proc/self/fd"))}


def one_more(case: int) -> str | None:
    """A registration in this process: memory, descriptors and weights stay as they are."""
    import carlreg

    before = weights()
    rng = np.random.default_rng(case)
    images = [rng.random((SIDE, SIDE, SIDE)).astype(np.float32) for _ in range(2)]
    carlreg.register(fixed=images[0], moving=images[1], model=model(), io_iterations=case % 2, device="cpu")
    if weights() != before:
        return "the weights have changed"
    now = held()
    if len(WATCHED) == 0 and case > 0:
        WATCHED.update(now)
    for what, allowed in (("MiB", 200.0), ("descriptors", 5.0)):
        if WATCHED and now[what] > WATCHED[what] + allowed:
            return f"{now[what]:.0f} {what}, {WATCHED[what]:.0f} at the beginning"
    return None


def families() -> list[Family]:
    return [
        Family("orientations against SimpleITK", len(ORDERS) * len(TILTS) * len(ORIGINS), against_simpleitk),
        Family("registrations in one process", 1_000, one_more),
    ]
