"""Half precision for the networks, full precision for coordinates.

Networks follow `torch.autocast`, as other models do. `mixed_precision` switches it on where the hardware gains by it,
`full_precision` switches it off for arithmetic on coordinates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar, cast

import torch

from carlreg.errors import InputError

Precision = Literal["auto", "float32", "bfloat16"]
Function = TypeVar("Function", bound=Callable[..., Any])


def mixed_precision(device: torch.device, precision: Precision = "auto") -> AbstractContextManager[Any]:
    """A context in which networks run in bfloat16 or float32; "auto" is bfloat16 on NVIDIA GPUs that support it.

    >>> with mixed_precision(images.device):
    ...     phi = model(moving, fixed)
    """
    if precision not in ("auto", "float32", "bfloat16"):
        raise InputError(f"unknown precision {precision!r}; expected 'auto', 'float32' or 'bfloat16'")
    if precision == "auto":
        supported = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bfloat16" if supported else "float32"
    return nullcontext() if precision == "float32" else torch.autocast(device.type, torch.bfloat16)


def full_precision(function: Function) -> Function:
    """Decorator that switches autocast off during a function on coordinates."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return cast(Function, wrapped)
