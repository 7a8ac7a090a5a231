"""Smooth maps that are diffeomorphisms by construction: the identity plus a sum of plane waves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.errors import InputError


@dataclass(frozen=True, eq=False)
class Waves:
    """x ↦ x + u(x), u(x) = Σ_k a_k sin(ω_k·x + p_k), one map per item of a batch.

    |∇u| ≤ Σ_k |a_k| |ω_k|. If that is below 1, the map is a diffeomorphism of the whole space: x ↦ y − u(x) is a
    contraction, so it has exactly one fixed point, and the determinant cannot change its sign.
    """

    amplitude: Tensor  # (B, K, D), in the unit of the points
    frequency: Tensor  # (B, K, D), radians per unit
    phase: Tensor  # (B, K)

    @classmethod
    def random(
        cls,
        batch: int,
        dim: int,
        *,
        wavelength: tuple[float, float],
        slope: float | Tensor,
        generator: torch.Generator,
        count: int = 12,
        dtype: torch.dtype = torch.float32,
    ) -> Waves:
        """Waves in random directions, with lengths in this range and the bound Σ|a||ω| = `slope`, a number or (B,).

        Amplitudes are proportional to the square of the wavelength. Tensors are on the generator's device.
        """
        if not bool((torch.as_tensor(slope) < 1).all()):
            raise InputError(f"slope is {slope}; expected less than 1, else the map may fold")
        like: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": generator.device}
        length = torch.rand(batch, count, 1, **like)
        length = wavelength[0] * (wavelength[1] / wavelength[0]) ** length
        frequency = F.normalize(torch.randn(batch, count, dim, **like), dim=-1) * (2 * torch.pi / length)
        amplitude = F.normalize(torch.randn(batch, count, dim, **like), dim=-1) * length**2
        bound = (amplitude.norm(dim=-1) * frequency.norm(dim=-1)).sum(dim=-1)
        amplitude = amplitude * (torch.as_tensor(slope, dtype=dtype, device=bound.device) / bound)[..., None, None]
        phase = 2 * torch.pi * torch.rand(batch, count, **like)
        return cls(amplitude, frequency, phase)

    def __call__(self, points: Tensor) -> Tensor:
        """Push points (B, ..., D) forward."""
        return points + self.displacement(points)

    def displacement(self, points: Tensor) -> Tensor:
        """u at points (B, ..., D)."""
        flat = points.reshape(len(points), -1, points.shape[-1])
        total = torch.zeros_like(flat)
        # One wave at a time: all at once would need K times the memory.
        amplitude, frequency, phase = (part.to(points) for part in (self.amplitude, self.frequency, self.phase))
        for k in range(phase.shape[1]):
            angle = flat @ frequency[:, k, :, None] + phase[:, k, None, None]
            total = total + torch.sin(angle) * amplitude[:, k, None]
        return total.reshape(points.shape)

    def inverse(self, points: Tensor, tolerance: float = 1e-9) -> Tensor:
        """The points (B, ..., D) that the map takes to these, to this tolerance if their dtype allows."""
        solution, last_change = points, torch.inf
        while True:
            update = points - self.displacement(solution)
            change = float((update - solution).abs().max()) if points.numel() else 0.0
            if change <= tolerance or change >= last_change:  # no longer shrinking: the dtype's precision is reached
                return update
            solution, last_change = update, change
