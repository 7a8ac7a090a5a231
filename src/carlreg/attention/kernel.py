"""Coordinate attention as Triton kernels, forward and backward.

What makes this cheaper than attention in general: the keys lie on a grid, so their positions follow from their
indices and need not be loaded; logits are bounded, so no running maximum is kept; and positions get no gradient.

A grid (Z, Y, X) is seen as Z planes of Y·X keys. A tile of keys covers the same places of every plane, so the loop
over planes adds up two numbers per pair, Σp and Σp·z; the positions within the plane are constant meanwhile and enter
once per tile, after the loop. Sums are in float32: the weights in numerator and denominator are the same, and the
result is a convex combination of positions. Logits come in units of log 2 (queries are scaled beforehand), since the
hardware computes powers of 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from carlreg.grids import Grid

LOG2_E = math.log2(math.e)
LARGEST_LOGIT = 64.0
"""Above it, sums of exp could leave the range of float32 without a running maximum."""


@triton.jit
def _forward(
    queries,  # (B, N, C), scaled by log2(e)
    keys,  # (B, Z * P, C)
    sums,  # (splits, B, N, 4 or 10): Σp, Σp·z, Σp·y, Σp·x, and the six second moments
    query_count,
    planes,
    plane_size,
    row_size,
    tiles_per_split,
    batch,
    FEATURES: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    item = tl.program_id(1)
    split = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    feature = tl.arange(0, FEATURES)
    lane = tl.arange(0, BLOCK_K)
    key_count = planes * plane_size
    q = tl.load(
        queries + (item.to(tl.int64) * query_count + rows)[:, None] * FEATURES + feature[None, :],
        mask=rows[:, None] < query_count,
        other=0.0,
    )
    base = keys + item.to(tl.int64) * key_count * FEATURES
    w = tl.zeros((BLOCK_Q,), tl.float32)
    wz, wy, wx = w, w, w
    wzz, wzy, wzx, wyy, wyx, wxx = w, w, w, w, w, w

    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(plane_size, BLOCK_K))
    for tile in range(first, last):
        place = tile * BLOCK_K + lane
        mass = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
        mass_z = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
        mass_zz = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
        for z in tl.range(0, planes, num_stages=STAGES):
            # Past a plane's end a tile reads the next plane's keys; what it makes of them is dropped below.
            index = tl.minimum(z * plane_size + place, key_count - 1)
            k = tl.load(base + index[:, None] * FEATURES + feature[None, :])
            p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee"))
            height = z * 1.0
            mass += p
            mass_z += p * height
            if SECOND:
                mass_zz += p * (height * height)
        inside = place < plane_size
        y = tl.where(inside, place // row_size, 0).to(tl.float32)[None, :]
        x = tl.where(inside, place % row_size, 0).to(tl.float32)[None, :]
        mass = tl.where(inside[None, :], mass, 0.0)
        mass_z = tl.where(inside[None, :], mass_z, 0.0)
        w += tl.sum(mass, 1)
        wz += tl.sum(mass_z, 1)
        wy += tl.sum(mass * y, 1)
        wx += tl.sum(mass * x, 1)
        if SECOND:
            wzz += tl.sum(tl.where(inside[None, :], mass_zz, 0.0), 1)
            wzy += tl.sum(mass_z * y, 1)
            wzx += tl.sum(mass_z * x, 1)
            wyy += tl.sum(mass * (y * y), 1)
            wyx += tl.sum(mass * (y * x), 1)
            wxx += tl.sum(mass * (x * x), 1)

    COLUMNS: tl.constexpr = 10 if SECOND else 4
    out = sums + ((split * batch + item).to(tl.int64) * query_count + rows) * COLUMNS
    valid = rows < query_count
    tl.store(out, w, mask=valid)
    tl.store(out + 1, wz, mask=valid)
    tl.store(out + 2, wy, mask=valid)
    tl.store(out + 3, wx, mask=valid)
    if SECOND:
        tl.store(out + 4, wzz, mask=valid)
        tl.store(out + 5, wzy, mask=valid)
        tl.store(out + 6, wzx, mask=valid)
        tl.store(out + 7, wyy, mask=valid)
        tl.store(out + 8, wyx, mask=valid)
        tl.store(out + 9, wxx, mask=valid)


@triton.jit
def _backward_queries(
    queries,
    keys,
    upstream,  # (B, N, 4): gradient by z, y, x in voxels, and minus its product with the result
    log_norm,  # (B, N), log2 of Σp
    gradient,  # (splits, B, N, C)
    query_count,
    planes,
    plane_size,
    row_size,
    tiles_per_split,
    batch,
    FEATURES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dL/dq = Σ_k w_k (g·x_k − g·y) k."""
    item = tl.program_id(1)
    split = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = rows < query_count
    feature = tl.arange(0, FEATURES)
    lane = tl.arange(0, BLOCK_K)
    key_count = planes * plane_size
    at = item.to(tl.int64) * query_count + rows
    q = tl.load(queries + at[:, None] * FEATURES + feature[None, :], mask=valid[:, None], other=0.0)
    norm = tl.load(log_norm + at, mask=valid, other=0.0)
    gz = tl.load(upstream + at * 4, mask=valid, other=0.0)
    gy = tl.load(upstream + at * 4 + 1, mask=valid, other=0.0)
    gx = tl.load(upstream + at * 4 + 2, mask=valid, other=0.0)
    g0 = tl.load(upstream + at * 4 + 3, mask=valid, other=0.0)
    base = keys + item.to(tl.int64) * key_count * FEATURES
    total = tl.zeros((BLOCK_Q, FEATURES), tl.float32)

    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(plane_size, BLOCK_K))
    for tile in range(first, last):
        place = tile * BLOCK_K + lane
        inside = place < plane_size
        y = tl.where(inside, place // row_size, 0).to(tl.float32)[None, :]
        x = tl.where(inside, place % row_size, 0).to(tl.float32)[None, :]
        # A key that is not there gets the logit −∞.
        floor = tl.where(inside, 0.0, -float("inf"))[None, :]
        for z in tl.range(0, planes, num_stages=STAGES):
            index = tl.minimum(z * plane_size + place, key_count - 1)
            k = tl.load(base + index[:, None] * FEATURES + feature[None, :])
            logit = tl.dot(q, tl.trans(k), input_precision="ieee")
            weight = tl.exp2(logit + (floor - norm[:, None]))
            height = gz * (z * 1.0) + g0
            slope = weight * (gx[:, None] * x + (gy[:, None] * y + height[:, None]))
            total += tl.dot(slope.to(k.dtype), k, input_precision="ieee")
    out = gradient + ((split * batch + item).to(tl.int64) * query_count + rows)[:, None] * FEATURES + feature[None, :]
    tl.store(out, total, mask=valid[:, None])


@triton.jit
def _backward_keys(
    queries,
    keys,
    upstream,
    log_norm,
    gradient,  # (B, Z * P, C)
    query_count,
    planes,
    plane_size,
    row_size,
    FEATURES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dL/dk = Σ_q w_k (g·x_k − g·y) q, for a tile of keys of one plane."""
    item = tl.program_id(2)
    z = tl.program_id(1)
    place = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = place < plane_size
    feature = tl.arange(0, FEATURES)
    lane = tl.arange(0, BLOCK_Q)
    at = (item.to(tl.int64) * planes + z) * plane_size + place
    k = tl.load(keys + at[:, None] * FEATURES + feature[None, :], mask=inside[:, None], other=0.0)
    y = (place // row_size).to(tl.float32)[:, None]
    x = (place % row_size).to(tl.float32)[:, None]
    height = z.to(tl.float32)
    first = item.to(tl.int64) * query_count
    total = tl.zeros((BLOCK_K, FEATURES), tl.float32)
    for start in tl.range(0, query_count, BLOCK_Q, num_stages=STAGES):
        rows = start + lane
        valid = rows < query_count
        row = first + rows
        q = tl.load(queries + row[:, None] * FEATURES + feature[None, :], mask=valid[:, None], other=0.0)
        norm = tl.load(log_norm + row, mask=valid, other=float("inf"))  # a query that is not there weighs nothing
        gz = tl.load(upstream + row * 4, mask=valid, other=0.0)
        gy = tl.load(upstream + row * 4 + 1, mask=valid, other=0.0)
        gx = tl.load(upstream + row * 4 + 2, mask=valid, other=0.0)
        g0 = tl.load(upstream + row * 4 + 3, mask=valid, other=0.0)
        weight = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") - norm[None, :])
        slope = weight * (x * gx[None, :] + (y * gy[None, :] + (gz * height + g0)[None, :]))
        total += tl.dot(slope.to(q.dtype), q, input_precision="ieee")
    tl.store(gradient + at[:, None] * FEATURES + feature[None, :], total, mask=inside[:, None])


@dataclass(frozen=True)
class Blocks:
    """Tile sizes, warps and pipeline stages of one kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


FORWARD = Blocks(queries=256, keys=64, warps=8, stages=3)
FORWARD_SECOND = Blocks(queries=128, keys=64, warps=8, stages=3)
BACKWARD_QUERIES = Blocks(queries=128, keys=64, warps=8, stages=3)
BACKWARD_KEYS = Blocks(queries=64, keys=128, warps=8, stages=3)

PROGRAMS = 1500
"""How many blocks of work to aim at: many more than the processors of any GPU, so that the last ones do not wait."""


@dataclass(frozen=True)
class _Problem:
    """Sizes, as the kernels want them."""

    batch: int
    queries: int
    planes: int
    plane_size: int
    row_size: int
    features: int

    @classmethod
    def of(cls, queries: Tensor, shape: tuple[int, ...]) -> _Problem:
        planes, height, width = (1,) * (3 - len(shape)) + shape
        return cls(queries.shape[0], queries.shape[1], planes, height * width, width, queries.shape[2])

    def split(self, blocks: Blocks) -> tuple[tuple[int, int, int], int]:
        """A launch grid and the number of tiles of each split of the keys."""
        query_blocks, tiles = triton.cdiv(self.queries, blocks.queries), triton.cdiv(self.plane_size, blocks.keys)
        splits = max(1, min(tiles, PROGRAMS // (query_blocks * self.batch)))
        tiles_per_split = triton.cdiv(tiles, splits)
        return (query_blocks, self.batch, triton.cdiv(tiles, tiles_per_split)), tiles_per_split


def _run_forward(queries: Tensor, keys: Tensor, shape: tuple[int, ...], second: bool, blocks: Blocks) -> Tensor:
    """Sums of the weights and of their moments, in voxels: (B, N, 4 or 10)."""
    problem = _Problem.of(queries, shape)
    grid, tiles_per_split = problem.split(blocks)
    sums = queries.new_empty(grid[2], problem.batch, problem.queries, 10 if second else 4, dtype=torch.float32)
    _forward[grid](
        queries,
        keys,
        sums,
        problem.queries,
        problem.planes,
        problem.plane_size,
        problem.row_size,
        tiles_per_split,
        problem.batch,
        FEATURES=problem.features,
        SECOND=second,
        BLOCK_Q=blocks.queries,
        BLOCK_K=blocks.keys,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
    )
    return sums.sum(dim=0)


def _run_backward_queries(
    queries: Tensor, keys: Tensor, upstream: Tensor, log_norm: Tensor, shape: tuple[int, ...], blocks: Blocks
) -> Tensor:
    problem = _Problem.of(queries, shape)
    grid, tiles_per_split = problem.split(blocks)
    gradient = queries.new_empty(grid[2], *queries.shape, dtype=torch.float32)
    _backward_queries[grid](
        queries,
        keys,
        upstream,
        log_norm,
        gradient,
        problem.queries,
        problem.planes,
        problem.plane_size,
        problem.row_size,
        tiles_per_split,
        problem.batch,
        FEATURES=problem.features,
        BLOCK_Q=blocks.queries,
        BLOCK_K=blocks.keys,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
    )
    return gradient.sum(dim=0)


def _run_backward_keys(
    queries: Tensor, keys: Tensor, upstream: Tensor, log_norm: Tensor, shape: tuple[int, ...], blocks: Blocks
) -> Tensor:
    problem = _Problem.of(queries, shape)
    gradient = torch.empty_like(keys, dtype=torch.float32)
    grid = (triton.cdiv(problem.plane_size, blocks.keys), problem.planes, problem.batch)
    _backward_keys[grid](
        queries,
        keys,
        upstream,
        log_norm,
        gradient,
        problem.queries,
        problem.planes,
        problem.plane_size,
        problem.row_size,
        FEATURES=problem.features,
        BLOCK_Q=blocks.queries,
        BLOCK_K=blocks.keys,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
    )
    return gradient / LOG2_E  # the queries in memory are log2(e) times too long


class _KernelAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        ctx.dtypes = queries.dtype, keys.dtype
        queries, keys = _prepare(queries * LOG2_E, dtype), _prepare(keys, dtype)
        sums = _run_forward(queries, keys, shape, False, FORWARD)
        means = sums[..., 1:] / sums[..., :1]
        ctx.shape = shape
        ctx.save_for_backward(queries, keys, sums[..., 0].log2(), means)
        return means[..., 3 - len(shape) :]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, log_norm, means = ctx.saved_tensors
        gradient = F.pad(gradients[0].float(), (means.shape[-1] - len(ctx.shape), 0))
        upstream = torch.cat([gradient, -(gradient * means).sum(dim=-1, keepdim=True)], dim=-1).contiguous()
        arguments = queries, keys, upstream, log_norm.contiguous(), ctx.shape
        query_gradient = _run_backward_queries(*arguments, BACKWARD_QUERIES)
        key_gradient = _run_backward_keys(*arguments, BACKWARD_KEYS)
        return query_gradient.to(ctx.dtypes[0]), key_gradient.to(ctx.dtypes[1]), None, None


def _prepare(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, in the kernels' type, with a number of features that is a power of two and at least 16."""
    width = max(16, triton.next_power_of_2(features.shape[-1]))
    return F.pad(features.to(dtype), (0, width - features.shape[-1])).contiguous()


def kernel_attention(queries: Tensor, keys: Tensor, grid: Grid, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Centre of mass of softmax(Q Kᵀ) over the grid's points, (B, N, D) in float32."""
    width = queries.shape[-1]
    if width & (width - 1) or width < 16:  # padding outside the function lets autograd cut it off again
        missing = max(16, triton.next_power_of_2(width)) - width
        queries, keys = F.pad(queries, (0, missing)), F.pad(keys, (0, missing))
    means: Tensor = _KernelAttention.apply(queries, keys, grid.shape, dtype)
    return grid.at(means)


def kernel_moments(
    queries: Tensor, keys: Tensor, grid: Grid, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Mean (B, N, D) and covariance (B, N, D, D) of each query's attention over the grid's points. No gradient."""
    with torch.no_grad():
        sums = _run_forward(_prepare(queries * LOG2_E, dtype), _prepare(keys, dtype), grid.shape, True, FORWARD_SECOND)
        moments = sums[..., 1:] / sums[..., :1]
        mean = moments[..., :3]
        zz, zy, zx, yy, yx, xx = moments[..., 3:].unbind(-1)
        second = torch.stack([zz, zy, zx, zy, yy, yx, zx, yx, xx], dim=-1).reshape(*mean.shape, 3)
        covariance = second - mean[..., :, None] * mean[..., None, :]
        skip = 3 - len(grid.shape)
        spacing = torch.tensor(grid.spacing, device=mean.device)
        return grid.at(mean[..., skip:]), covariance[..., skip:, skip:] * spacing[:, None] * spacing
