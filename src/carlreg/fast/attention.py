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
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from carlreg.errors import InputError
from carlreg.fast.lengths import padded_width, scale_to_length, scale_to_length_backward

if TYPE_CHECKING:
    from carlreg.geometry.grids import Grid

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
    queries,  # (B, N, C), scaled by log2(e)
    keys,  # (B, M, C)
    slopes,  # (B, N, 16)
    places,  # (M, 16)
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
    """dL/dq = Σ_k w_k (g·x_k − g·y) k. What is loaded past the end is zero, and so is what comes of it."""
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
        place = tl.load(places + index * 16 + column, mask=index < key_count, other=0.0)
        weight = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee"))
        weight *= tl.dot(slope, tl.trans(place), input_precision="ieee")
        total += tl.dot(weight.to(k.dtype), k, input_precision="ieee")
    out = gradient + ((split * batch + item) * query_count + rows)[:, None] * FEATURES + feature
    tl.store(out, total, mask=valid)


@triton.jit
def _backward_keys(
    queries,  # (B, N, C), scaled by log2(e)
    keys,  # (B, M, C)
    slopes,  # (B, N, 16)
    places,  # (M, 16)
    gradient,  # (B, M, C)
    query_count,
    key_count,
    FEATURES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dL/dk = Σ_q w_k (g·x_k − g·y) q: the same with the parts exchanged."""
    item = tl.program_id(1).to(tl.int64)
    index = (tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K))[:, None]
    inside = index < key_count
    feature = tl.arange(0, FEATURES)[None, :]
    column = tl.arange(0, 16)[None, :]
    lane = tl.arange(0, BLOCK_Q)
    at = item * key_count + index
    k = tl.load(keys + at * FEATURES + feature, mask=inside, other=0.0)
    place = tl.load(places + index * 16 + column, mask=inside, other=0.0)
    total = tl.zeros((BLOCK_K, FEATURES), tl.float32)
    for start in tl.range(0, query_count, BLOCK_Q, num_stages=STAGES):
        rows = (start + lane)[:, None]
        row = item * query_count + rows
        q = tl.load(queries + row * FEATURES + feature, mask=rows < query_count, other=0.0)
        slope = tl.load(slopes + row * 16 + column, mask=rows < query_count, other=0.0)
        weight = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee"))
        weight *= tl.dot(place, tl.trans(slope), input_precision="ieee")
        total += tl.dot(weight.to(q.dtype), q, input_precision="ieee")
    tl.store(gradient + at * FEATURES + feature, total, mask=inside)


@dataclass(frozen=True)
class Blocks:
    """Tile sizes, warps and pipeline stages of one kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


FORWARD = Blocks(queries=128, keys=64, warps=4, stages=3)
FORWARD_SECOND = Blocks(queries=64, keys=64, warps=4, stages=3)
BACKWARD_QUERIES = Blocks(queries=64, keys=64, warps=4, stages=3)
BACKWARD_KEYS = Blocks(queries=64, keys=64, warps=4, stages=3)

PROGRAMS = 4000
"""How many blocks of work to aim at: many more than the processors of any GPU, so that the last ones do not wait."""


def _split(tiles: int, blocks: int) -> tuple[int, int]:
    """Into how many parts to cut a row of tiles that `blocks` programs share, and how many tiles a part has."""
    parts = max(1, min(tiles, PROGRAMS // blocks))
    per_part = triton.cdiv(tiles, parts)
    return triton.cdiv(tiles, per_part), per_part


def _run_forward(queries: Tensor, keys: Tensor, shape: tuple[int, ...], second: bool, blocks: Blocks) -> Tensor:
    """Sums of the weights and of their moments, in voxels: (B, N, 4 or 10)."""
    batch, count, features = queries.shape
    planes, height, width = (1,) * (3 - len(shape)) + shape
    query_blocks = triton.cdiv(count, blocks.queries)
    splits, tiles_per_split = _split(triton.cdiv(height * width, blocks.keys), query_blocks * batch)
    sums = queries.new_empty(splits, batch, count, 10 if second else 4, dtype=torch.float32)
    _forward[query_blocks, batch, splits](
        queries,
        keys,
        sums,
        count,
        planes,
        height * width,
        width,
        tiles_per_split,
        batch,
        FEATURES=features,
        SECOND=second,
        BLOCK_Q=blocks.queries,
        BLOCK_K=blocks.keys,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
    )
    return sums.sum(dim=0)


def _run_backward_queries(queries: Tensor, keys: Tensor, slopes: Tensor, places: Tensor, blocks: Blocks) -> Tensor:
    batch, count, features = queries.shape
    query_blocks = triton.cdiv(count, blocks.queries)
    splits, tiles_per_split = _split(triton.cdiv(keys.shape[1], blocks.keys), query_blocks * batch)
    gradient = queries.new_empty(splits, batch, count, features, dtype=torch.float32)
    _backward_queries[query_blocks, batch, splits](
        queries,
        keys,
        slopes,
        places,
        gradient,
        count,
        keys.shape[1],
        tiles_per_split,
        batch,
        FEATURES=features,
        BLOCK_Q=blocks.queries,
        BLOCK_K=blocks.keys,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
    )
    return gradient.sum(dim=0)


def _run_backward_keys(queries: Tensor, keys: Tensor, slopes: Tensor, places: Tensor, blocks: Blocks) -> Tensor:
    batch, count, features = keys.shape
    gradient = torch.empty_like(keys, dtype=torch.float32)
    _backward_keys[triton.cdiv(count, blocks.keys), batch](
        queries,
        keys,
        slopes,
        places,
        gradient,
        queries.shape[1],
        count,
        FEATURES=features,
        BLOCK_Q=blocks.queries,
        BLOCK_K=blocks.keys,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
    )
    return gradient


# The backward pass needs (g·x_k − g·y) / Σp for every pair. It is a product of two vectors, so the matrix unit can
# compute it. In bfloat16, which has the range, that takes care: positions are cut into digits to base 256, which are
# exact, and gradients into a rounded value and its remainders. What comes out is multiplied by features in float16,
# which has the precision; so gradients are scaled to make the best of its range.


def _places(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """For each key: low digit twice and high digit twice of its z, y and x; then 1 three times: (M, 16)."""
    planes = (1,) * (3 - len(shape)) + shape
    if max(planes) > 256 * 256:
        raise InputError(f"the grid has sides {shape}; expected at most {256 * 256} voxels a side")
    axes = torch.meshgrid(*(torch.arange(n, device=like.device) for n in planes), indexing="ij")
    columns = []
    for axis in axes:
        low, high = axis % 256, axis - axis % 256
        columns += [low, low, high, high]
    columns += [torch.ones_like(axes[0])] * 3
    return F.pad(torch.stack(columns, dim=-1).reshape(-1, 15), (0, 1)).to(_wide(like.dtype))


def _slopes(gradient: Tensor, means: Tensor, norm: Tensor, dtype: torch.dtype) -> Tensor:
    """For each query: its gradient, and minus the product with its result, over Σp, as `_places` wants it."""
    gradient = gradient / norm[..., None]
    columns, constant = [], torch.zeros_like(norm, dtype=torch.float64)
    for axis in range(3):
        value, remainder, _ = _rounded(gradient[..., axis], dtype)
        columns += [value, remainder, value, remainder]
        # From what was kept of the gradient: the slopes w·g·(x − y) of a query must add up to zero.
        constant -= (value.double() + remainder.double()) * means[..., axis].double()
    columns += _rounded(constant, dtype)
    return F.pad(torch.stack(columns, dim=-1), (0, 1))


def _rounded(values: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Three numbers of that type that add up to the values as nearly as they can."""
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
        given = () if length is None else (queries, keys)
        ctx.kinds = [(features.shape[-1], features.dtype) for features in (queries, keys)]
        if length is None:
            queries, keys = _prepare(queries * LOG2_E, dtype), _prepare(keys, dtype)
        else:
            queries, keys = scale_to_length(queries, length * LOG2_E, dtype), scale_to_length(keys, length, dtype)
        sums = _run_forward(queries, keys, shape, False, FORWARD)
        norm, means = sums[..., 0], sums[..., 1:] / sums[..., :1]
        ctx.shape, ctx.length = shape, length
        ctx.save_for_backward(*given, queries, keys, norm, means)
        return means[..., 3 - len(shape) :]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *given, queries, keys, norm, means = ctx.saved_tensors
        gradient = F.pad(gradients[0].float(), (3 - len(ctx.shape), 0))
        places, wide = _places(ctx.shape, keys), _wide(queries.dtype)
        # No slope w·g·(x − y) exceeds |g| times the grid's diagonal: scale that to half of float16's range, for each
        # query's own gradient, and for the largest of them where all queries are added up.
        diagonal = math.hypot(*ctx.shape)
        length = gradient.norm(dim=-1, keepdim=True)
        # Gradients of zero, or next to nothing beside the largest, are scaled as if they were a little larger.
        scale = 2.0**14 / (diagonal * length.clamp(min=1e-12 * length.amax() + 1e-30))
        query_gradient = _run_backward_queries(
            queries, keys, _slopes(gradient * scale, means, norm, wide), places, BACKWARD_QUERIES
        )
        common = scale.amin()
        key_gradient = _run_backward_keys(
            queries, keys, _slopes(gradient * common, means, norm, wide), places, BACKWARD_KEYS
        )
        raw, divisors = (query_gradient, key_gradient), (scale, common * LOG2_E)  # queries in memory are too long
        if ctx.length is None:
            parts = zip(raw, divisors, ctx.kinds, strict=True)
            by_features = [(g / divisor)[..., :width].to(dtype) for g, divisor, (width, dtype) in parts]
        else:
            by_features = [
                scale_to_length_backward(*parts, ctx.length) for parts in zip(given, raw, divisors, strict=True)
            ]
        return *by_features, None, None, None


def _prepare(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, in the kernels' type, with a number of features that is a power of two and at least 16."""
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
