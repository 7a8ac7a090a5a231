"""Coordinate attention: each query is mapped to the centre of mass of its attention over the keys' positions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.errors import InputError
from carlreg.fast.attention import LARGEST_LOGIT, choose_backend, fused_attention
from carlreg.geometry.grids import Grid

BLOCK = 512
"""Queries of a thread and keys in a block of `chunked_attention`: 1 MiB of logits in float32, for a core's cache."""


def reference_attention(queries: Tensor, keys: Tensor, points: Tensor) -> Tensor:
    """The equation itself, with the matrix of all pairs in memory: what the other backends are tested against."""
    return (queries @ keys.mT).softmax(dim=-1) @ points  # centre of mass of softmax(Q Kᵀ)


def chunked_attention(queries: Tensor, keys: Tensor, points: Tensor, bound: float | None = None) -> Tensor:
    """The same in blocks: plain PyTorch, any device, memory linear in the number of voxels.

    Blocks of logits stay in the processor's cache; a running maximum keeps exp in range for any features, unless the
    `bound` on the logits does. The backward pass recomputes each block instead of storing it: with w = softmax(Q Kᵀ)
    and y = w·V, the gradient of the logits is w · (g·V − g·y), where g is the gradient of y.
    """
    in_range = bound is not None and bound <= LARGEST_LOGIT
    result: Tensor = _ChunkedAttention.apply(queries, keys, points, in_range)  # type: ignore[no-untyped-call]
    return result


def _blocks(count: int, threads: int = 1) -> list[slice]:
    return [slice(start, start + threads * BLOCK) for start in range(0, count, threads * BLOCK)]


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, points: Tensor, in_range: bool) -> Tensor:
        points = points.expand(keys.shape[0], -1, -1)
        # A row of ones below the positions gives the sum of the weights. All is transposed: a product of few rows with
        # many columns is several times as fast on a CPU as one of many rows with few columns.
        values = F.pad(points, (0, 1), value=1.0).mT.contiguous()
        output = queries.new_empty(*queries.shape[:2], points.shape[2])
        log_norm = queries.new_empty(*queries.shape[:2], 1)
        for item in range(queries.shape[0]):
            for rows in _blocks(queries.shape[1], torch.get_num_threads()):
                query = queries[item, rows].mT
                top = query.new_full((1, query.shape[1]), 0.0 if in_range else -torch.inf)
                total = query.new_zeros(values.shape[1], query.shape[1])
                for columns in _blocks(keys.shape[1]):
                    logits = keys[item, columns] @ query
                    if not in_range:
                        highest = torch.maximum(top, logits.amax(dim=0, keepdim=True))
                        logits.sub_(highest)
                        total *= (top - highest).exp()
                        top = highest
                    total.addmm_(values[item, :, columns], logits.exp_())
                output[item, rows] = (total[:-1] / total[-1:]).mT
                log_norm[item, rows] = (top + total[-1:].log()).mT
        ctx.save_for_backward(queries, keys, points, output, log_norm)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        (gradient,) = gradients
        queries, keys, points, output, log_norm = ctx.saved_tensors
        query_gradient, key_gradient = torch.zeros_like(queries), torch.zeros_like(keys)
        point_gradient = torch.zeros_like(points) if ctx.needs_input_grad[2] else None
        centre = (gradient * output).sum(dim=-1, keepdim=True)  # g·y
        for item in range(queries.shape[0]):
            for rows in _blocks(queries.shape[1], torch.get_num_threads()):
                query, upstream = queries[item, rows], gradient[item, rows]
                for columns in _blocks(keys.shape[1]):
                    key = keys[item, columns]
                    weights = (query @ key.mT).sub_(log_norm[item, rows]).exp_()
                    if point_gradient is not None:
                        point_gradient[item, columns] += weights.mT @ upstream
                    weights *= upstream @ points[item, columns].mT - centre[item, rows]
                    query_gradient[item, rows] += weights @ key
                    key_gradient[item, columns] += weights.mT @ query
        return query_gradient, key_gradient, point_gradient, None


BACKENDS = {"chunked": chunked_attention, "fused": fused_attention, "reference": reference_attention}
KERNEL = "triton"


def coordinate_attention(
    queries: Tensor,
    keys: Tensor,
    coords: Tensor | Grid,
    *,
    bound: float | None = None,
    length: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(Q Kᵀ) · coords, without the matrix of all pairs in memory.

    queries (B, N, C) and keys (B, M, C) are feature vectors; coords, a Grid of M points or a tensor (M, D) or
    (B, M, D), are the positions of the keys. The result (B, N, D) is the position of each query's match: a convex
    combination of the keys' positions, in float32 or better, also under autocast.

    `length`, if given, is the length to which queries and keys are scaled first: f ↦ length · f / (1e-3 + ‖f‖).

    `bound` is an upper bound on the logits, if known; it follows from `length`. With a bound and a Grid,
    half-precision features or autocast use the Triton kernels on an NVIDIA GPU. Otherwise a GPU uses PyTorch's fused
    attention ("fused"), and a CPU "chunked". "reference" keeps the matrix in memory, for tests.
    """
    _check(queries, keys)
    bound = bound if length is None else length**2
    if backend == "auto":
        backend = choose_backend(queries, on_grid=isinstance(coords, Grid), bound=bound)
    if backend not in (known := sorted([*BACKENDS, KERNEL])):
        raise InputError(f"unknown attention backend {backend!r}; expected 'auto' or one of {known}")
    with torch.autocast(queries.device.type, enabled=False):
        if backend == KERNEL:
            from carlreg.fast.kernels.attention import kernel_attention

            return kernel_attention(queries, keys, _as_grid(coords, keys), length)
        # Coordinates in bfloat16 would be wrong by up to 1/256 of the image.
        precise = torch.promote_types(queries.dtype, torch.float32)
        queries, keys = queries.to(precise), keys.to(precise)
        if length is not None:
            queries, keys = (scale_to_length(features, length) for features in (queries, keys))
        positions = _positions(coords, keys)
        if backend == "chunked":
            return chunked_attention(queries, keys, positions, bound)
        return BACKENDS[backend](queries, keys, positions)


def scale_to_length(features: Tensor, length: float) -> Tensor:
    """length · f / (1e-3 + ‖f‖) of vectors (..., C), in float32 or better."""
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    return features * (length / (1e-3 + features.norm(dim=-1, keepdim=True)))


@torch.no_grad()
def attention_moments(
    queries: Tensor,
    keys: Tensor,
    coords: Grid,
    *,
    bound: float | None = None,
    length: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Mean (B, N, D) and covariance (B, N, D, D) of each query's attention: the match and its uncertainty.

    Arguments as in `coordinate_attention`. Without gradient.
    """
    _check(queries, keys)
    if length is not None:
        queries, keys, bound = scale_to_length(queries, length), scale_to_length(keys, length), length**2
    if backend == "auto":
        backend = choose_backend(queries, on_grid=isinstance(coords, Grid), bound=bound)
    if backend == KERNEL:
        from carlreg.fast.kernels.attention import kernel_moments

        return kernel_moments(queries, keys, _as_grid(coords, keys))
    points = _positions(coords, keys.to(torch.promote_types(queries.dtype, torch.float32)))
    # The second moments are attention over squares of positions, taken from the middle to lose fewer digits.
    middle = points.mean(dim=1, keepdim=True)
    points = points - middle
    squares = (points[..., :, None] * points[..., None, :]).flatten(-2)
    dim = points.shape[-1]
    moments = coordinate_attention(queries, keys, torch.cat([points, squares], dim=-1), backend=backend)
    mean, second = moments[..., :dim], moments[..., dim:].unflatten(-1, (dim, dim))
    return mean + middle, second - mean[..., :, None] * mean[..., None, :]


def _check(queries: Tensor, keys: Tensor) -> None:
    for name, features in (("queries", queries), ("keys", keys)):
        if features.dim() != 3:
            raise InputError(f"{name} have shape {tuple(features.shape)}; expected (B, number, features)")
        if not features.is_floating_point():
            raise TypeError(f"{name} have dtype {features.dtype}; expected floating point")
    if queries.shape[0] != keys.shape[0] or queries.shape[2] != keys.shape[2]:
        shapes = f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}"
        raise InputError(f"{shapes}; expected the same batch size and feature length")


def _positions(coords: Tensor | Grid, keys: Tensor) -> Tensor:
    """Positions of the keys as (1 or B, M, D)."""
    if isinstance(coords, Grid):
        coords = coords.points(keys.dtype, keys.device).reshape(-1, len(coords.shape))
    points = coords if coords.dim() == 3 else coords[None]
    if points.dim() != 3 or points.shape[1] != keys.shape[1] or points.shape[0] not in (1, keys.shape[0]):
        shapes = f"coords have shape {tuple(coords.shape)} for keys of shape {tuple(keys.shape)}"
        raise InputError(f"{shapes}; expected one position per key, ({keys.shape[1]}, D)")
    return points.to(keys.dtype)


def _as_grid(coords: Tensor | Grid, keys: Tensor) -> Grid:
    if not isinstance(coords, Grid):
        raise TypeError("the Triton kernels take positions as a Grid; expected a Grid, or another backend")
    if coords.count != keys.shape[1]:
        raise InputError(f"the grid has {coords.count} points for {keys.shape[1]} keys; expected one point per key")
    return coords
