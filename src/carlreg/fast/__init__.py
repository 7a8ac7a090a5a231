"""Code that exists only for speed on a GPU. Everything here has a plain expression that gives the same result.

`sample` and `local_correlation` return None where their kernels do not run, and the caller then evaluates the plain
expression. `layers` has replacements for layers of a network, `attention` chooses the backend of coordinate attention.
Triton is imported only where a kernel runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor


def runs_on(tensor: Tensor) -> bool:
    """Whether the kernels can run on this tensor's device: an NVIDIA GPU, with Triton installed."""
    return tensor.is_cuda and why_not(tensor.device.index or 0) is None


@functools.cache
def why_not(device: int) -> str | None:
    """Why that GPU cannot run the kernels, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    version: str = importlib.import_module("triton").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 2):
        return f"Triton {version} is older than 3.2"
    if torch.version.hip is not None:
        return "it was written for NVIDIA GPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has a compute capability below 8.0"
    return None


@functools.cache
def wake(device: torch.device) -> None:
    """Load the libraries of a GPU, which takes about a second: in a thread, it can be done while scans are read."""
    if device.type != "cuda":
        return
    image = torch.ones(1, 1, 8, 8, 8, device=device)
    torch.nn.functional.conv3d(image.bfloat16(), image[..., :3, :3, :3].bfloat16())
    image.flatten(2) @ image.flatten(2).mT
    sample(image, torch.full((1, 8, 3), 0.5, device=device))


def descends_on(image: Tensor) -> bool:
    """Whether `kernels.descent` takes images like this one."""
    return image.dtype == torch.float32 and runs_on(image)


def sample(values: Tensor, points: Tensor, *, mirror: bool = False, add: bool = False) -> Tensor | None:
    """`kernels.sampling.sample` for up to four channels in float32, else None.

    Its gradients are not deterministic: they are summed in no fixed order.
    """
    single = values.dtype == points.dtype == torch.float32 and values.device == points.device
    few = 0 < values.shape[1] <= 4 and values.numel() > 0 and points.numel() > 0
    if not (single and few and not torch.are_deterministic_algorithms_enabled() and runs_on(values)):
        return None
    from carlreg.fast.kernels import sampling

    return sampling.sample(values, points, mirror=mirror, add=add)


def local_correlation(first: Tensor, second: Tensor, blur: Callable[[Tensor], Tensor], epsilon: float) -> Tensor | None:
    """`kernels.correlation.local_correlation` of images in float32, else None."""
    if not (first.dtype == second.dtype == torch.float32 and runs_on(first)):
        return None
    from carlreg.fast.kernels import correlation

    return correlation.local_correlation(first, second, blur, epsilon)
