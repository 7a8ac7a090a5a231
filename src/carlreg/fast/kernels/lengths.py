"""Scaling of feature vectors to one length, f ↦ length · f / (1e-3 + ‖f‖), and its gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Numbers that a program processes at a time."""


@triton.jit
def _scale(
    features,  # (rows, width)
    out,  # (rows, PADDED)
    rows,
    length,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    lane = tl.arange(0, PADDED)[None, :]
    f = tl.load(features + row * width + lane, mask=(row < rows) & (lane < width), other=0.0).to(tl.float32)
    norm = tl.sqrt(tl.sum(f * f, 1))[:, None]
    tl.store(out + row * PADDED + lane, f * (length / (1e-3 + norm)), mask=row < rows)


@triton.jit
def _scale_backward(
    features,  # (rows, width)
    gradient,  # (rows, PADDED)
    divisor,  # one number for each row, or one for all
    out,  # (rows, width)
    rows,
    length,
    width: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """length / (1e-3 + n) · (g − f · (f·g) / (n · (1e-3 + n))), with n = ‖f‖ and g the gradient over its divisor."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    lane = tl.arange(0, PADDED)[None, :]
    valid = (row < rows) & (lane < width)
    f = tl.load(features + row * width + lane, mask=valid, other=0.0).to(tl.float32)
    g = tl.load(gradient + row * PADDED + lane, mask=row < rows, other=0.0)
    g = g / (tl.load(divisor + row, mask=row < rows, other=1.0) if EACH else tl.load(divisor))
    norm = tl.sqrt(tl.sum(f * f, 1))[:, None]
    along = tl.sum(f * g, 1)[:, None] / tl.where(norm > 0, norm * (1e-3 + norm), 1.0)
    tl.store(out + row * width + lane, (length / (1e-3 + norm)) * (g - f * along), mask=valid)


def padded_width(width: int) -> int:
    """The number of features that the kernels use: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(width))


def _launch(features: Tensor, length: float) -> tuple[tuple[int], tuple[int, float, int], dict[str, int]]:
    """The grid of programs, and the numbers and constants that both kernels take."""
    batch, count, width = features.shape
    padded = padded_width(width)
    tile = {"ROWS": max(1, TILE // padded), "PADDED": padded}
    return (triton.cdiv(batch * count, tile["ROWS"]),), (batch * count, length, width), tile


def scale_to_length(features: Tensor, length: float, dtype: torch.dtype) -> Tensor:
    """(B, N, C) → (B, N, padded width) in that type, padded with zeros."""
    grid, numbers, tile = _launch(features, length)
    out = features.new_empty(*features.shape[:2], tile["PADDED"], dtype=dtype)
    _scale[grid](features.contiguous(), out, *numbers, **tile)
    return out


def scale_to_length_backward(features: Tensor, gradient: Tensor, divisor: Tensor, length: float) -> Tensor:
    """Gradient (B, N, C) from that of the result, (B, N, padded width), divided by `divisor`, (B, N, 1) or a scalar."""
    features, divisor = features.contiguous(), divisor.contiguous()
    grid, numbers, tile = _launch(features, length)
    out = torch.empty_like(features)
    _scale_backward[grid](features, gradient, divisor, out, *numbers, EACH=divisor.dim() > 0, **tile)
    return out
