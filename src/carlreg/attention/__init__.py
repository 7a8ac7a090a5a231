"""Coordinate attention: every query takes the centre of mass of its attention over the keys' positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from carlreg.attention.chunked import chunked_attention
from carlreg.attention.reference import reference_attention
from carlreg.grids import Grid

Backend = Callable[[Tensor, Tensor, Tensor], Tensor]

BACKENDS: dict[str, Backend] = {"chunked": chunked_attention, "reference": reference_attention}


def coordinate_attention(queries: Tensor, keys: Tensor, coords: Tensor | Grid, *, backend: str = "auto") -> Tensor:
    """softmax(Q Kᵀ) · coords, without ever holding the matrix of all pairs.

    queries (B, N, C) and keys (B, M, C) are feature vectors; coords, a Grid of M points or a tensor (M, D) or
    (B, M, D), says where the keys are. The result (B, N, D) is where each query's match lies: a convex combination of
    the keys' positions, in float32 at least, also under autocast. Backends differ in speed alone; "reference" does
    hold the matrix and is there for tests.
    """
    _check(queries, keys)
    if backend == "auto":
        backend = "chunked"
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; expected 'auto' or one of {sorted(BACKENDS)}")
    # Half-precision features are fine, half-precision coordinates are not: bfloat16 is off by up to 1/256 of the image.
    precise = torch.promote_types(queries.dtype, torch.float32)
    with torch.autocast(queries.device.type, enabled=False):
        queries, keys = queries.to(precise), keys.to(precise)
        return BACKENDS[backend](queries, keys, _positions(coords, keys))


def _check(queries: Tensor, keys: Tensor) -> None:
    for name, features in (("queries", queries), ("keys", keys)):
        if features.dim() != 3:
            raise ValueError(f"{name} have shape {tuple(features.shape)}; expected (B, number, features)")
        if not features.is_floating_point():
            raise TypeError(f"{name} have dtype {features.dtype}; expected floating point")
    if queries.shape[0] != keys.shape[0] or queries.shape[2] != keys.shape[2]:
        raise ValueError(
            f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}; "
            "expected the same batch size and feature length"
        )


def _positions(coords: Tensor | Grid, keys: Tensor) -> Tensor:
    """Positions as (1 or B, M, D)."""
    if isinstance(coords, Grid):
        coords = coords.points(keys.dtype, keys.device).reshape(-1, len(coords.shape))
    points = coords if coords.dim() == 3 else coords[None]
    if points.dim() != 3 or points.shape[1] != keys.shape[1] or points.shape[0] not in (1, keys.shape[0]):
        raise ValueError(
            f"coords have shape {tuple(coords.shape)} for keys of shape {tuple(keys.shape)}; "
            f"expected one position per key, ({keys.shape[1]}, D)"
        )
    return points


__all__ = ["coordinate_attention"]
