"""Operations channel by channel between convolutions: bias, ReLU, batch normalisation, and their gradients.

Features (B, C, *shape) are channels last in memory: a matrix with one row per voxel. Sums over all voxels are in
float32, in parts, each by one program, and the parts are added in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

TILE = 4096
"""Numbers that a program processes at a time."""
PROGRAMS = 1024
"""Maximum number of parts of a sum: a few for each multiprocessor of a GPU."""


@triton.jit
def _tile(first, last, channels: constexpr, ROWS: constexpr, CHANNELS: constexpr):
    """Offsets of the numbers of a tile of rows (rows, channels), and a mask of those before row `last`."""
    row, channel = (first + tl.arange(0, ROWS))[:, None], tl.arange(0, CHANNELS)[None, :]
    return row.to(tl.int64) * channels + channel, (row < last) & (channel < channels)


@triton.jit
def _add_bias(
    features,  # (rows, channels), as `other` and `out`
    other,
    bias,
    out,
    rows,
    channels: constexpr,
    OTHER: constexpr,
    RELU: constexpr,
    ROWS: constexpr,
    CHANNELS: constexpr,
):
    channel = tl.arange(0, CHANNELS)[None, :]
    at, valid = _tile(tl.program_id(0) * ROWS, rows, channels, ROWS, CHANNELS)
    value = tl.load(features + at, mask=valid).to(tl.float32) + tl.load(bias + channel, mask=channel < channels)
    if OTHER:
        value += tl.load(other + at, mask=valid).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(out + at, value, mask=valid)


@triton.jit
def _sum_gradient(
    gradient,  # (rows, channels), as `out` and `masked`
    out,
    masked,
    sums,  # (programs, channels)
    rows,
    rows_per_program,
    channels: constexpr,
    RELU: constexpr,
    ROWS: constexpr,
    CHANNELS: constexpr,
):
    """Σ gradient, and with RELU the gradient before the ReLU, which is zero where the ReLU's result is."""
    program, lane = tl.program_id(0), tl.arange(0, CHANNELS)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, rows)
    for start in range(first, last, ROWS):
        at, valid = _tile(start, last, channels, ROWS, CHANNELS)
        g = tl.load(gradient + at, mask=valid, other=0.0).to(tl.float32)
        if RELU:
            g = tl.where(tl.load(out + at, mask=valid, other=0.0) > 0, g, 0.0)
            tl.store(masked + at, g, mask=valid)
        total += g
    tl.store(sums + program * channels + lane, tl.sum(total, 0), mask=lane < channels)


@triton.jit
def _statistics(features, parts, rows, rows_per_program, channels: constexpr, ROWS: constexpr, CHANNELS: constexpr):
    """features (rows, channels) → parts (2, programs, channels): mean, and sum of squared distances from it."""
    program, lane = tl.program_id(0), tl.arange(0, CHANNELS)
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, rows)
    # Relative to a nearby value, squares lose no digits to the mean.
    nearby = tl.load(features + first.to(tl.int64) * channels + lane, mask=lane < channels, other=0.0)[None, :]
    nearby = nearby.to(tl.float32)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    squares = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(first, last, ROWS):
        at, valid = _tile(start, last, channels, ROWS, CHANNELS)
        value = tl.load(features + at, mask=valid, other=0.0).to(tl.float32)
        value = tl.where(valid, value - nearby, 0.0)
        total += value
        squares += value * value
    count = (last - first).to(tl.float32)
    mean = tl.sum(total, 0) / count
    out = parts + program * channels + lane
    tl.store(out, tl.sum(nearby, 0) + mean, mask=lane < channels)
    spread = tl.sum(squares, 0) - count * mean * mean
    tl.store(out + tl.num_programs(0) * channels, spread, mask=lane < channels)


@triton.jit
def _merge_statistics(
    parts,  # (2, programs, channels)
    result,  # (2, channels): mean and 1 / deviation
    running_mean,
    running_variance,
    programs,
    rows,
    rows_per_program,
    channels: constexpr,
    momentum,
    epsilon,
    PARTS: constexpr,
    CHANNELS: constexpr,
):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    part = tl.arange(0, PARTS)
    inside = channel < channels
    total = tl.zeros((CHANNELS,), tl.float32)
    count = rows * 1.0
    for start in range(0, programs, PARTS):
        index = (start + part)[:, None]
        weight = tl.minimum(rows - index * rows_per_program, rows_per_program).to(tl.float32) / count
        valid = (index < programs) & inside[None, :]
        mean = tl.load(parts + index * channels + channel[None, :], mask=valid, other=0.0)
        total += tl.sum(mean * weight, 0)
    spread = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, programs, PARTS):
        index = (start + part)[:, None]
        size = tl.minimum(rows - index * rows_per_program, rows_per_program).to(tl.float32)
        valid = (index < programs) & inside[None, :]
        at = parts + index * channels + channel[None, :]
        away = tl.load(at, mask=valid, other=0.0) - total[None, :]
        within = tl.load(at + programs * channels, mask=valid, other=0.0)
        spread += tl.sum(tl.where(valid, within + size * away * away, 0.0), 0)
    tl.store(result + channel, total, mask=inside)
    tl.store(result + channels + channel, 1 / tl.sqrt(spread / count + epsilon), mask=inside)
    old_mean = tl.load(running_mean + channel, mask=inside)
    old_variance = tl.load(running_variance + channel, mask=inside)
    tl.store(running_mean + channel, old_mean + momentum * (total - old_mean), mask=inside)
    variance = spread / (count - 1)
    tl.store(running_variance + channel, old_variance + momentum * (variance - old_variance), mask=inside)


@triton.jit
def _normalize(
    features, statistics, weight, bias, out, rows, channels: constexpr, ROWS: constexpr, CHANNELS: constexpr
):
    """features (rows, channels) and statistics (2, channels): mean and 1 / deviation → out (rows, channels)."""
    channel = tl.arange(0, CHANNELS)[None, :]
    inside = channel < channels
    at, valid = _tile(tl.program_id(0) * ROWS, rows, channels, ROWS, CHANNELS)
    mean = tl.load(statistics + channel, mask=inside)
    scale = tl.load(statistics + channels + channel, mask=inside) * tl.load(weight + channel, mask=inside)
    value = tl.load(features + at, mask=valid).to(tl.float32) - mean
    tl.store(out + at, value * scale + tl.load(bias + channel, mask=inside), mask=valid)


@triton.jit
def _sum_normalized_gradient(
    gradient,  # (rows, channels), as `features`
    features,
    statistics,  # (2, channels)
    sums,  # (2, programs, channels): Σ g, and Σ g·(x − mean) / deviation
    rows,
    rows_per_program,
    channels: constexpr,
    ROWS: constexpr,
    CHANNELS: constexpr,
):
    program, lane = tl.program_id(0), tl.arange(0, CHANNELS)
    mean = tl.load(statistics + lane, mask=lane < channels, other=0.0)[None, :]
    inverse = tl.load(statistics + channels + lane, mask=lane < channels, other=0.0)[None, :]
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    product = tl.zeros((ROWS, CHANNELS), tl.float32)
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, rows)
    for start in range(first, last, ROWS):
        at, valid = _tile(start, last, channels, ROWS, CHANNELS)
        g = tl.load(gradient + at, mask=valid, other=0.0).to(tl.float32)
        total += g
        product += g * ((tl.load(features + at, mask=valid, other=0.0).to(tl.float32) - mean) * inverse)
    out = sums + program * channels + lane
    tl.store(out, tl.sum(total, 0), mask=lane < channels)
    tl.store(out + tl.num_programs(0) * channels, tl.sum(product, 0), mask=lane < channels)


@triton.jit
def _normalize_backward(
    gradient,  # (rows, channels), as `features` and `out`
    features,
    statistics,  # (2, channels), as `sums`
    weight,
    sums,
    out,
    rows,
    channels: constexpr,
    ROWS: constexpr,
    CHANNELS: constexpr,
):
    """weight / deviation · (g − mean of g − z · mean of g·z), with z = (x − mean) / deviation."""
    channel = tl.arange(0, CHANNELS)[None, :]
    inside = channel < channels
    at, valid = _tile(tl.program_id(0) * ROWS, rows, channels, ROWS, CHANNELS)
    inverse = tl.load(statistics + channels + channel, mask=inside)
    z = (tl.load(features + at, mask=valid).to(tl.float32) - tl.load(statistics + channel, mask=inside)) * inverse
    mean = tl.load(sums + channel, mask=inside) / rows
    product = tl.load(sums + channels + channel, mask=inside) / rows
    g = tl.load(gradient + at, mask=valid).to(tl.float32)
    result = inverse * tl.load(weight + channel, mask=inside) * (g - mean - z * product)
    tl.store(out + at, result, mask=valid)


def tile(channels: int) -> dict[str, int]:
    """The sides of a tile of features with this number of channels."""
    width = triton.next_power_of_2(channels)
    return {"ROWS": max(1, TILE // width), "CHANNELS": width}


def _launch(features: Tensor) -> tuple[tuple[int], tuple[int, int], dict[str, int]]:
    """One program per tile: the grid, the numbers of voxels and of channels, and the sides of a tile."""
    channels = features.shape[1]
    rows, sides = features.numel() // channels, tile(channels)
    return (triton.cdiv(rows, sides["ROWS"]),), (rows, channels), sides


def _launch_sum(features: Tensor) -> tuple[tuple[int], tuple[int, int, int], dict[str, int]]:
    """At most PROGRAMS programs that share a sum: as `_launch`, with the rows per program, in whole tiles."""
    (tiles,), (rows, channels), sides = _launch(features)
    per_program = triton.cdiv(tiles, PROGRAMS) * sides["ROWS"]
    return (triton.cdiv(rows, per_program),), (rows, per_program, channels), sides


def _channels_last(gradient: Tensor) -> Tensor:
    return gradient.movedim(1, -1).contiguous().movedim(-1, 1)


def add_bias(features: Tensor, bias: Tensor, *, other: Tensor | None = None, relu: bool = False) -> Tensor:
    """features + bias, or relu(features + bias), or features + bias + other. All channels last."""
    result: Tensor = _AddBias.apply(features, bias, other, relu)  # type: ignore[no-untyped-call]
    return result


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, bias: Tensor, other: Tensor | None, relu: bool) -> Tensor:
        grid, sizes, sides = _launch(features)
        out = torch.empty_like(features)
        ctx.other = other is not None
        tensors = (features, features if other is None else other, bias, out)
        _add_bias[grid](*tensors, *sizes, OTHER=ctx.other, RELU=relu, **sides)
        if relu:
            ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        masked, by_bias = _gradients(_channels_last(gradients[0]), *ctx.saved_tensors)
        return masked, by_bias, masked if ctx.other else None, None


def _gradients(gradient: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The gradient before a ReLU with the result `out`, if there was one, and that of the bias."""
    grid, sizes, sides = _launch_sum(gradient)
    sums = gradient.new_empty(*grid, gradient.shape[1], dtype=torch.float32)
    masked, result = (gradient, gradient) if out is None else (torch.empty_like(gradient), out)
    _sum_gradient[grid](gradient, result, masked, sums, *sizes, RELU=out is not None, **sides)
    return masked, sums.sum(dim=0)


def sum_channels(features: Tensor) -> Tensor:
    """Sum of each channel of channels-last features (B, C, *shape), in float32: (C,)."""
    return _gradients(features)[1]


def batch_norm(features: Tensor, norm: Any) -> Tensor:
    """Apply a batch normalisation layer in training mode to channels-last features; updates its running statistics."""
    result: Tensor = _BatchNorm.apply(features, norm.weight, norm.bias, norm)  # type: ignore[no-untyped-call]
    return result


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor, norm: Any) -> Tensor:
        (programs,), (rows, per_program, channels), sides = _launch_sum(features)
        parts = features.new_empty(2, programs, channels, dtype=torch.float32)
        _statistics[(programs,)](features, parts, rows, per_program, channels, **sides)
        statistics = torch.empty_like(parts[:, 0])
        norm.num_batches_tracked += 1
        running = (norm.running_mean, norm.running_var)
        numbers = (programs, rows, per_program, channels, norm.momentum, norm.eps)
        _merge_statistics[(triton.cdiv(channels, 16),)](parts, statistics, *running, *numbers, PARTS=128, CHANNELS=16)
        grid, sizes, _ = _launch(features)
        out = torch.empty_like(features)
        _normalize[grid](features, statistics, weight, bias, out, *sizes, **sides)
        ctx.save_for_backward(features, weight, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, statistics = ctx.saved_tensors
        gradient = _channels_last(gradients[0])
        grid, sizes, sides = _launch_sum(features)
        parts = features.new_empty(2, *grid, features.shape[1], dtype=torch.float32)
        _sum_normalized_gradient[grid](gradient, features, statistics, parts, *sizes, **sides)
        sums, out = parts.sum(dim=1), torch.empty_like(features)
        grid, (rows, channels), _ = _launch(features)
        _normalize_backward[grid](gradient, features, statistics, weight, sums, out, rows, channels, **sides)
        return out, sums[1], sums[0], None
