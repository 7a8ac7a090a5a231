"""Coordinate attention in blocks: plain PyTorch, any device, memory linear in the number of voxels.

Blocks of logits are small enough to stay in the processor's cache. A running maximum keeps exp in range for any
features. The backward pass recomputes each block instead of storing it: with w = softmax(Q Kᵀ) and y = w·V, the
gradient of the logits is w · (g·V − g·y), where g is the gradient of y.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1024  # queries and keys in a block: 4 MiB of logits in float32


def chunked_attention(queries: Tensor, keys: Tensor, points: Tensor) -> Tensor:
    result: Tensor = _ChunkedAttention.apply(queries, keys, points)  # type: ignore[no-untyped-call]
    return result


def _blocks(count: int) -> list[slice]:
    return [slice(start, start + BLOCK) for start in range(0, count, BLOCK)]


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, points: Tensor) -> Tensor:
        points = points.expand(keys.shape[0], -1, -1)
        # A column of ones beside the positions gives the sum of the weights.
        values = F.pad(points, (0, 1), value=1.0)
        output = queries.new_empty(*queries.shape[:2], points.shape[2])
        log_norm = queries.new_empty(*queries.shape[:2], 1)
        for item in range(queries.shape[0]):
            for rows in _blocks(queries.shape[1]):
                query = queries[item, rows]
                top = query.new_full((len(query), 1), -torch.inf)
                total = query.new_zeros(len(query), values.shape[2])
                for columns in _blocks(keys.shape[1]):
                    logits = query @ keys[item, columns].mT
                    highest = torch.maximum(top, logits.amax(dim=1, keepdim=True))
                    weights = logits.sub_(highest).exp_()
                    total = total * (top - highest).exp() + weights @ values[item, columns]
                    top = highest
                output[item, rows] = total[:, :-1] / total[:, -1:]
                log_norm[item, rows] = top + total[:, -1:].log()
        ctx.save_for_backward(queries, keys, points, output, log_norm)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (gradient,) = gradients
        queries, keys, points, output, log_norm = ctx.saved_tensors
        query_gradient, key_gradient = torch.zeros_like(queries), torch.zeros_like(keys)
        point_gradient = torch.zeros_like(points) if ctx.needs_input_grad[2] else None
        centre = (gradient * output).sum(dim=-1, keepdim=True)  # g·y
        for item in range(queries.shape[0]):
            for rows in _blocks(queries.shape[1]):
                query, upstream = queries[item, rows], gradient[item, rows]
                for columns in _blocks(keys.shape[1]):
                    key = keys[item, columns]
                    weights = (query @ key.mT).sub_(log_norm[item, rows]).exp_()
                    if point_gradient is not None:
                        point_gradient[item, columns] += weights.mT @ upstream
                    weights *= upstream @ points[item, columns].mT - centre[item, rows]
                    query_gradient[item, rows] += weights @ key
                    key_gradient[item, columns] += weights.mT @ query
        return query_gradient, key_gradient, point_gradient
