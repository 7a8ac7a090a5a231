"""Choosing a device by name."""

from __future__ import annotations

import torch

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
