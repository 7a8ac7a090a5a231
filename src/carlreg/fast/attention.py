"""Which backend computes coordinate attention, and PyTorch's fused attention as one of them."""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from carlreg import fast

logger = logging.getLogger(__name__)

LARGEST_LOGIT = 64.0
"""Above this, a sum of exp without a running maximum could overflow float32 in the Triton kernels."""
LINEAR_MEMORY = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""All of PyTorch's implementations but the one that holds the matrix of all pairs."""


def choose_backend(queries: Tensor, *, on_grid: bool, bound: float | None) -> str:
    """Use "chunked" on a CPU and in float64, "triton" on a GPU for half-precision queries whose keys lie on a Grid and
    whose logits are bounded, and "fused" for other queries on a GPU."""
    device = queries.device
    if device.type != "cuda" or queries.dtype == torch.float64:
        return "chunked"
    half = torch.is_autocast_enabled(device.type) or queries.dtype in (torch.bfloat16, torch.float16)
    if not half or not on_grid or bound is None:
        return "fused"
    reason = fast.why_not(device.index or 0)
    if reason is None and bound > LARGEST_LOGIT:
        reason = f"logits up to {bound:g} exceed {LARGEST_LOGIT:g}"
    if reason is None:
        return "triton"
    _warn_once(reason)
    return "fused"


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("coordinate attention runs without its own kernel (%s): same result, more slowly", reason)


def fused_attention(queries: Tensor, keys: Tensor, points: Tensor) -> Tensor:
    """softmax(Q Kᵀ) · points by PyTorch's fused attention."""
    dim = points.shape[-1]
    # The fast implementations require values as wide as the features, and a width that is a multiple of 8.
    width = -(-queries.shape[-1] // 8) * 8
    queries, keys = (F.pad(features, (0, width - features.shape[-1])).contiguous() for features in (queries, keys))
    values = F.pad(points, (0, width - dim)).expand(keys.shape[0], -1, -1)
    with sdpa_kernel(LINEAR_MEMORY):
        output = F.scaled_dot_product_attention(queries[:, None], keys[:, None], values[:, None], scale=1.0)
    return output[:, 0, :, :dim]
