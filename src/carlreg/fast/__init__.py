"""Triton kernels for what PyTorch does in many passes over memory. Each has a plain expression beside it where it is
used, which other devices take: the same answer, more slowly."""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch
from torch import Tensor


def run_on(tensor: Tensor) -> bool:
    """Whether kernels can work on this tensor: on an NVIDIA GPU, where Triton is present."""
    return tensor.is_cuda and why_none(tensor.device.index or 0) is None


def take(features: Tensor) -> bool:
    """Whether kernels were made for these features (B, C, *shape): in half precision, channels last in memory,
    which PyTorch has in 2-D and 3-D."""
    half = features.dtype in (torch.bfloat16, torch.float16)
    return half and features.dim() > 3 and features.movedim(1, -1).is_contiguous() and run_on(features)


def sample(values: Tensor, points: Tensor) -> bool:
    """Whether kernels interpolate these values (B, C, *shape) at these points (B, ..., D): a few channels in float32.
    Their gradients are added up in no particular order."""
    single = values.dtype == points.dtype == torch.float32 and values.device == points.device
    few = 0 < values.shape[1] <= 4 and values.numel() > 0 and points.numel() > 0
    return single and few and not torch.are_deterministic_algorithms_enabled() and run_on(values)


@functools.cache
def why_none(device: int) -> str | None:
    """What keeps that GPU from running kernels, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    version: str = importlib.import_module("triton").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 2):
        return f"Triton {version} is too old for it"
    if torch.version.hip is not None:
        return "it was written for NVIDIA GPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is too old for it"
    return None
