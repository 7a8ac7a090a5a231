"""Choosing a device by name, and its memory."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carlreg.errors import InputError


def choose_device(name: str | torch.device) -> torch.device:
    """The device of that name; 'auto' is the GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"unknown device {name!r}; expected 'auto', 'cpu', 'cuda', 'cuda:0' or 'mps'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device is {name!r}, but PyTorch finds no CUDA GPU; expected 'cpu' or 'auto'")
    return device


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which the GPU of a tensor is the current one, whose streams are used."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def available_memory(device: torch.device) -> float:
    """Bytes that can still be allocated; infinity where that is unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return math.inf
