"""Checks of input tensors. Each message shows what was given, what was expected, and what to do."""

import torch
from torch import Tensor

from carlreg.errors import InputError


def check_image(image: Tensor, name: str = "image") -> None:
    """Require a floating-point tensor (B, C, *shape) with one to three spatial axes."""
    if not isinstance(image, Tensor):
        raise TypeError(f"{name} is a {type(image).__name__}; expected a torch.Tensor of shape (B, C, *shape)")
    if not 3 <= image.dim() <= 5:
        expected = "(B, C, *shape) with 1 to 3 spatial axes: add the batch and channel axes with image[None, None]"
        raise InputError(f"{name} has shape {tuple(image.shape)}; expected {expected}")
    if not image.is_floating_point():
        raise TypeError(f"{name} has dtype {image.dtype}; expected floating point: convert it with {name}.float()")
    if 0 in image.shape:
        raise InputError(f"{name} has shape {tuple(image.shape)}; no axis may be empty")


def check_finite(image: Tensor, name: str = "image") -> None:
    """Refuse NaN and infinity. This synchronises with the device, so only outermost calls do it."""
    if image.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # a CUDA graph cannot read values back; the warm-up call before it was checked
    if bad := int((~torch.isfinite(image)).sum()):
        expected = "finite intensities: replace them, for example with torch.nan_to_num"
        raise InputError(f"{name} has {bad} non-finite values out of {image.numel()}; expected {expected}")


def check_pair(moving: Tensor, fixed: Tensor) -> None:
    """Require two images that differ in nothing but shape."""
    check_image(moving, "moving")
    check_image(fixed, "fixed")
    if moving.dim() != fixed.dim():
        raise InputError(
            f"moving is {moving.dim() - 2}-D but fixed is {fixed.dim() - 2}-D; expected the same dimension"
        )
    for what, mine, other in zip(("batch size", "number of channels"), moving.shape, fixed.shape, strict=False):
        if mine != other:
            raise InputError(f"moving has {what} {mine} but fixed has {other}; expected the same {what}")
    if moving.dtype != fixed.dtype or moving.device != fixed.device:
        both = f"moving is {moving.dtype} on {moving.device} but fixed is {fixed.dtype} on {fixed.device}"
        raise InputError(f"{both}; expected the same: use moving = moving.to(fixed)")


def check_same_shape(first: Tensor, second: Tensor, names: tuple[str, str]) -> None:
    if first.shape != second.shape:
        shapes = f"{names[0]} has shape {tuple(first.shape)} but {names[1]} has {tuple(second.shape)}"
        raise InputError(f"{shapes}; expected the same")
