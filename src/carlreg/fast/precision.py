"""Where half precision pays and where it must not reach.

Convolutions and attention's features may be in half precision; coordinates may not. The networks follow
`torch.autocast`, as other models do; `mixed_precision` switches it on where the hardware gains by it, and
`full_precision` keeps it away from arithmetic on coordinates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from carlreg.errors import InputError

Precision = Literal["auto", "float32", "bfloat16"]
Function = TypeVar("Function", bound=Callable[..., Any])


def mixed_precision(device: torch.device, precision: Precision = "auto") -> AbstractContextManager[Any]:
    """A context in which networks run in bfloat16: "auto" on NVIDIA GPUs that have it, and in float32 elsewhere.

    >>> with mixed_precision(images.device):
    ...     phi = model(moving, fixed)
    """
    if precision not in ("auto", "float32", "bfloat16"):
        raise InputError(f"unknown precision {precision!r}; expected 'auto', 'float32' or 'bfloat16'")
    if precision == "auto":
        precision = (
            "bfloat16"
            if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            else "float32"
        )
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def full_precision(function: Function) -> Function:
    """A function on coordinates, during which autocast is off."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return cast(Function, wrapped)


def network_input(image: Tensor) -> Tensor:
    """An image as a network wants it: in autocast's type, so that shortcuts are as well; on a GPU with channels last,
    where convolutions are fastest."""
    kind = image.device.type
    if torch.is_autocast_enabled(kind):
        image = image.to(torch.get_autocast_dtype(kind))
    return channels_last(image)


def channels_last(features: Tensor) -> Tensor:
    """The same values with the channels of a voxel beside each other in memory, on a GPU."""
    if not features.is_cuda or features.dim() == 3:
        return features
    return features.contiguous(memory_format=torch.channels_last if features.dim() == 4 else torch.channels_last_3d)
