"""Linear interpolation of an image or a field at points, and its gradients.

Each program takes a small block of neighbouring points. On a coarser grid these lie in few cells, so their gradients
are summed within the block before they are added to memory, where thousands of points would wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = {1: (1, 1, 128), 2: (1, 8, 16), 3: (4, 4, 8)}
"""The sides of a block of points, by dimension of their grid."""
WINDOW = tl.constexpr(4)
"""The side of the window of voxels in which a block's gradients are summed."""
SIZES = ["depth", "height", "width", "points_depth", "points_height", "points_width"]


@triton.jit
def _point_index(depth, height, width, BZ: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr):
    """Indices of the points of this program's block, and a mask of those that exist."""
    across, down = tl.cdiv(width, BX), tl.cdiv(height, BY)
    block, lane = tl.program_id(0), tl.arange(0, BZ * BY * BX)
    z = block // (across * down) * BZ + lane // (BY * BX)
    y = block // across % down * BY + lane // BX % BY
    x = block % across * BX + lane % BX
    return (z * height + y) * width + x, (z < depth) & (y < height) & (x < width)


@triton.jit
def _coordinate(points, axis: tl.constexpr, DIM: tl.constexpr, mask):
    """The coordinate along one of three axes, the first of which do not exist in fewer dimensions."""
    if axis < 3 - DIM:
        value = tl.zeros(mask.shape, tl.float32)
    else:
        value = tl.load(points + (axis - 3 + DIM), mask=mask, other=0.0)
    return value


@triton.jit
def _clip(p):
    return tl.minimum(tl.maximum(p, 0.0), 1.0)


@triton.jit
def _reflect(p):
    """Reflect at the ends of the unit interval, then clip."""
    return _clip(2 * _clip(p) - p)


@triton.jit
def _outside(p):
    return (p < 0) | (p > 1)


@triton.jit
def _clip_slope(p):
    return tl.where((p > 0) & (p < 1), 1.0, 0.0)


@triton.jit
def _reflect_slope(p):
    reflected = 2 * _clip(p) - p
    return tl.where((reflected > 0) & (reflected < 1), tl.where((p > 0) & (p < 1), 1.0, -1.0), 0.0)


@triton.jit
def _cell(p, size):
    """The cell of a coordinate within [0, 1]: its first voxel, the fraction beyond it, and 1 if a voxel follows."""
    position = p * (size - 1)
    low = tl.minimum(position.to(tl.int32), tl.maximum(size - 2, 0))
    return low, position - low, tl.where(size > 1, 1, 0)


@triton.jit
def _interpolate(values, z, y, x, depth, height, width, stride, mask):
    """The value at a point of the unit cube, and its slopes along the axes."""
    z, fz, dz = _cell(z, depth)
    y, fy, dy = _cell(y, height)
    x, fx, dx = _cell(x, width)
    at = values + ((z * height + y) * width + x) * stride
    dz, dy, dx = dz * height * width * stride, dy * width * stride, dx * stride
    v000 = tl.load(at, mask=mask, other=0.0)
    v001 = tl.load(at + dx, mask=mask, other=0.0)
    v010 = tl.load(at + dy, mask=mask, other=0.0)
    v011 = tl.load(at + dy + dx, mask=mask, other=0.0)
    v100 = tl.load(at + dz, mask=mask, other=0.0)
    v101 = tl.load(at + dz + dx, mask=mask, other=0.0)
    v110 = tl.load(at + dz + dy, mask=mask, other=0.0)
    v111 = tl.load(at + dz + dy + dx, mask=mask, other=0.0)
    v00, v01 = v000 + fx * (v001 - v000), v010 + fx * (v011 - v010)
    v10, v11 = v100 + fx * (v101 - v100), v110 + fx * (v111 - v110)
    v0, v1 = v00 + fy * (v01 - v00), v10 + fy * (v11 - v10)
    slope_y = (1 - fz) * (v01 - v00) + fz * (v11 - v10)
    slope_x = (1 - fz) * ((1 - fy) * (v001 - v000) + fy * (v011 - v010)) + fz * (
        (1 - fy) * (v101 - v100) + fy * (v111 - v110)
    )
    return v0 + fz * (v1 - v0), (v1 - v0) * (depth - 1), slope_y * (height - 1), slope_x * (width - 1)


@triton.jit
def _scatter(
    out,  # one item of (channels, voxels)
    gradient,  # one item of (channels, points)
    index,
    factor,
    z,
    y,
    x,
    depth,
    height,
    width,
    stride,
    channel_stride,
    gradient_stride,
    gradient_channel_stride,
    mask,
    CHANNELS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Add factor · gradient to the corners of each point's cell; if points are close TOGETHER, in a common window."""
    z, fz, dz = _cell(z, depth)
    y, fy, dy = _cell(y, height)
    x, fx, dx = _cell(x, width)
    apart = mask
    if TOGETHER:
        z0 = tl.min(tl.where(mask, z, depth), 0)
        y0 = tl.min(tl.where(mask, y, height), 0)
        x0 = tl.min(tl.where(mask, x, width), 0)
        near = (z - z0 < WINDOW - 1) & (y - y0 < WINDOW - 1) & (x - x0 < WINDOW - 1) & mask
        apart = mask & ~near
        voxel = tl.arange(0, WINDOW * WINDOW * WINDOW)
        wz, wy, wx = voxel // (WINDOW * WINDOW), voxel // WINDOW % WINDOW, voxel % WINDOW
        weight = tl.maximum(1 - tl.abs((z - z0 + fz)[None, :] - wz[:, None]), 0.0)
        weight *= tl.maximum(1 - tl.abs((y - y0 + fy)[None, :] - wy[:, None]), 0.0)
        weight *= tl.maximum(1 - tl.abs((x - x0 + fx)[None, :] - wx[:, None]), 0.0)
        weight = tl.where(near[None, :], weight * factor[None, :], 0.0)
        window = out + (((z0 + wz) * height + y0 + wy) * width + x0 + wx) * stride
        inside = (z0 + wz < depth) & (y0 + wy < height) & (x0 + wx < width)
        channel = tl.arange(0, 16)[None, :]  # the minimum for a matrix product
        at = gradient + channel * gradient_channel_stride + index[:, None] * gradient_stride
        g = tl.load(at, mask=near[:, None] & (channel < CHANNELS), other=0.0)
        total = tl.dot(weight, g, input_precision="tf32x3")
        used = inside[:, None] & (channel < CHANNELS) & (total != 0)
        tl.atomic_add(window[:, None] + channel * channel_stride, total, mask=used, sem="relaxed")
    for channel in tl.static_range(CHANNELS):
        g = factor * tl.load(
            gradient + channel * gradient_channel_stride + index * gradient_stride, mask=apart, other=0.0
        )
        at = out + channel * channel_stride + ((z * height + y) * width + x) * stride
        for corner in tl.static_range(8):
            weight_z = fz if corner // 4 else 1 - fz
            weight_y = fy if corner // 2 % 2 else 1 - fy
            weight_x = fx if corner % 2 else 1 - fx
            offset = (corner // 4 * dz * height + corner // 2 % 2 * dy) * width + corner % 2 * dx
            tl.atomic_add(at + offset * stride, weight_z * weight_y * weight_x * g, mask=apart, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def _sample(
    values,  # (B, channels, voxels), by strides
    points,  # (B, points, DIM)
    out,  # (B, channels, points), by strides
    depth,
    height,
    width,
    item_stride,
    channel_stride,
    stride,
    points_depth,
    points_height,
    points_width,
    points_item_stride,
    out_item_stride,
    out_channel_stride,
    out_stride,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    MIRROR: tl.constexpr,
    ADD: tl.constexpr,
    BZ: tl.constexpr,
    BY: tl.constexpr,
    BX: tl.constexpr,
):
    item = tl.program_id(1).to(tl.int64)
    index, mask = _point_index(points_depth, points_height, points_width, BZ, BY, BX)
    point = points + item * points_item_stride + index * DIM
    z, y, x = _coordinate(point, 0, DIM, mask), _coordinate(point, 1, DIM, mask), _coordinate(point, 2, DIM, mask)
    outside = mask & (_outside(z) | _outside(y) | _outside(x))
    for channel in tl.static_range(CHANNELS):
        base = values + item * item_stride + channel * channel_stride
        value, _, _, _ = _interpolate(base, _clip(z), _clip(y), _clip(x), depth, height, width, stride, mask)
        if MIRROR:
            other, _, _, _ = _interpolate(
                base, _reflect(z), _reflect(y), _reflect(x), depth, height, width, stride, outside
            )
            value = tl.where(outside, 2 * value - other, value)
        if ADD:
            value += tl.load(point + channel, mask=mask)
        tl.store(out + item * out_item_stride + channel * out_channel_stride + index * out_stride, value, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _sample_backward(
    values,  # (B, channels, voxels), by strides
    points,  # (B, points, DIM)
    gradient,  # (B, channels, points), by strides
    by_values,  # as values
    by_points,  # (B, points, DIM)
    depth,
    height,
    width,
    item_stride,
    channel_stride,
    stride,
    points_depth,
    points_height,
    points_width,
    points_item_stride,
    gradient_item_stride,
    gradient_channel_stride,
    gradient_stride,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    MIRROR: tl.constexpr,
    ADD: tl.constexpr,
    VALUES: tl.constexpr,
    POINTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BZ: tl.constexpr,
    BY: tl.constexpr,
    BX: tl.constexpr,
):
    item = tl.program_id(1).to(tl.int64)
    index, mask = _point_index(points_depth, points_height, points_width, BZ, BY, BX)
    point = points + item * points_item_stride + index * DIM
    z, y, x = _coordinate(point, 0, DIM, mask), _coordinate(point, 1, DIM, mask), _coordinate(point, 2, DIM, mask)
    outside = mask & (_outside(z) | _outside(y) | _outside(x))
    gradient += item * gradient_item_stride
    if POINTS:
        by_z, by_y, by_x = tl.zeros_like(z), tl.zeros_like(y), tl.zeros_like(x)
        for channel in tl.static_range(CHANNELS):
            base = values + item * item_stride + channel * channel_stride
            g = tl.load(gradient + channel * gradient_channel_stride + index * gradient_stride, mask=mask, other=0.0)
            _, slope_z, slope_y, slope_x = _interpolate(
                base, _clip(z), _clip(y), _clip(x), depth, height, width, stride, mask
            )
            slope_z, slope_y, slope_x = slope_z * _clip_slope(z), slope_y * _clip_slope(y), slope_x * _clip_slope(x)
            if MIRROR:
                _, other_z, other_y, other_x = _interpolate(
                    base, _reflect(z), _reflect(y), _reflect(x), depth, height, width, stride, outside
                )
                slope_z = tl.where(outside, 2 * slope_z - other_z * _reflect_slope(z), slope_z)
                slope_y = tl.where(outside, 2 * slope_y - other_y * _reflect_slope(y), slope_y)
                slope_x = tl.where(outside, 2 * slope_x - other_x * _reflect_slope(x), slope_x)
            if ADD:  # channel c is the c-th coordinate
                by_z += g if channel == DIM - 3 else 0.0
                by_y += g if channel == DIM - 2 else 0.0
                by_x += g if channel == DIM - 1 else 0.0
            by_z += g * slope_z
            by_y += g * slope_y
            by_x += g * slope_x
        target = by_points + (item * points_depth * points_height * points_width + index) * DIM
        if DIM == 3:
            tl.store(target, by_z, mask=mask)
        if DIM >= 2:
            tl.store(target + DIM - 2, by_y, mask=mask)
        tl.store(target + DIM - 1, by_x, mask=mask)
    if VALUES:
        base = by_values + item * item_stride
        twice = tl.where(outside, 2.0, 1.0) if MIRROR else tl.full(z.shape, 1.0, tl.float32)
        _scatter(
            base, gradient, index, twice, _clip(z), _clip(y), _clip(x), depth, height, width, stride, channel_stride,
            gradient_stride, gradient_channel_stride, mask, CHANNELS, TOGETHER,
        )  # fmt: skip
        if MIRROR:
            minus = tl.full(z.shape, -1.0, tl.float32)
            _scatter(
                base, gradient, index, minus, _reflect(z), _reflect(y), _reflect(x), depth, height, width, stride,
                channel_stride, gradient_stride, gradient_channel_stride, outside, CHANNELS, False,
            )  # fmt: skip


def sample(values: Tensor, points: Tensor, *, mirror: bool = False, add: bool = False) -> Tensor:
    """values (B, C, *shape) at points (B, ..., D) of the unit cube, continued by their border: (B, C, ...).

    `mirror` continues them as 2·u(clip x) − u(reflect x) instead. `add`, for a field with C = D, returns the points
    plus its values: (B, ..., D). A batch of one is repeated to fit the other. All tensors are float32.
    """
    result: Tensor = _Sample.apply(values, points, mirror, add)  # type: ignore[no-untyped-call]
    return result


def _dense(values: Tensor) -> Tensor:
    """Make the voxels of a channel equidistant in memory."""
    return values if values.movedim(1, -1).is_contiguous() else values.contiguous()


def _three(sides: Sequence[int]) -> tuple[int, ...]:
    return (1,) * (3 - len(sides)) + tuple(sides)


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, points: Tensor, mirror: bool, add: bool) -> Tensor:
        values, points = _dense(values), points.contiguous()
        ctx.save_for_backward(values, points)
        ctx.options = {"MIRROR": mirror, "ADD": add}
        grid, geometry, options = _launch(values, points, add)
        out = points.new_empty(grid[1], *(points.shape[1:] if add else (values.shape[1], *points.shape[1:-1])))
        _sample[grid](values, points, out, *geometry, **options, **ctx.options)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, points = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        need_values, need_points, _, _ = ctx.needs_input_grad
        by_values = torch.zeros_like(values) if need_values else values
        grid, geometry, options = _launch(values, points, ctx.options["ADD"])
        by_points = points.new_empty(grid[1], *points.shape[1:]) if need_points else points
        # On a grid twice as fine or finer, a block's points share their cells.
        fine = math.prod(points.shape[1:-1]) >= 2 ** len(values.shape[2:]) * math.prod(values.shape[2:])
        together = fine and points.dim() == values.dim()
        options = {**options, **ctx.options, "VALUES": need_values, "POINTS": need_points, "TOGETHER": together}
        _sample_backward[grid](values, points, gradient, by_values, by_points, *geometry, **options)
        if need_points and len(points) < grid[1]:
            by_points = by_points.sum(dim=0, keepdim=True)
        return by_values if need_values else None, by_points if need_points else None, None, None


def _launch(values: Tensor, points: Tensor, points_first: bool) -> tuple[tuple[int, int], list[int], dict[str, int]]:
    """The grid of programs, the sizes and strides, and the constants of both kernels. Samples are in memory as
    (B, points, C) if `points_first`, else as (B, C, points)."""
    (channels, *shape), (*leading, dim) = values.shape[1:], points.shape[1:]
    if len(leading) > 3:
        leading = [math.prod(leading)]
    sides, blocks = _three(leading), BLOCKS[max(1, len(leading))]
    count, voxels = math.prod(leading), math.prod(shape)
    channels_last = values.movedim(1, -1).is_contiguous()
    geometry = [*_three(shape), 0 if len(values) == 1 else channels * voxels]
    geometry += [1, channels] if channels_last else [voxels, 1]
    geometry += [*sides, 0 if len(points) == 1 else count * dim, channels * count]
    geometry += [1, channels] if points_first else [count, 1]
    programs = math.prod(triton.cdiv(side, block) for side, block in zip(sides, blocks, strict=True))
    options = {"DIM": dim, "CHANNELS": channels, "BZ": blocks[0], "BY": blocks[1], "BX": blocks[2]}
    return (programs, max(len(values), len(points))), geometry, options
