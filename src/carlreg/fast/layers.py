"""Replacements for layers of a network, faster on a GPU: the plain layer, or a kernel or matrix product in its place.

Features (B, C, *shape) are kept in channels-last memory format on a GPU, where convolutions are fastest.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carlreg import fast

# ---- memory format --------------------------------------------------------------------------------------------------


class ChannelsLast(nn.Module):
    """Base class that keeps convolution weights in channels-last memory format."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ChannelsLast:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for weight in self.parameters():
            if weight.dim() > 3:
                weight.data = channels_last(weight.data)
        return self


def channels_last(features: Tensor) -> Tensor:
    """The same values in channels-last memory format, on a GPU. PyTorch has that for 2-D and 3-D features."""
    if not features.is_cuda or features.dim() == 3:
        return features
    return features.contiguous(memory_format=torch.channels_last if features.dim() == 4 else torch.channels_last_3d)


def network_input(image: Tensor) -> Tensor:
    """Convert an image to autocast's type, so that shortcuts have it as well, and to channels-last memory format."""
    kind = image.device.type
    return channels_last(image.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else image)


def _kernels_take(features: Tensor) -> bool:
    """Whether these features are what the kernels are written for: half precision, channels last."""
    half = features.dtype in (torch.bfloat16, torch.float16)
    return half and features.dim() > 3 and features.movedim(1, -1).is_contiguous() and fast.runs_on(features)


# ---- normalisation and convolution ----------------------------------------------------------------------------------


def normalize(norm: Any, features: Tensor) -> Tensor:
    """norm(features) for batch normalisation, with statistics in float32 whatever the features' type is."""
    with torch.autocast(features.device.type, enabled=False):
        if norm.training:
            features = channels_last(features)
            if _kernels_take(features):
                from carlreg.fast.kernels import channels

                return channels.batch_norm(features, norm)
            return norm(features.to(norm.weight.dtype)).to(features.dtype)
        # With fixed statistics it is an affine map, whose gradients are plain sums.
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        shift = norm.bias - norm.running_mean * scale
        shape = (1, -1) + (1,) * (features.dim() - 2)
        return torch.addcmul(shift.reshape(shape), features, scale.reshape(shape)).to(features.dtype)


def convolve(layer: Any, features: Tensor, *, add: Tensor | None = None, relu: bool = False) -> Tensor:
    """layer(features), add + layer(features) or relu(layer(features)); kernels do the last step along with the bias."""
    if _kernels_take(features):
        from carlreg.fast.kernels import channels

        if layer.in_channels < 8 and layer.dilation[0] == 1:  # cuDNN is slow for few channels
            change = convolve_patches(features, layer.weight)
        else:
            change = channels_last(layer._conv_forward(features, layer.weight, None))
        return channels.add_bias(change, layer.bias, other=add if add is None else channels_last(add), relu=relu)
    change = layer(features)
    if add is not None:
        change = add + change
    return change.relu() if relu else change


def convolve_patches(features: Tensor, weight: Tensor) -> Tensor:
    """A convolution of kernel 3 without bias, as one matrix product whose rows are voxel neighbourhoods."""
    dim = features.dim() - 2
    neighbours = F.pad(features, (1, 1) * dim)
    for axis in range(2, dim + 2):
        neighbours = neighbours.unfold(axis, 3, 1)  # (B, C, *shape, 3, ...)
    taps = weight[0].numel()
    missing = -taps % 32  # aligns rows in memory
    patches = features.new_zeros(len(features), *features.shape[2:], taps + missing)
    patches[..., :taps].unflatten(-1, weight.shape[1:]).copy_(neighbours.movedim(1, dim + 1))
    return F.linear(patches, F.pad(weight.flatten(1), (0, missing))).movedim(-1, 1)


def convolve_to_few(layer: Any, features: Tensor) -> Tensor:
    """layer(features) for a convolution of kernel 3 to few channels, where cuDNN is slow."""
    return convolve_groups(layer, features) if features.is_cuda else layer(features)


def convolve_groups(layer: Any, features: Tensor, size: int = 4) -> Tensor:
    """layer(features), with `size` voxels along the last axis taken as one voxel with `size` times the channels: the
    same sums, in shapes that suit matrix units."""
    weight, outputs, inputs = layer.weight, layer.out_channels, layer.in_channels
    taps = _taps_of_groups(size, weight.dtype, weight.device)  # (taps, voxel in, voxel out, group)
    big = torch.tensordot(weight, taps, dims=1).movedim((-2, -3), (0, 2))  # (voxel out, O, voxel in, I, ..., group)
    big = big.reshape(size * outputs, size * inputs, *weight.shape[2:])
    missing = -len(big) % 8
    big = F.pad(big, (0, 0) * (big.dim() - 1) + (0, missing))
    bias = F.pad(layer.bias.repeat(size), (0, missing))

    side = features.shape[-1]
    voxels = F.pad(features, (0, -side % size)).movedim(1, -1)  # (B, *shape, C)
    groups = voxels.reshape(*voxels.shape[:-2], -1, size * inputs).movedim(-1, 1)
    convolution = (F.conv1d, F.conv2d, F.conv3d)[features.dim() - 3]
    result = convolution(groups, channels_last(big), bias, padding=1).movedim(1, -1)[..., : size * outputs]
    return result.reshape(*voxels.shape[:-1], outputs)[..., :side, :].movedim(-1, 1)


@functools.cache
def _taps_of_groups(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 where a tap leads from a voxel of a group to a voxel of the previous, the same or the next group."""
    taps = torch.zeros(3, size, size, 3)
    for voxel, tap in itertools.product(range(size), range(3)):
        group, neighbour = divmod(voxel + tap - 1, size)
        taps[tap, neighbour, voxel, group + 1] = 1
    return taps.to(device, dtype)


# ---- upsampling -----------------------------------------------------------------------------------------------------


def fused_up_step(layer: Any, change: Tensor, shortcut: Tensor) -> Tensor | None:
    """layer(change) plus the enlarged shortcut in one kernel, for a transposed convolution of kernel 4 and stride 2 in
    3-D; None where the kernel does not run or cuDNN is faster."""
    outputs = layer.out_channels
    if shortcut.dim() != 5 or _is_small(shortcut) or outputs > shortcut.shape[1] or not _kernels_take(shortcut):
        return None
    from carlreg.fast.kernels import upsampling

    return upsampling.up_step(change, shortcut, layer.weight, layer.bias)


def transposed_convolve(layer: Any, features: Tensor) -> Tensor:
    """layer(features) for a transposed convolution of kernel 4 and stride 2, on small grids on a GPU with gradients as
    matrix products, which are many times faster there than cuDNN."""
    if not (features.is_cuda and _is_small(features) and torch.is_grad_enabled()):
        return layer(features)
    kind = features.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features.dtype
    with torch.autocast(kind, enabled=False):
        inputs = features.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype)
        return _TransposedConvolution.apply(*inputs)  # type: ignore[no-untyped-call]


class _TransposedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(features, weight)
        transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[features.dim() - 3]
        return transposed(features, weight, bias, stride=2, padding=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features, weight = ctx.saved_tensors
        (gradient,) = gradients
        dim = features.dim() - 2
        # Voxel i of the input reaches voxels 2i − 1 … 2i + 2 of the output.
        patches = F.pad(gradient, (1, 1) * dim)
        for axis in range(2, dim + 2):
            patches = patches.unfold(axis, 4, 2)
        patches = patches.movedim(1, dim + 1).flatten(dim + 1).flatten(0, dim)  # (B · voxels, outputs · 4^D)
        voxels = features.movedim(1, -1)  # (B, *shape, inputs)
        by_weight = voxels.flatten(0, dim).mT @ patches
        by_features = (patches @ weight.flatten(1).mT).reshape(voxels.shape).movedim(-1, 1)
        return by_features, by_weight.reshape(weight.shape), gradient.sum(dim=[0, *range(2, dim + 2)])


def _is_small(features: Tensor) -> bool:
    """Whether the grid is so small that matrix products are faster than cuDNN's convolutions."""
    return features.shape[2:].numel() <= 16**3
