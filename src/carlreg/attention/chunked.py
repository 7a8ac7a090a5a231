"""Coordinate attention a few queries at a time: plain PyTorch, any device, memory linear in the number of voxels.

The backward pass computes each block of the matrix again instead of keeping it. With w = softmax(Q Kᵀ) and
y = w·V, the gradient of the logits is w · (g·V − g·y), where g is the gradient of y.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 22
"""Logits held at a time: 16 MiB in float32, which stays near the processor's caches."""


def chunked_attention(queries: Tensor, keys: Tensor, points: Tensor) -> Tensor:
    result: Tensor = _ChunkedAttention.apply(queries, keys, points)  # type: ignore[no-untyped-call]
    return result


def _blocks(queries: Tensor, keys: Tensor) -> Iterator[tuple[int, slice]]:
    rows = max(1, BLOCK_ELEMENTS // keys.shape[1])
    for item in range(queries.shape[0]):
        for start in range(0, queries.shape[1], rows):
            yield item, slice(start, start + rows)


def _weights(queries: Tensor, keys: Tensor) -> Tensor:
    return torch.softmax(queries @ keys.mT, dim=-1)


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, points: Tensor) -> Tensor:
        points = points.expand(keys.shape[0], -1, -1)
        output = queries.new_empty(*queries.shape[:2], points.shape[2])
        for item, rows in _blocks(queries, keys):
            output[item, rows] = _weights(queries[item, rows], keys[item]) @ points[item]
        ctx.save_for_backward(queries, keys, points, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (gradient,) = gradients
        queries, keys, points, output = ctx.saved_tensors
        query_gradient, key_gradient = torch.empty_like(queries), torch.zeros_like(keys)
        point_gradient = torch.zeros_like(points) if ctx.needs_input_grad[2] else None
        centre = (gradient * output).sum(dim=-1, keepdim=True)  # g·y
        for item, rows in _blocks(queries, keys):
            weights = _weights(queries[item, rows], keys[item])
            upstream = gradient[item, rows]
            if point_gradient is not None:
                point_gradient[item] += weights.mT @ upstream
            logits_gradient = weights * (upstream @ points[item].mT - centre[item, rows])
            query_gradient[item, rows] = logits_gradient @ keys[item]
            key_gradient[item] += logits_gradient.mT @ queries[item, rows]
        return query_gradient, key_gradient, point_gradient
