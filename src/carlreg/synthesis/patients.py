"""Synthetic patients: one canonical torso under known smooth maps, so that correspondences are exact.

World positions are in millimetres, in ITK's LPS frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.geometry.grids import Grid, along_axes
from carlreg.synthesis.shapes import BLOCK, Canvas
from carlreg.synthesis.torso import AIR, PHASES, Phase, draw
from carlreg.synthesis.waves import Waves

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Scan:
    """An image of a patient. `affine` maps voxel indices to world millimetres (LPS), as in `files.images.Image`."""

    data: npt.NDArray[np.int16]  # Hounsfield units
    labels: npt.NDArray[np.uint8]  # of LABELS
    affine: Array  # (D + 1, D + 1)


@dataclass(frozen=True, eq=False)
class Patient:
    """The shape and the appearance of one patient. Use `patient` to make one.

    >>> scan = patient(1).scan((128, 128, 96), spacing=3.0)
    """

    linear: Tensor  # (D, D) and (D,): to_canonical(x) = waves(linear x + shift)
    shift: Tensor
    waves: tuple[Waves, ...]  # the last acts first
    phase: Phase
    texture: int
    """Seed for what has no counterpart in other patients: grain of organs, small vessels, bowel."""
    level: float | None = None
    """The canonical z of a 2-D patient's slice."""

    @property
    def dim(self) -> int:
        return len(self.shift)

    def moved(self, by: Sequence[float]) -> Patient:
        """The same patient, shifted along the world axes (mm)."""
        offset = torch.tensor(np.asarray(by, dtype=np.float64).tolist(), dtype=torch.float64)
        if offset.shape != self.shift.shape:
            raise InputError(f"by is {tuple(by)}; expected {self.dim} numbers for this patient")
        return replace(self, shift=self.shift - self.linear @ offset)

    def to_canonical(self, points: npt.ArrayLike) -> Array:
        """Map world points (..., D) of this patient to the canonical anatomy."""
        tensor, shape = self._tensor(points)
        return np.asarray(self._to_canonical(tensor).numpy().reshape(shape))

    def from_canonical(self, points: npt.ArrayLike) -> Array:
        """Map canonical points (..., D) to world points of this patient: the inverse, to less than 1e-6 mm."""
        tensor, shape = self._tensor(points)
        for waves in self.waves:
            tensor = waves.inverse(tensor)
        inverse = torch.linalg.inv(self.linear)
        return np.asarray(((tensor - self.shift) @ inverse.mT).numpy().reshape(shape))

    def _to_canonical(self, points: Tensor) -> Tensor:  # (1, N, D)
        points = points @ self.linear.to(points).mT + self.shift.to(points)
        for waves in reversed(self.waves):
            points = waves(points)
        return points

    def _tensor(self, points: npt.ArrayLike) -> tuple[Tensor, tuple[int, ...]]:
        array = np.asarray(points, dtype=np.float64)
        if array.shape[-1:] != (self.dim,):
            raise InputError(f"points have shape {array.shape}; expected (..., {self.dim}) for this patient")
        return torch.from_numpy(np.ascontiguousarray(array)).reshape(1, -1, self.dim), array.shape

    def scan(
        self,
        shape: Sequence[int],
        spacing: float | Sequence[float] = 3.0,
        *,
        centre: Sequence[float] | None = None,
        noise: float = 12.0,
        seed: int = 0,
    ) -> Scan:
        """An image of this shape and spacing (mm), centred on a world point: by default the middle of the abdomen.

        `noise` is a standard deviation in HU, drawn from `seed`. Apart from noise, a world point has the same value in
        every scan of the same spacing.
        """
        if len(shape) != self.dim:
            raise InputError(f"shape is {tuple(shape)}; expected {self.dim} sides for this patient")
        steps = np.broadcast_to(np.asarray(spacing, dtype=np.float64), (self.dim,))
        middle = np.zeros(self.dim) if centre is None else np.asarray(centre, dtype=np.float64)
        if min(shape) < 1 or not (steps > 0).all() or middle.shape != (self.dim,):
            raise InputError(
                f"shape {tuple(shape)}, spacing {spacing}, centre {centre}; expected positive numbers and a centre of "
                f"{self.dim} coordinates"
            )
        affine = np.diag([*steps, 1.0])
        affine[:-1, -1] = middle - steps * (np.array(shape) - 1) / 2

        whole = [math.ceil(n / BLOCK) * BLOCK for n in shape]
        index = Grid(tuple(whole), (0.0,) * self.dim, (1.0,) * self.dim).points()
        world = index * torch.tensor(steps.tolist()) + torch.tensor(affine[:-1, -1].tolist())
        points = self._to_canonical(world.reshape(1, -1, self.dim)).reshape(world.shape).movedim(-1, 0)
        if self.level is not None:
            points = torch.cat([points, torch.full_like(points[:1], self.level)])
        canvas = Canvas(points, softness=float(steps.mean()), background=AIR)
        draw(canvas, self.phase, self.texture)
        window = tuple(slice(n) for n in shape)
        values = canvas.values()[window]
        if noise > 0:
            grain = torch.randn(1, 1, *shape, generator=torch.Generator().manual_seed(seed))
            grain = along_axes(grain, _smooth_rows)  # a scanner's noise is correlated between voxels
            values = values + noise * (grain / grain.std())[0, 0]
        data = values.round().clamp(-1024, 3071).to(torch.int16).numpy()
        return Scan(data, canvas.labels()[window].numpy().copy(), affine)


def patient(
    seed: int, *, dim: int = 3, variation: float = 1.0, phase: Phase | None = None, level: float = 15.0
) -> Patient:
    """A random patient. `variation` 0 is the canonical anatomy, 1 the usual variation of size, posture and shape.

    A 2-D patient is the axial slice of the torso at canonical z = `level`, with a map of its plane.
    """
    if dim not in (2, 3):
        raise InputError(f"dim is {dim}; expected 2 or 3")
    if not 0 <= variation <= 1.5:
        raise InputError(f"variation is {variation}; expected 0 to 1.5, beyond which anatomy may fold")
    if phase is not None and phase not in PHASES:
        raise InputError(f"unknown phase {phase!r}; expected one of {', '.join(PHASES)}")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    skew = normal(dim, dim)
    generator_of_linear = 0.04 * (skew - skew.mT) + torch.diag(0.06 * normal(dim))  # rotations, then sizes
    linear = torch.matrix_exp(variation * generator_of_linear)
    shift = 6.0 * variation * normal(dim)
    lengths, slope = (160.0, 500.0), 0.6 * variation
    waves = tuple(
        Waves.random(1, dim, wavelength=lengths, slope=slope, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    texture = int(torch.randint(2**31, (), generator=generator))
    chosen = PHASES[int(torch.multinomial(torch.tensor([0.2, 0.2, 0.6]), 1, generator=generator))]
    return Patient(linear, shift, waves, phase or chosen, texture, level if dim == 2 else None)


def correspondence(first: Patient, second: Patient) -> Callable[[npt.ArrayLike], Array]:
    """The map from world points (..., D) of the first patient to the corresponding points of the second.

    >>> landmarks_of_second = correspondence(patient(1), patient(2))(landmarks)
    """
    if first.level != second.level:
        raise InputError(f"the patients are slices at levels {first.level} and {second.level}; expected the same level")
    return lambda points: second.from_canonical(first.to_canonical(points))


def _smooth_rows(rows: Tensor) -> Tensor:
    kernel = torch.tensor([[[0.2, 0.6, 0.2]]], dtype=rows.dtype, device=rows.device)
    padded = torch.nn.functional.pad(rows, (1, 1), mode="replicate")
    return torch.nn.functional.conv1d(padded.transpose(0, 1), kernel).transpose(0, 1)
