"""Linear interpolation whose gradients are the same bits in every run."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

FIXED_POINT = 2.0**40
"""The largest gradient as an integer: millions of them can be added without an overflow."""


def sample(values: Tensor, points: Tensor) -> Tensor:
    """values (B, C, *shape) at points (B, D, *out) of the unit cube, continued by their border: (B, C, *out).

    On a GPU, floating-point gradients of one voxel arrive in any order and round differently in each run; here they are
    added as integers.
    """
    result: Tensor = _Sample.apply(values, points.flatten(2))  # type: ignore[no-untyped-call]
    return result.reshape(*result.shape[:2], *points.shape[2:])


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, points: Tensor) -> Tensor:
        ctx.save_for_backward(values, points)
        flat, (index, weights, _) = values.flatten(2), _corners(values, points)
        return sum(_at(flat, i) * w[:, None] for i, w in zip(index, weights, strict=True))  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        values, points = ctx.saved_tensors
        gradient, flat = gradients[0], values.flatten(2)
        index, weights, slopes = _corners(values, points)
        scale = FIXED_POINT / gradient.abs().amax().clamp(min=torch.finfo(gradient.dtype).tiny * FIXED_POINT)
        total = torch.zeros_like(flat, dtype=torch.long)
        by_points = torch.zeros_like(points)
        for i, weight, slope in zip(index, weights, slopes, strict=True):
            share = (gradient * weight[:, None] * scale).round().long()
            total.scatter_add_(2, i[:, None].expand_as(share), share)
            by_points += slope * (_at(flat, i) * gradient).sum(1, keepdim=True)
        return (total / scale).to(values.dtype).reshape(values.shape), by_points


def _at(flat: Tensor, index: Tensor) -> Tensor:
    return flat.gather(2, index[:, None].expand(-1, flat.shape[1], -1))


def _corners(values: Tensor, points: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """For each corner of the points' cells: index (B, N), weight (B, N), and its slope along the axes (B, D, N)."""
    shape = values.shape[2:]
    low, fraction, inside = [], [], []
    for axis, side in enumerate(shape):
        position = points[:, axis] * (side - 1)
        first = position.floor().clamp(0, max(side - 2, 0))
        low.append(first.long())
        fraction.append((position - first).clamp(0, 1))
        inside.append(((position > 0) & (position < side - 1)) * float(side - 1))
    index, weights, slopes = [], [], []
    for corner in itertools.product((0, 1), repeat=len(shape)):
        at = torch.zeros_like(low[0])
        for axis, side in enumerate(shape):
            at = at * side + (low[axis] + corner[axis]).clamp(max=side - 1)
        parts = [f if c else 1 - f for f, c in zip(fraction, corner, strict=True)]
        others = [math.prod(parts[:a] + parts[a + 1 :]) * (2 * corner[a] - 1) * inside[a] for a in range(len(shape))]
        index.append(at)
        weights.append(torch.stack(parts).prod(dim=0))
        slopes.append(torch.stack(others, dim=1))
    return index, weights, slopes
