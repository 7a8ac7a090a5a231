"""Coordinate attention as Triton kernels, forward and backward.

This is cheaper than general attention: the keys lie on a grid, so their positions follow from their indices and need
not be loaded; logits are bounded, so no running maximum is kept; and positions get no gradient.

A grid (Z, Y, X) is Z planes of Y·X keys. A tile covers the same keys of every plane, so the loop over planes sums two
numbers per pair, Σp and Σp·z; the positions within the plane stay constant and enter once per tile, after the loop.
Sums are in float32: numerator and denominator have the same weights, so the result is a convex combination of
positions. Logits are in units of log 2 (queries are scaled beforehand), because the hardware computes powers of 2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from carlreg.errors import InputError
from carlreg.fast.kernels.lengths import padded_width, scale_to_length, scale_to_length_backward

if TYPE_CHECKING:
    from carlreg.geometry.grids import Grid

LOG2_E = math.log2(math.e)


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
        key = tile * BLOCK_K + lane
        mass = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
        mass_z = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
        mass_zz = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
        for z in tl.range(0, planes, num_stages=STAGES):
            # Past a plane's end a tile reads the next plane's keys; their sums are masked out below.
            index = tl.minimum(z * plane_size + key, key_count - 1)
            k = tl.load(base + index[:, None] * FEATURES + feature[None, :])
            p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee"))
            height = z * 1.0
            mass += p
            mass_z += p * height
            if SECOND:
                mass_zz += p * (height * height)
        inside = key < plane_size
        y = tl.where(inside, key // row_size, 0).to(tl.float32)[None, :]
        x = tl.where(inside, key % row_size, 0).to(tl.float32)[None, :]
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
    queries,  # (B, N, C), scaled by log2(e)
    keys,  # (B, M, C)
    slopes,  # (B, N, 16)
    positions,  # (M, 16)
    gradient,  # (splits, B, N, C)
    query_count,
    key_count,
    tiles_per_split,
    batch,
    FEATURES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dL/dq = Σ_k w_k (g·x_k − g·y) k. Loads past the end give zero, and so do their products."""
    item = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = rows[:, None] < query_count
    feature = tl.arange(0, FEATURES)[None, :]
    column = tl.arange(0, 16)[None, :]
    lane = tl.arange(0, BLOCK_K)
    at = (item * query_count + rows)[:, None]
    q = tl.load(queries + at * FEATURES + feature, mask=valid, other=0.0)
    slope = tl.load(slopes + at * 16 + column, mask=valid, other=0.0)
    base = keys + item * key_count * FEATURES
    total = tl.zeros((BLOCK_Q, FEATURES), tl.float32)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(key_count, BLOCK_K))
    for tile in tl.range(first, last, num_stages=STAGES):
        index = (tile * BLOCK_K + lane)[:, None]
        k = tl.load(base + index * FEATURES + feature, mask=index < key_count, other=0.0)
        position = tl.load(positions + index * 16 + column, mask=index < key_count, other=0.0)
        weight = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee"))
        weight *= tl.dot(slope, tl.trans(position), input_precision="ieee")
        total += tl.dot(weight.to(k.dtype), k, input_precision="ieee")
    out = gradient + ((split * batch + item) * query_count + rows)[:, None] * FEATURES + feature
    tl.store(out, total, mask=valid)


@triton.jit
def _backward_keys(
    queries,  # (B, N, C), scaled by log2(e)
    keys,  # (B, M, C)
    slopes,  # (B, N, 16)
    positions,  # (M, 16)
    gradient,  # (B, M, C)
    query_count,
    key_count,
    FEATURES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dL/dk = Σ_q w_k (g·x_k − g·y) q: the same with queries and keys exchanged."""
    item = tl.program_id(1).to(tl.int64)
    index = (tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K))[:, None]
    inside = index < key_count
    feature = tl.arange(0, FEATURES)[None, :]
    column = tl.arange(0, 16)[None, :]
    lane = tl.arange(0, BLOCK_Q)
    at = item * key_count + index
    k = tl.load(keys + at * FEATURES + feature, mask=inside, other=0.0)
    position = tl.load(positions + index * 16 + column, mask=inside, other=0.0)
    total = tl.zeros((BLOCK_K, FEATURES), tl.float32)
    for start in tl.range(0, query_count, BLOCK_Q, num_stages=STAGES):
        rows = (start + lane)[:, None]
        row = item * query_count + rows
        q = tl.load(queries + row * FEATURES + feature, mask=rows < query_count, other=0.0)
        slope = tl.load(slopes + row * 16 + column, mask=rows < query_count, other=0.0)
        weight = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee"))
        weight *= tl.dot(position, tl.trans(slope), input_precision="ieee")
        total += tl.dot(weight.to(q.dtype), q, input_precision="ieee")
    tl.store(gradient + at * FEATURES + feature, total, mask=inside)


Blocks = dict[str, int]
"""Tile sizes, pipeline stages and warps of one kernel."""
FORWARD: Blocks = {"BLOCK_Q": 128, "BLOCK_K": 64, "STAGES": 3, "num_warps": 4}
FORWARD_SECOND = BACKWARD_QUERIES = BACKWARD_KEYS = FORWARD | {"BLOCK_Q": 64}
PROGRAMS = 4000
"""Number of programs to aim for: many more than any GPU has multiprocessors, so that the last ones do not wait long."""


def _split(tiles: int, blocks: int) -> tuple[int, int]:
    """Number of parts to split a row of tiles into if `blocks` programs share it, and number of tiles per part."""
    parts = max(1, min(tiles, PROGRAMS // blocks))
    per_part = triton.cdiv(tiles, parts)
    return triton.cdiv(tiles, per_part), per_part


def _run_forward(queries: Tensor, keys: Tensor, shape: tuple[int, ...], second: bool, blocks: Blocks) -> Tensor:
    """Sums of the weights and of their moments, in voxels: (B, N, 4 or 10)."""
    batch, count, features = queries.shape
    planes, height, width = (1,) * (3 - len(shape)) + shape
    query_blocks = triton.cdiv(count, blocks["BLOCK_Q"])
    splits, tiles_per_split = _split(triton.cdiv(height * width, blocks["BLOCK_K"]), query_blocks * batch)
    sums = queries.new_empty(splits, batch, count, 10 if second else 4, dtype=torch.float32)
    sizes = (count, planes, height * width, width, tiles_per_split, batch)
    _forward[query_blocks, batch, splits](queries, keys, sums, *sizes, FEATURES=features, SECOND=second, **blocks)
    return sums.sum(dim=0)


def _run_backward_queries(queries: Tensor, keys: Tensor, slopes: Tensor, positions: Tensor) -> Tensor:
    (batch, count, features), blocks = queries.shape, BACKWARD_QUERIES
    query_blocks = triton.cdiv(count, blocks["BLOCK_Q"])
    splits, tiles_per_split = _split(triton.cdiv(keys.shape[1], blocks["BLOCK_K"]), query_blocks * batch)
    gradient = queries.new_empty(splits, batch, count, features, dtype=torch.float32)
    sizes = (count, keys.shape[1], tiles_per_split, batch)
    launch = _backward_queries[query_blocks, batch, splits]
    launch(queries, keys, slopes, positions, gradient, *sizes, FEATURES=features, **blocks)
    return gradient.sum(dim=0)


def _run_backward_keys(queries: Tensor, keys: Tensor, slopes: Tensor, positions: Tensor) -> Tensor:
    (batch, count, features), blocks = keys.shape, BACKWARD_KEYS
    gradient = torch.empty_like(keys, dtype=torch.float32)
    launch = _backward_keys[triton.cdiv(count, blocks["BLOCK_K"]), batch]
    launch(queries, keys, slopes, positions, gradient, queries.shape[1], count, FEATURES=features, **blocks)
    return gradient


# The backward pass needs (g·x_k − g·y) / Σp for every pair. It is a product of two vectors, so the matrix unit can
# compute it, in bfloat16 because of its range. To be precise enough, positions are split into digits to base 256, which
# are exact, and gradients into a rounded value and its remainders. The product is multiplied by features in float16,
# because of its precision, so gradients are scaled to use most of its range.


def _positions(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Low digit twice and high digit twice of each key's z, y and x, then 1 three times: (M, 16)."""
    planes = (1,) * (3 - len(shape)) + shape
    if max(planes) > 256 * 256:
        raise InputError(f"the grid has sides {shape}; expected at most {256 * 256} voxels a side")
    axes = torch.meshgrid(*(torch.arange(n, device=like.device) for n in planes), indexing="ij")
    columns = [digit for axis in axes for digit in (axis % 256, axis % 256, axis - axis % 256, axis - axis % 256)]
    columns += [torch.ones_like(axes[0])] * 3
    return F.pad(torch.stack(columns, dim=-1).reshape(-1, 15), (0, 1)).to(_wide(like.dtype))


def _slopes(gradient: Tensor, means: Tensor, norm: Tensor, dtype: torch.dtype) -> Tensor:
    """Each query's gradient over Σp, and minus its product with the result, to match `_positions`: (B, N, 16)."""
    gradient = gradient / norm[..., None]
    columns, constant = [], torch.zeros_like(norm, dtype=torch.float64)
    for axis in range(3):
        value, remainder, _ = _rounded(gradient[..., axis], dtype)
        columns += [value, remainder, value, remainder]
        # From the rounded gradient: the slopes w·g·(x − y) of a query must add up to zero.
        constant -= (value.double() + remainder.double()) * means[..., axis].double()
    columns += _rounded(constant, dtype)
    return F.pad(torch.stack(columns, dim=-1), (0, 1))


def _rounded(values: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Three numbers of that type whose sum is as close to the values as possible."""
    parts = []
    for _ in range(3):
        parts.append(values.to(dtype))
        values = values - parts[-1]
    return parts


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float16 else dtype


class _KernelAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, shape: tuple[int, ...], length: float | None, dtype: torch.dtype
    ) -> Tensor:
        features = () if length is None else (queries, keys)
        ctx.kinds = [(tensor.shape[-1], tensor.dtype) for tensor in (queries, keys)]
        if length is None:
            queries, keys = _prepare(queries * LOG2_E, dtype), _prepare(keys, dtype)
        else:
            queries, keys = scale_to_length(queries, length * LOG2_E, dtype), scale_to_length(keys, length, dtype)
        sums = _run_forward(queries, keys, shape, False, FORWARD)
        norm, means = sums[..., 0], sums[..., 1:] / sums[..., :1]
        ctx.shape, ctx.length = shape, length
        ctx.save_for_backward(*features, queries, keys, norm, means)
        return means[..., 3 - len(shape) :]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *features, queries, keys, norm, means = ctx.saved_tensors
        gradient = F.pad(gradients[0].float(), (3 - len(ctx.shape), 0))
        positions, wide = _positions(ctx.shape, keys), _wide(queries.dtype)
        # No slope w·g·(x − y) exceeds |g| times the grid's diagonal: scale that to half of float16's range, for each
        # query's own gradient, and for the largest of them where the sum is over all queries.
        diagonal = math.hypot(*ctx.shape)
        length = gradient.norm(dim=-1, keepdim=True)
        # The lower bound avoids dividing by gradients that are zero or negligible.
        scale = 2.0**14 / (diagonal * length.clamp(min=1e-12 * length.amax() + 1e-30))
        common = scale.amin()
        raw = (
            _run_backward_queries(queries, keys, _slopes(gradient * scale, means, norm, wide), positions),
            _run_backward_keys(queries, keys, _slopes(gradient * common, means, norm, wide), positions),
        )
        divisors = (scale, common * LOG2_E)  # the queries in memory are longer by this factor
        if ctx.length is None:
            parts = zip(raw, divisors, ctx.kinds, strict=True)
            by_features = [(g / divisor)[..., :width].to(dtype) for g, divisor, (width, dtype) in parts]
        else:
            by_features = [
                scale_to_length_backward(*parts, ctx.length) for parts in zip(features, raw, divisors, strict=True)
            ]
        return *by_features, None, None, None


def _prepare(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to a contiguous tensor of that type, and pad the features to a power of two, at least 16."""
    return F.pad(features.to(dtype), (0, padded_width(features.shape[-1]) - features.shape[-1])).contiguous()


def kernel_attention(
    queries: Tensor, keys: Tensor, grid: Grid, length: float | None = None, *, dtype: torch.dtype = torch.float16
) -> Tensor:
    """Centre of mass of softmax(Q Kᵀ) over the grid's points, (B, N, D) in float32."""
    means: Tensor = _KernelAttention.apply(queries, keys, grid.shape, length, dtype)  # type: ignore[no-untyped-call]
    return grid.at(means)


def kernel_moments(
    queries: Tensor, keys: Tensor, grid: Grid, *, dtype: torch.dtype = torch.float16
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
