"""Coordinate attention as the paper writes it, all pairs at once: the yardstick for the other backends."""

from __future__ import annotations

from torch import Tensor


def reference_attention(queries: Tensor, keys: Tensor, points: Tensor) -> Tensor:
    return (queries @ keys.mT).softmax(dim=-1) @ points  # centre of mass of softmax(Q Kᵀ)
