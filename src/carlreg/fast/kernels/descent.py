"""The loss of two fields in 3-D and its gradients, for their optimisation: a few kernels instead of hundreds.

Positions are (3, *control), in unit coordinates of the image that they point to. Along an axis with a stride of 2 they
belong to every second voxel of their own image. No sum depends on the order in which programs run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from carlreg.fast.kernels.sampling import _clip, _clip_slope, _interpolate

LANES = 128
"""Voxels that a program processes."""
FIXED_POINT = 2.0**40
"""The largest gradient as an integer: millions of them can be added without an overflow."""


def _sizes(*names: str) -> list[str]:
    return [f"{name}_{axis}" for name in names for axis in "zyx"]


@triton.jit
def _voxel(size_z, size_y, size_x, LANES: tl.constexpr):
    """This program's voxels of a grid: their offset, whether they exist, and their indices."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    return at, at < size_z * size_y * size_x, at // (size_y * size_x), at // size_x % size_y, at % size_x


@triton.jit
def _between(values, z, y, x, fz, fy, fx, size_z, size_y, size_x, mask):
    """Values at a voxel, or between it and the next: a fraction of 0 or more along each axis."""
    row = size_x
    plane = size_y * size_x
    at = values + z * plane + y * row + x
    dz = tl.where(z + 1 < size_z, plane, 0)
    dy = tl.where(y + 1 < size_y, row, 0)
    dx = tl.where(x + 1 < size_x, 1, 0)
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
    return v0 + fz * (v1 - v0)


@triton.jit
def _sampled(
    source, positions, fine_z, fine_y, fine_x, source_z, source_y, source_x, control_z, control_y, control_x, mask,
    KZ: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr,
):  # fmt: skip
    """The source at fine voxels of the target, and its slopes by the position."""
    z, y, x = fine_z // KZ, fine_y // KY, fine_x // KX
    fz, fy, fx = (fine_z % KZ) * (1.0 / KZ), (fine_y % KY) * (1.0 / KY), (fine_x % KX) * (1.0 / KX)
    count = control_z * control_y * control_x
    pz = _between(positions, z, y, x, fz, fy, fx, control_z, control_y, control_x, mask)
    py = _between(positions + count, z, y, x, fz, fy, fx, control_z, control_y, control_x, mask)
    px = _between(positions + 2 * count, z, y, x, fz, fy, fx, control_z, control_y, control_x, mask)
    value, slope_z, slope_y, slope_x = _interpolate(
        source, _clip(pz), _clip(py), _clip(px), source_z, source_y, source_x, 1, mask
    )
    return value, slope_z * _clip_slope(pz), slope_y * _clip_slope(py), slope_x * _clip_slope(px)


@triton.jit
def _seen(active, z, y, x, pooled_y, pooled_x, mask, QZ: tl.constexpr, QY: tl.constexpr, QX: tl.constexpr):
    """Which of the pooled voxels lie in active blocks."""
    block = (z // QZ * (pooled_y // QY) + y // QY) * (pooled_x // QX) + x // QX
    return mask & (tl.load(active + block, mask=mask, other=0) != 0)


@triton.jit(do_not_specialize=_sizes("source", "control", "pooled"))
def _moments(
    source, target, positions, active, out,
    source_z, source_y, source_x, control_z, control_y, control_x, pooled_z, pooled_y, pooled_x,
    KZ: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr,
    QZ: tl.constexpr, QY: tl.constexpr, QX: tl.constexpr, BOARD: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """out (3, *pooled): the sums of a, a² and a·b over all voxels of a pooled one, or every second, as on a board."""
    at, mask, z, y, x = _voxel(pooled_z, pooled_y, pooled_x, LANES)
    seen = _seen(active, z, y, x, pooled_y, pooled_x, mask, QZ, QY, QX)
    first = tl.zeros([LANES], tl.float32)
    square = tl.zeros([LANES], tl.float32)
    product = tl.zeros([LANES], tl.float32)
    voxels: tl.constexpr = KZ * KY * KX
    for number in range((voxels + 1) // 2 if BOARD else voxels):
        part = number
        if BOARD:  # the last axis with a stride of 2 makes the sum of the offsets even
            if KX == 2:
                part = 2 * number + (number // KY + number % KY) % 2
            elif KY == 2:
                part = 2 * number + number % 2
        fine_z, fine_y, fine_x = z * KZ + part // (KY * KX), y * KY + part // KX % KY, x * KX + part % KX
        a, _, _, _ = _sampled(
            source, positions, fine_z, fine_y, fine_x, source_z, source_y, source_x, control_z, control_y, control_x,
            seen, KZ, KY, KX,
        )  # fmt: skip
        b = tl.load(target + (fine_z * (pooled_y * KY) + fine_y) * (pooled_x * KX) + fine_x, mask=seen, other=0.0)
        a = tl.where(seen, a, 0.0)
        first += a
        square += a * a
        product += a * b
    count = pooled_z * pooled_y * pooled_x
    tl.store(out + at, first, mask=mask)
    tl.store(out + count + at, square, mask=mask)
    tl.store(out + 2 * count + at, product, mask=mask)


@triton.jit(do_not_specialize=_sizes("source", "control", "pooled"))
def _moments_backward(
    source, target, positions, active, by_moments, out,
    source_z, source_y, source_x, control_z, control_y, control_x, pooled_z, pooled_y, pooled_x,
    KZ: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr,
    QZ: tl.constexpr, QY: tl.constexpr, QX: tl.constexpr, BOARD: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """out (3, *control): the gradient by the positions, from all voxels that are interpolated from each."""
    at, mask, z, y, x = _voxel(control_z, control_y, control_x, LANES)
    count = pooled_z * pooled_y * pooled_x
    by_z = tl.zeros([LANES], tl.float32)
    by_y = tl.zeros([LANES], tl.float32)
    by_x = tl.zeros([LANES], tl.float32)
    # On a board, the neighbours that lie aside along none or along two of the axes with a stride of 2.
    axes: tl.constexpr = (KZ + KY + KX - 3) % 2
    voxels: tl.constexpr = (2 * KZ - 1) * (2 * KY - 1) * (2 * KX - 1)
    for number in range((voxels + 1) // 2 - axes if BOARD else voxels):
        part = 2 * number + axes if BOARD else number
        near_z = part // ((2 * KY - 1) * (2 * KX - 1)) - (KZ - 1)
        near_y = part // (2 * KX - 1) % (2 * KY - 1) - (KY - 1)
        near_x = part % (2 * KX - 1) - (KX - 1)
        fine_z, fine_y, fine_x = z * KZ + near_z, y * KY + near_y, x * KX + near_x
        inside = mask & (fine_z >= 0) & (fine_y >= 0) & (fine_x >= 0)
        inside &= (fine_z < pooled_z * KZ) & (fine_y < pooled_y * KY) & (fine_x < pooled_x * KX)
        low_z, low_y, low_x = tl.maximum(fine_z, 0) // KZ, tl.maximum(fine_y, 0) // KY, tl.maximum(fine_x, 0) // KX
        seen = _seen(active, low_z, low_y, low_x, pooled_y, pooled_x, inside, QZ, QY, QX)
        weight = tl.where(near_z == 0, 1.0, 0.5) * tl.where(near_y == 0, 1.0, 0.5) * tl.where(near_x == 0, 1.0, 0.5)
        a, slope_z, slope_y, slope_x = _sampled(
            source, positions, tl.maximum(fine_z, 0), tl.maximum(fine_y, 0), tl.maximum(fine_x, 0),
            source_z, source_y, source_x, control_z, control_y, control_x, seen, KZ, KY, KX,
        )  # fmt: skip
        b = tl.load(target + (fine_z * (pooled_y * KY) + fine_y) * (pooled_x * KX) + fine_x, mask=seen, other=0.0)
        by = by_moments + (low_z * pooled_y + low_y) * pooled_x + low_x
        g = tl.load(by, mask=seen, other=0.0) + 2 * a * tl.load(by + count, mask=seen, other=0.0)
        g += b * tl.load(by + 2 * count, mask=seen, other=0.0)
        g = tl.where(seen, g * weight, 0.0)
        by_z += g * slope_z
        by_y += g * slope_y
        by_x += g * slope_x
    every = control_z * control_y * control_x
    tl.store(out + at, by_z, mask=mask)
    tl.store(out + every + at, by_y, mask=mask)
    tl.store(out + 2 * every + at, by_x, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _correlate(
    moments, share, mean, scale, weights, out, sums, count, epsilon, SQUARED: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """out (3, count): the gradient of Σ weights · (1 − correlation) by the blurred moments; sums: its parts."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = at < count
    part = tl.load(share + at, mask=mask, other=0.0)
    m = tl.load(moments + at, mask=mask, other=0.0) * part
    square = tl.load(moments + count + at, mask=mask, other=0.0) * part
    product = tl.load(moments + 2 * count + at, mask=mask, other=0.0) * part
    target = tl.load(mean + at, mask=mask, other=0.0)
    spread = square - m * m
    variance = tl.maximum(spread, 0.0) + epsilon
    factor = tl.load(scale + at, mask=mask, other=0.0) / tl.sqrt(variance)
    c = (product - m * target) * factor
    weight = tl.load(weights + at, mask=mask, other=0.0)
    if SQUARED:
        loss = (1 - c * c) * weight
        g = -2 * c * weight * part
    else:
        loss = (1 - c) * weight
        g = -weight * part
    slope = tl.where(spread >= 0, c / variance, 0.0)
    tl.store(out + at, g * (m * slope - target * factor), mask=mask)
    tl.store(out + count + at, -0.5 * g * slope, mask=mask)
    tl.store(out + 2 * count + at, g * factor, mask=mask)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(mask, loss, 0.0), axis=0))


@triton.jit
def _slope(positions, at, ahead, count, step, mask):
    """The vector from a voxel to the one ahead of it, over the step between them."""
    z = tl.load(positions + at + ahead, mask=mask, other=0.0) - tl.load(positions + at, mask=mask, other=0.0)
    there, here = positions + count + at + ahead, positions + count + at
    y = tl.load(there, mask=mask, other=0.0) - tl.load(here, mask=mask, other=0.0)
    x = tl.load(there + count, mask=mask, other=0.0) - tl.load(here + count, mask=mask, other=0.0)
    return z / step, y / step, x / step


@triton.jit
def _cross(az, ay, ax, bz, by, bx):
    """The derivative of det(c, a, b) by c."""
    return ay * bx - ax * by, ax * bz - az * bx, az * by - ay * bz


@triton.jit
def _cofactors(positions, at, plane, row, count, step_z, step_y, step_x, mask):
    """The determinant of a cell, and its derivatives by the slopes along the three axes."""
    az, ay, ax = _slope(positions, at, plane, count, step_z, mask)
    bz, by, bx = _slope(positions, at, row, count, step_y, mask)
    cz, cy, cx = _slope(positions, at, 1, count, step_x, mask)
    dz, dy, dx = _cross(bz, by, bx, cz, cy, cx)
    ez, ey, ex = _cross(cz, cy, cx, az, ay, ax)
    fz, fy, fx = _cross(az, ay, ax, bz, by, bx)
    return az * dz + ay * dy + ax * dx, dz, dy, dx, ez, ey, ex, fz, fy, fx


@triton.jit(do_not_specialize=_sizes("size"))
def _folds(
    positions, out, sums, size_z, size_y, size_x, step_z, step_y, step_x, margin, share, weight, LANES: tl.constexpr
):  # fmt: skip
    """Add the gradient of weight · mean relu(margin − det) to out (3, *size); sums: parts of the mean."""
    at, mask, z, y, x = _voxel(size_z, size_y, size_x, LANES)
    row = size_x
    plane = size_y * size_x
    count = size_z * plane
    by_z = tl.zeros([LANES], tl.float32)
    by_y = tl.zeros([LANES], tl.float32)
    by_x = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for part in range(4):  # the cell of the voxel, and those in which it lies ahead along an axis
        back_z = z - tl.where(part == 1, 1, 0)
        back_y = y - tl.where(part == 2, 1, 0)
        back_x = x - tl.where(part == 3, 1, 0)
        cell = mask & (back_z >= 0) & (back_y >= 0) & (back_x >= 0)
        cell &= (back_z + 1 < size_z) & (back_y + 1 < size_y) & (back_x + 1 < size_x)
        det, dz, dy, dx, ez, ey, ex, fz, fy, fx = _cofactors(
            positions, back_z * plane + back_y * row + back_x, plane, row, count, step_z, step_y, step_x, cell
        )
        bad = cell & (det < margin)
        total += tl.where(bad & (part == 0), margin - det, 0.0)
        sz = tl.where(bad & ((part == 0) | (part == 1)), tl.where(part == 0, 1.0, -1.0), 0.0) / step_z
        sy = tl.where(bad & ((part == 0) | (part == 2)), tl.where(part == 0, 1.0, -1.0), 0.0) / step_y
        sx = tl.where(bad & ((part == 0) | (part == 3)), tl.where(part == 0, 1.0, -1.0), 0.0) / step_x
        by_z += sz * dz + sy * ez + sx * fz
        by_y += sz * dy + sy * ey + sx * fy
        by_x += sz * dx + sy * ex + sx * fx
    factor = weight * share
    tl.store(out + at, tl.load(out + at, mask=mask) + factor * by_z, mask=mask)
    tl.store(out + count + at, tl.load(out + count + at, mask=mask) + factor * by_y, mask=mask)
    tl.store(out + 2 * count + at, tl.load(out + 2 * count + at, mask=mask) + factor * by_x, mask=mask)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0) * share)


@triton.jit
def _point(positions, start, z, y, x, size_z, size_y, size_x, SZ: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr):
    """The offset of every second voxel, from the first or the second one, along axes with a stride of 2."""
    phase = tl.load(start).to(tl.int32)
    z, y, x = z * SZ + phase * (SZ - 1), y * SY + phase * (SY - 1), x * SX + phase * (SX - 1)
    return z, y, x, positions + (z * size_y + y) * size_x + x


@triton.jit(do_not_specialize=_sizes("size", "other", "few"))
def _inverse_error(
    forward, backward, start, out,
    size_z, size_y, size_x, other_z, other_y, other_x, few_z, few_y, few_x,
    step_z, step_y, step_x, end_z, end_y, end_x, mm_z, mm_y, mm_x,
    SZ: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """out (3, *few): φ(ψ(x)) − x in mm, at every second voxel."""
    at, mask, z, y, x = _voxel(few_z, few_y, few_x, LANES)
    z, y, x, here = _point(backward, start, z, y, x, size_z, size_y, size_x, SZ, SY, SX)
    count, many, few = size_z * size_y * size_x, other_z * other_y * other_x, few_z * few_y * few_x
    bz = tl.load(here, mask=mask, other=0.0)
    by = tl.load(here + count, mask=mask, other=0.0)
    bx = tl.load(here + 2 * count, mask=mask, other=0.0)
    iz, iy, ix = _clip(bz / end_z), _clip(by / end_y), _clip(bx / end_x)
    vz, _, _, _ = _interpolate(forward, iz, iy, ix, other_z, other_y, other_x, 1, mask)
    vy, _, _, _ = _interpolate(forward + many, iz, iy, ix, other_z, other_y, other_x, 1, mask)
    vx, _, _, _ = _interpolate(forward + 2 * many, iz, iy, ix, other_z, other_y, other_x, 1, mask)
    tl.store(out + at, (vz + (bz - iz * end_z) - z * step_z) * mm_z, mask=mask)
    tl.store(out + few + at, (vy + (by - iy * end_y) - y * step_y) * mm_y, mask=mask)
    tl.store(out + 2 * few + at, (vx + (bx - ix * end_x) - x * step_x) * mm_x, mask=mask)


@triton.jit
def _bend(error, at, here, ahead, index, size, factor, mask):
    """A part of the sum of squared slopes along an axis, and half its derivative by the error at a voxel."""
    after = mask & (index + 1 < size)
    before = mask & (index > 0)
    up = tl.where(after, tl.load(error + at + ahead, mask=after, other=0.0) - here, 0.0)
    down = tl.where(before, here - tl.load(error + at - ahead, mask=before, other=0.0), 0.0)
    return factor * up * up, factor * (down - up)


@triton.jit(do_not_specialize=_sizes("few"))
def _bends(error, out, sums, few_z, few_y, few_x, factor_z, factor_y, factor_x, LANES: tl.constexpr):
    """out (3, *few): the gradient of Σ factor · (difference of neighbours)² by the error; sums: its parts."""
    at, mask, z, y, x = _voxel(few_z, few_y, few_x, LANES)
    few = few_z * few_y * few_x
    total = tl.zeros([LANES], tl.float32)
    for part in range(3):
        one = error + part * few
        here = tl.load(one + at, mask=mask, other=0.0)
        part_z, by_z = _bend(one, at, here, few_y * few_x, z, few_z, factor_z, mask)
        part_y, by_y = _bend(one, at, here, few_x, y, few_y, factor_y, mask)
        part_x, by_x = _bend(one, at, here, 1, x, few_x, factor_x, mask)
        tl.store(out + part * few + at, 2 * (by_z + by_y + by_x), mask=mask)
        total += part_z + part_y + part_x
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _spread(total, g, scale, z, y, x, fz, fy, fx, size_z, size_y, size_x, mask):
    """Add a gradient to the corners of its cell, as integers."""
    for corner in range(8):
        up_z, up_y, up_x = corner // 4, corner // 2 % 2, corner % 2
        weight = tl.where(up_z == 1, fz, 1 - fz) * tl.where(up_y == 1, fy, 1 - fy) * tl.where(up_x == 1, fx, 1 - fx)
        cz, cy, cx = (
            tl.minimum(z + up_z, size_z - 1),
            tl.minimum(y + up_y, size_y - 1),
            tl.minimum(x + up_x, size_x - 1),
        )
        whole = tl.floor(g * weight * scale + 0.5).to(tl.int64)
        tl.atomic_add(total + (cz * size_y + cy) * size_x + cx, whole, mask=mask & (whole != 0), sem="relaxed")


@triton.jit
def _low(p, size):
    position = p * (size - 1)
    low = tl.minimum(position.to(tl.int32), tl.maximum(size - 2, 0))
    return low, position - low


@triton.jit(do_not_specialize=_sizes("size", "other", "few"))
def _inverse_error_backward(
    forward, backward, start, by_error, scale, total, out,
    size_z, size_y, size_x, other_z, other_y, other_x, few_z, few_y, few_x,
    end_z, end_y, end_x, mm_z, mm_y, mm_x, weight,
    SZ: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Add weight · gradient by the backward map to out, and that by the forward one to total, (3, *other), as
    integers."""
    at, mask, z, y, x = _voxel(few_z, few_y, few_x, LANES)
    z, y, x, here = _point(backward, start, z, y, x, size_z, size_y, size_x, SZ, SY, SX)
    count, many, few = size_z * size_y * size_x, other_z * other_y * other_x, few_z * few_y * few_x
    pz = tl.load(here, mask=mask, other=0.0) / end_z
    py = tl.load(here + count, mask=mask, other=0.0) / end_y
    px = tl.load(here + 2 * count, mask=mask, other=0.0) / end_x
    gz = tl.load(by_error + at, mask=mask, other=0.0) * mm_z
    gy = tl.load(by_error + few + at, mask=mask, other=0.0) * mm_y
    gx = tl.load(by_error + 2 * few + at, mask=mask, other=0.0) * mm_x
    iz, iy, ix = _clip(pz), _clip(py), _clip(px)
    _, zz, zy, zx = _interpolate(forward, iz, iy, ix, other_z, other_y, other_x, 1, mask)
    _, yz, yy, yx = _interpolate(forward + many, iz, iy, ix, other_z, other_y, other_x, 1, mask)
    _, xz, xy, xx = _interpolate(forward + 2 * many, iz, iy, ix, other_z, other_y, other_x, 1, mask)
    by_z = gz + _clip_slope(pz) * ((gz * zz + gy * yz + gx * xz) / end_z - gz)
    by_y = gy + _clip_slope(py) * ((gz * zy + gy * yy + gx * xy) / end_y - gy)
    by_x = gx + _clip_slope(px) * ((gz * zx + gy * yx + gx * xx) / end_x - gx)
    target = out + (z * size_y + y) * size_x + x
    tl.store(target, tl.load(target, mask=mask) + weight * by_z, mask=mask)
    tl.store(target + count, tl.load(target + count, mask=mask) + weight * by_y, mask=mask)
    tl.store(target + 2 * count, tl.load(target + 2 * count, mask=mask) + weight * by_x, mask=mask)
    lz, fz = _low(iz, other_z)
    ly, fy = _low(iy, other_y)
    lx, fx = _low(ix, other_x)
    size = tl.load(scale)
    _spread(total, gz, size, lz, ly, lx, fz, fy, fx, other_z, other_y, other_x, mask)
    _spread(total + many, gy, size, lz, ly, lx, fz, fy, fx, other_z, other_y, other_x, mask)
    _spread(total + 2 * many, gx, size, lz, ly, lx, fz, fy, fx, other_z, other_y, other_x, mask)


@triton.jit(do_not_specialize=["count"])
def _adam(
    gradient, change, mean, square, field, best, better, paces, count, slow, LANES: tl.constexpr
):  # fmt: skip
    """A step of Adam in place; where the loss is the lowest so far, the field is kept as the best."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = at < count
    g = tl.load(gradient + at, mask=mask, other=0.0)
    m = tl.load(mean + at, mask=mask, other=0.0)
    s = tl.load(square + at, mask=mask, other=0.0)
    m += 0.1 * (g - m)
    s += 0.001 * (g * g - s)
    tl.store(mean + at, m, mask=mask)
    tl.store(square + at, s, mask=mask)
    speed = tl.sqrt(s / tl.load(paces)) + slow
    old = tl.load(change + at, mask=mask, other=0.0)
    tl.store(change + at, old - m / speed * tl.load(paces + 1), mask=mask)
    keep = mask & (tl.load(better + tl.zeros_like(at), mask=mask, other=0.0) > 0.5)
    tl.store(best + at, tl.load(field + at, mask=keep, other=0.0), mask=keep)


def _programs(count: int) -> tuple[int]:
    return (triton.cdiv(count, LANES),)


def moments(
    source: Tensor,
    target: Tensor,
    positions: Tensor,
    active: Tensor,
    stride: Sequence[int],
    block: Sequence[int],
    chessboard: bool,
) -> Tensor:
    """(1, 3, *pooled): the sums of a, a² and a·b of a source (1, 1, *shape), warped, and of a target (1, 1, *fine)
    whose sides are those of its `active` (*blocks) times `block`, over `stride` voxels along each axis, or those of
    them whose indices have an even sum, as on a `chessboard`."""
    geometry, options = _window_geometry(source, target, positions, stride, block, chessboard)
    out = target.new_empty(1, 3, *geometry[6:])
    _moments[_programs(math.prod(geometry[6:]))](source, target, positions, active, out, *geometry, **options)
    return out


def moments_backward(
    source: Tensor,
    target: Tensor,
    positions: Tensor,
    active: Tensor,
    stride: Sequence[int],
    block: Sequence[int],
    chessboard: bool,
    gradient: Tensor,
) -> Tensor:
    """The gradient by the positions (1, 3, *control), from that by the moments."""
    geometry, options = _window_geometry(source, target, positions, stride, block, chessboard)
    out = torch.empty_like(positions)
    arguments = (source, target, positions, active, gradient.contiguous(), out)
    _moments_backward[_programs(math.prod(geometry[3:6]))](*arguments, *geometry, **options)
    return out


def _window_geometry(
    source: Tensor,
    target: Tensor,
    positions: Tensor,
    stride: Sequence[int],
    block: Sequence[int],
    chessboard: bool,
) -> tuple[tuple[int, ...], dict[str, int]]:
    pooled = [n // k for n, k in zip(target.shape[2:], stride, strict=True)]
    options = dict(zip(("KZ", "KY", "KX"), stride, strict=True))
    options |= {name: q // k for name, q, k in zip(("QZ", "QY", "QX"), block, stride, strict=True)}
    return (*source.shape[2:], *positions.shape[2:], *pooled), {**options, "BOARD": int(chessboard), "LANES": LANES}


def correlate(
    blurred: Tensor, share: Tensor, mean: Tensor, scale: Tensor, weights: Tensor, epsilon: float, squared: bool
) -> tuple[Tensor, Tensor]:
    """Σ weights · (1 − correlation), or 1 − its square, and the gradient by the blurred moments (1, 3, *pooled)."""
    out, count = torch.empty_like(blurred), share.numel()
    sums = blurred.new_empty(_programs(count))
    arguments = (blurred.contiguous(), share, mean, scale, weights, out, sums, count, epsilon)
    _correlate[_programs(count)](*arguments, SQUARED=squared, LANES=LANES)
    return sums.sum(), out


def add_folds(positions: Tensor, steps: Sequence[float], margin: float, weight: float, out: Tensor) -> Tensor:
    """Mean relu(margin − det ∇φ) over the cells of a grid; weight · its gradient is added to `out`."""
    sizes = positions.shape[2:]
    cells = math.prod(n - 1 for n in sizes)
    sums = positions.new_empty(_programs(math.prod(sizes)))
    share = 1 / cells if cells else 0.0
    _folds[_programs(math.prod(sizes))](positions, out, sums, *sizes, *steps, margin, share, weight, LANES=LANES)
    return sums.sum()


def add_inverse_error(
    forward: Tensor,
    backward: Tensor,
    phase: Tensor,
    strides: Sequence[int],
    steps: Sequence[float],
    ends: Sequence[float],
    size: Sequence[float],
    lengths: Sequence[float],
    weight: float,
    out: tuple[Tensor, Tensor],
) -> Tensor:
    """GradICON: the mean squares of the slopes of φ(ψ(x)) − x in mm, over points `lengths` mm apart, every second one
    along axes with a stride of 2; weight · its gradients are added to `out`.

    `steps` are the distances between the voxels of ψ, `ends` the unit coordinates of the last ones of φ, and `size` is
    the extent of the image to which φ points.
    """
    sizes, others = backward.shape[2:], forward.shape[2:]
    few = [n // s for n, s in zip(sizes, strides, strict=True)]
    programs, options = (
        _programs(math.prod(few)),
        {"LANES": LANES} | dict(zip(("SZ", "SY", "SX"), strides, strict=True)),
    )
    error = backward.new_empty(3, *few)
    shapes = (*sizes, *others, *few)
    _inverse_error[programs](forward, backward, phase, error, *shapes, *steps, *ends, *size, **options)
    factors = []
    for axis, (n, mm) in enumerate(zip(few, lengths, strict=True)):
        count = 3 * math.prod(few[:axis] + few[axis + 1 :]) * (n - 1)
        factors.append(1 / (count * mm**2) if count else 0.0)
    by_error, sums = torch.empty_like(error), error.new_empty(programs)
    _bends[programs](error, by_error, sums, *few, *factors, LANES=LANES)
    largest = by_error.abs().amax() * max(size)
    scale = FIXED_POINT / largest.clamp(min=torch.finfo(error.dtype).tiny * FIXED_POINT)
    total = torch.zeros(3, *others, dtype=torch.long, device=error.device)
    arguments = (forward, backward, phase, by_error, scale, total, out[1], *shapes, *ends, *size, weight)
    _inverse_error_backward[programs](*arguments, **options)
    out[0].add_((total / scale).to(error.dtype)[None], alpha=weight)
    return sums.sum()


def adam(
    gradient: Tensor,
    change: Tensor,
    mean: Tensor,
    square: Tensor,
    field: Tensor,
    best: Tensor,
    better: Tensor,
    paces: Tensor,
    slow: float,
) -> None:
    """A step of Adam, in place, by `paces`: 1 − 0.999ⁿ and the learning rate over 1 − 0.9ⁿ. If `better`, the field is
    copied to `best`."""
    count = gradient.numel()
    kept = better.to(field.dtype)
    arguments = (gradient.contiguous(), change, mean, square, field, best, kept, paces, count, slow)
    _adam[_programs(count)](*arguments, LANES=LANES)
