"""The U-Net's step to a grid twice as fine, in 3-D: a transposed convolution of kernel 4 and stride 2, plus a bias,
plus the coarse features themselves, interpolated.

An output voxel depends on two coarse voxels along each axis; its index's parity determines which. So an ordinary
convolution of kernel 2 computes all of them, with the eight kinds of output voxels as groups of channels. Between
coarse voxels j − 1 and j lie the fine voxels 2j − 1 and 2j.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from carlreg.fast.kernels.channels import sum_channels, tile


@triton.jit
def _indices(row, depth, height, width):
    """Item of the batch and indices along the axes of a voxel, from its row."""
    return row // (width * height * depth), row // (width * height) % depth, row // width % height, row % width


@triton.jit
def _weave(
    kinds,  # (B, depth + 1, height + 1, width + 1, 8, channels)
    coarse,  # (B, depth, height, width, coarse_channels), of which the first `channels` count
    bias,
    out,  # (B, 2 · depth, 2 · height, 2 · width, channels)
    rows,
    depth,
    height,
    width,
    coarse_channels: tl.constexpr,
    channels: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)[None, :]
    mask = (row < rows)[:, None] & (channel < channels)
    item, z, y, x = _indices(row, 2 * depth, 2 * height, 2 * width)
    cell = ((item * (depth + 1) + (z + 1) // 2) * (height + 1) + (y + 1) // 2) * (width + 1) + (x + 1) // 2
    kind = (z + 1) % 2 * 4 + (y + 1) % 2 * 2 + (x + 1) % 2
    value = tl.load(kinds + (cell * 8 + kind)[:, None].to(tl.int64) * channels + channel, mask=mask, other=0.0)
    value = value.to(tl.float32)
    value += tl.load(bias + channel, mask=channel < channels, other=0.0)
    for corner in tl.static_range(8):
        # A quarter of the way to the neighbour on the nearer side; the border continues the image.
        cz = tl.minimum(tl.maximum(z // 2 + corner // 4 * (z % 2 * 2 - 1), 0), depth - 1)
        cy = tl.minimum(tl.maximum(y // 2 + corner // 2 % 2 * (y % 2 * 2 - 1), 0), height - 1)
        cx = tl.minimum(tl.maximum(x // 2 + corner % 2 * (x % 2 * 2 - 1), 0), width - 1)
        at = ((item * depth + cz) * height + cy) * width + cx
        weight = (0.25 if corner // 4 else 0.75) * (0.25 if corner // 2 % 2 else 0.75) * (0.25 if corner % 2 else 0.75)
        near = tl.load(coarse + at[:, None].to(tl.int64) * coarse_channels + channel, mask=mask, other=0.0)
        value += weight * near.to(tl.float32)
    tl.store(out + row[:, None].to(tl.int64) * channels + channel, value, mask=mask)


@triton.jit
def _unweave(
    gradient,  # (B, 2 · depth, 2 · height, 2 · width, channels)
    out,  # (B, depth + 1, height + 1, width + 1, 8, channels)
    rows,
    depth,
    height,
    width,
    channels: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)[None, :]
    mask = (row < rows)[:, None] & (channel < channels)
    item, z, y, x = _indices(row // 8, depth + 1, height + 1, width + 1)
    z, y, x = 2 * z - 1 + row // 4 % 2, 2 * y - 1 + row // 2 % 2, 2 * x - 1 + row % 2
    inside = (z >= 0) & (z < 2 * depth) & (y >= 0) & (y < 2 * height) & (x >= 0) & (x < 2 * width)
    at = ((item * 2 * depth + z) * 2 * height + y) * 2 * width + x
    value = tl.load(gradient + at[:, None].to(tl.int64) * channels + channel, mask=mask & inside[:, None], other=0.0)
    tl.store(out + row[:, None].to(tl.int64) * channels + channel, value, mask=mask)


@triton.jit
def _share(fine, coarse, size):
    """The weight of a coarse voxel in one of the four fine voxels it reaches along an axis; zero outside the image."""
    near = tl.where((fine == 0) | (fine == 2 * size - 1), 1.0, tl.where(fine // 2 == coarse, 0.75, 0.25))
    return tl.where((fine >= 0) & (fine < 2 * size), near, 0.0)


@triton.jit
def _gather(
    gradient,  # (B, 2 · depth, 2 · height, 2 · width, channels)
    out,  # (B, depth, height, width, coarse_channels), of which the first `channels` are written
    rows,
    depth,
    height,
    width,
    coarse_channels: tl.constexpr,
    channels: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)[None, :]
    mask = (row < rows)[:, None] & (channel < channels)
    item, z, y, x = _indices(row, depth, height, width)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for tap in range(64):
        fz, fy, fx = 2 * z - 1 + tap // 16, 2 * y - 1 + tap // 4 % 4, 2 * x - 1 + tap % 4
        weight = _share(fz, z, depth) * _share(fy, y, height) * _share(fx, x, width)
        at = ((item * 2 * depth + fz) * 2 * height + fy) * 2 * width + fx
        used = mask & (weight > 0)[:, None]
        g = tl.load(gradient + at[:, None].to(tl.int64) * channels + channel, mask=used, other=0.0).to(tl.float32)
        total += weight[:, None] * g
    tl.store(out + row[:, None].to(tl.int64) * coarse_channels + channel, total, mask=mask)


def up_step(features: Tensor, shortcut: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """conv_transpose3d(features, weight, bias, stride=2, padding=1) plus the first channels of `shortcut`, enlarged.

    Features and shortcut are (B, C, *shape) on one grid, channels last.
    """
    outputs = weight.shape[1]
    taps = weight.unflatten(4, (2, 2)).unflatten(3, (2, 2)).unflatten(2, (2, 2)).flip(2, 4, 6)
    taps = taps.permute(3, 5, 7, 1, 0, 2, 4, 6).reshape(8 * outputs, -1, 2, 2, 2)
    kinds = F.conv3d(features, taps, padding=1)
    result: Tensor = _Weave.apply(kinds, shortcut, bias)  # type: ignore[no-untyped-call]
    return result


class _Weave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kinds: Tensor, coarse: Tensor, bias: Tensor) -> Tensor:
        kinds = kinds.movedim(1, -1).contiguous()
        batch, coarse_channels, *shape = coarse.shape
        out = kinds.new_empty(batch, *(2 * n for n in shape), len(bias))
        rows, sides = out.numel() // len(bias), tile(len(bias))
        grid = (triton.cdiv(rows, sides["ROWS"]),)
        _weave[grid](kinds, coarse, bias, out, rows, *shape, coarse_channels, len(bias), **sides)
        ctx.coarse, ctx.kinds = coarse.shape, kinds.shape
        return out.movedim(-1, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        gradient = gradients[0].movedim(1, -1).contiguous()
        batch, coarse_channels, *shape = ctx.coarse
        channels = gradient.shape[-1]
        sides = tile(channels)
        by_kinds = gradient.new_empty(ctx.kinds)
        rows = by_kinds.numel() // channels
        _unweave[(triton.cdiv(rows, sides["ROWS"]),)](gradient, by_kinds, rows, *shape, channels, **sides)
        by_coarse = gradient.new_zeros(batch, *shape, coarse_channels)
        rows = by_coarse.numel() // coarse_channels
        grid = (triton.cdiv(rows, sides["ROWS"]),)
        _gather[grid](gradient, by_coarse, rows, *shape, coarse_channels, channels, **sides)
        return by_kinds.movedim(-1, 1), by_coarse.movedim(-1, 1), sum_channels(gradient.movedim(-1, 1))
