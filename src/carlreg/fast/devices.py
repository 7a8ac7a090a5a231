"""Choosing a device by name."""

from __future__ import annotations

import torch

from carlreg.errors import InputError


def choose_device(device: str | torch.device) -> torch.device:
    """A device by name; 'auto' is the GPU, where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"unknown device {device!r}; expected 'auto', 'cpu', 'cuda', 'cuda:0' or 'mps'") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device is {device!r}, but PyTorch sees no CUDA GPU here; expected 'cpu' or 'auto'")
    return place
