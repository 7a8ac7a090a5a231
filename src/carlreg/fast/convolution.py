"""Convolutions rewritten as matrix products, for shapes at which the GPU libraries are slow."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.fast.precision import channels_last


def up_conv(features: Tensor, layer: Any) -> Tensor:
    """A transposed convolution of kernel 4 and stride 2, with its gradients as matrix products: for small grids on a
    GPU, where cuDNN takes many times as long."""
    if not (features.is_cuda and is_small(features) and torch.is_grad_enabled()):
        return layer(features)
    kind = features.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features.dtype
    with torch.autocast(kind, enabled=False):
        inputs = features.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype)
        return _UpConv.apply(*inputs)  # type: ignore[no-untyped-call]


class _UpConv(torch.autograd.Function):
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


def conv_by_patches(features: Tensor, weight: Tensor) -> Tensor:
    """A convolution of kernel 3, without bias, as one product of matrices: every voxel's neighbourhood as a row."""
    dim = features.dim() - 2
    neighbours = F.pad(features, (1, 1) * dim)
    for axis in range(2, dim + 2):
        neighbours = neighbours.unfold(axis, 3, 1)  # (B, C, *shape, 3, ...)
    taps = weight[0].numel()
    missing = -taps % 32  # rows of a round number of bytes
    patches = features.new_zeros(len(features), *features.shape[2:], taps + missing)
    patches[..., :taps].unflatten(-1, weight.shape[1:]).copy_(neighbours.movedim(1, dim + 1))
    return F.linear(patches, F.pad(weight.flatten(1), (0, missing))).movedim(-1, 1)


def conv_in_groups(features: Tensor, layer: Any, size: int = 4) -> Tensor:
    """A convolution of kernel 3 over groups of `size` voxels along the last axis, each seen as one voxel with `size`
    times the channels: the same sums, in shapes that matrix units are made for."""
    weight, outputs, inputs = layer.weight, layer.out_channels, layer.in_channels
    place = _tap_places(size, weight.dtype, weight.device)  # (taps, voxel in, voxel out, group)
    big = torch.tensordot(weight, place, dims=1).movedim((-2, -3), (0, 2))  # (voxel out, O, voxel in, I, ..., group)
    big = big.reshape(size * outputs, size * inputs, *weight.shape[2:])
    missing = -len(big) % 8
    big = F.pad(big, (0, 0) * (big.dim() - 1) + (0, missing))
    bias = F.pad(layer.bias.repeat(size), (0, missing))

    side = features.shape[-1]
    voxels = F.pad(features, (0, -side % size)).movedim(1, -1)  # (B, *shape, C)
    groups = voxels.reshape(*voxels.shape[:-2], -1, size * inputs).movedim(-1, 1)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[features.dim() - 3]
    result = convolve(groups, channels_last(big), bias, padding=1).movedim(1, -1)[..., : size * outputs]
    return result.reshape(*voxels.shape[:-1], outputs)[..., :side, :].movedim(-1, 1)


@functools.cache
def _tap_places(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 where a tap, seen from one voxel of a group, meets a voxel of the group before, of its own, or after."""
    place = torch.zeros(3, size, size, 3)
    for voxel, tap in itertools.product(range(size), range(3)):
        group, neighbour = divmod(voxel + tap - 1, size)
        place[tap, neighbour, voxel, group + 1] = 1
    return place.to(device, dtype)


def is_small(features: Tensor) -> bool:
    """Whether the grid is so small that cuDNN's convolutions are slower than matrix products."""
    return features.shape[2:].numel() <= 16**3
