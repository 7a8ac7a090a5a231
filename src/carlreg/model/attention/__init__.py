"""Coordinate attention: every query takes the centre of mass of its attention over the keys' positions."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from carlreg import fast
from carlreg.errors import InputError
from carlreg.geometry.grids import Grid
from carlreg.model.attention.chunked import chunked_attention
from carlreg.model.attention.fused import fused_attention
from carlreg.model.attention.reference import reference_attention

logger = logging.getLogger(__name__)

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
    """softmax(Q Kᵀ) · coords, without ever holding the matrix of all pairs.

    queries (B, N, C) and keys (B, M, C) are feature vectors; coords, a Grid of M points or a tensor (M, D) or
    (B, M, D), says where the keys are. The result (B, N, D) is where each query's match lies: a convex combination of
    the keys' positions, in float32 at least, also under autocast.

    `length`, if given, is what queries and keys are scaled to first: f ↦ length · f / (1e-3 + ‖f‖).

    `bound`, if known, is how large a logit can get; it follows from a length. With it, on a Grid, half-precision
    features or autocast lead to the Triton kernels on an NVIDIA GPU. Otherwise a GPU uses PyTorch's fused attention
    ("fused"), and a CPU "chunked". "reference" does hold the matrix, for tests.
    """
    _check(queries, keys)
    bound = bound if length is None else length**2
    if backend == "auto":
        backend = _choose(queries, coords, bound)
    if backend not in (*BACKENDS, KERNEL):
        raise InputError(
            f"unknown attention backend {backend!r}; expected 'auto' or one of {sorted([*BACKENDS, KERNEL])}"
        )
    with torch.autocast(queries.device.type, enabled=False):
        if backend == KERNEL:
            from carlreg.fast.attention import kernel_attention

            return kernel_attention(queries, keys, _as_grid(coords, keys), length)
        # Half-precision coordinates would be wrong: bfloat16 is off by up to 1/256 of the image.
        precise = torch.promote_types(queries.dtype, torch.float32)
        queries, keys = queries.to(precise), keys.to(precise)
        if length is not None:
            queries, keys = (scale_to_length(features, length) for features in (queries, keys))
        return BACKENDS[backend](queries, keys, _positions(coords, keys))


def scale_to_length(features: Tensor, length: float) -> Tensor:
    """length · f / (1e-3 + ‖f‖) of vectors (..., C), in float32 at least."""
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    return features * (length / (1e-3 + features.norm(dim=-1, keepdim=True)))


def attention_moments(
    queries: Tensor,
    keys: Tensor,
    coords: Grid,
    *,
    bound: float | None = None,
    length: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Mean (B, N, D) and covariance (B, N, D, D) of each query's attention: where its match lies and how sure that is.

    Arguments as in `coordinate_attention`. Without gradient.
    """
    _check(queries, keys)
    with torch.no_grad():
        if length is not None:
            queries, keys, bound = scale_to_length(queries, length), scale_to_length(keys, length), length**2
        if backend == KERNEL or (backend == "auto" and _choose(queries, coords, bound) == KERNEL):
            from carlreg.fast.attention import kernel_moments

            return kernel_moments(queries, keys, _as_grid(coords, keys))
        dtype = torch.promote_types(queries.dtype, torch.float32)
        points = _positions(coords, keys.to(dtype))
        # Squares of positions are attended to like positions; from the middle, little is lost in the difference.
        middle = points.mean(dim=1, keepdim=True)
        points = points - middle
        squares = (points[..., :, None] * points[..., None, :]).flatten(-2)
        dim = points.shape[-1]
        moments = coordinate_attention(queries, keys, torch.cat([points, squares], dim=-1), backend=backend)
        mean, second = moments[..., :dim], moments[..., dim:].unflatten(-1, (dim, dim))
        return mean + middle, second - mean[..., :, None] * mean[..., None, :]


def _choose(queries: Tensor, coords: Tensor | Grid, bound: float | None) -> str:
    device = queries.device
    half = torch.is_autocast_enabled(device.type) or queries.dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or queries.dtype == torch.float64:
        return "chunked"
    if not half or bound is None or not isinstance(coords, Grid):
        return "fused"
    reason = fast.why_none(device.index or 0)
    if reason is None and bound <= _largest_bound():
        return KERNEL
    _say_once(reason or f"logits up to {bound:g} are too large for it")
    return "fused"


def _largest_bound() -> float:
    from carlreg.fast.attention import LARGEST_LOGIT

    return LARGEST_LOGIT


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("coordinate attention goes without its own kernel (%s): same answer, more slowly", reason)


def _check(queries: Tensor, keys: Tensor) -> None:
    for name, features in (("queries", queries), ("keys", keys)):
        if features.dim() != 3:
            raise InputError(f"{name} have shape {tuple(features.shape)}; expected (B, number, features)")
        if not features.is_floating_point():
            raise TypeError(f"{name} have dtype {features.dtype}; expected floating point")
    if queries.shape[0] != keys.shape[0] or queries.shape[2] != keys.shape[2]:
        raise InputError(
            f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}; "
            "expected the same batch size and feature length"
        )


def _positions(coords: Tensor | Grid, keys: Tensor) -> Tensor:
    """Positions as (1 or B, M, D)."""
    if isinstance(coords, Grid):
        coords = coords.points(keys.dtype, keys.device).reshape(-1, len(coords.shape))
    points = coords if coords.dim() == 3 else coords[None]
    if points.dim() != 3 or points.shape[1] != keys.shape[1] or points.shape[0] not in (1, keys.shape[0]):
        raise InputError(
            f"coords have shape {tuple(coords.shape)} for keys of shape {tuple(keys.shape)}; "
            f"expected one position per key, ({keys.shape[1]}, D)"
        )
    return points.to(keys.dtype)


def _as_grid(coords: Tensor | Grid, keys: Tensor) -> Grid:
    if not isinstance(coords, Grid):
        raise TypeError("the Triton kernels take positions as a Grid; expected a Grid, or another backend")
    if coords.count != keys.shape[1]:
        raise InputError(f"the grid has {coords.count} points for {keys.shape[1]} keys; expected as many")
    return coords


__all__ = ["attention_moments", "coordinate_attention", "scale_to_length"]
