"""Coordinate attention through PyTorch's fused attention: for GPUs where the Triton kernels do not run."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

LINEAR_MEMORY = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""All but the one that holds the matrix of all pairs."""


def fused_attention(queries: Tensor, keys: Tensor, points: Tensor) -> Tensor:
    dim = points.shape[-1]
    # Values as wide as the features: with fewer, the fast kernels are not used. A multiple of 8, as they ask for.
    width = -(-queries.shape[-1] // 8) * 8
    queries, keys = (F.pad(features, (0, width - features.shape[-1])).contiguous() for features in (queries, keys))
    values = F.pad(points, (0, width - dim)).expand(keys.shape[0], -1, -1)
    with sdpa_kernel(LINEAR_MEMORY):
        output = F.scaled_dot_product_attention(queries[:, None], keys[:, None], values[:, None], scale=1.0)
    return output[:, 0, :, :dim]
