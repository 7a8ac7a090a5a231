"""Layers that the encoder and the U-Net share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carlreg import fast
from carlreg.errors import InputError
from carlreg.fast.convolution import conv_by_patches
from carlreg.fast.precision import channels_last


def check_dimension(dim: int) -> int:
    if dim not in (1, 2, 3):
        raise InputError(f"dim is {dim!r}; expected 1, 2 or 3")
    return dim


def conv(dim: int) -> type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]:
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1]


def transposed_conv(dim: int) -> type[nn.ConvTranspose1d] | type[nn.ConvTranspose2d] | type[nn.ConvTranspose3d]:
    return (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dim - 1]


def batch_norm(dim: int) -> type[nn.BatchNorm1d] | type[nn.BatchNorm2d] | type[nn.BatchNorm3d]:
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dim - 1]


class Network(nn.Module):
    """A module whose convolutions lie in a GPU's memory as its convolutions like them, channels last."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Network:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for weight in self.parameters():
            if weight.dim() > 3:
                weight.data = channels_last(weight.data)
        return self


def normalize(norm: Any, features: Tensor) -> Tensor:
    """Batch normalisation with statistics in float32, whatever the features are in."""
    with torch.autocast(features.device.type, enabled=False):
        if norm.training:
            features = channels_last(features)
            if fast.take(features):
                from carlreg.fast import channels

                return channels.batch_norm(features, norm)
            return norm(features.to(norm.weight.dtype)).to(features.dtype)
        # With fixed statistics it is an affine map, and its gradients are plain sums.
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        shift = norm.bias - norm.running_mean * scale
        shape = (1, -1) + (1,) * (features.dim() - 2)
        return torch.addcmul(shift.reshape(shape), features, scale.reshape(shape)).to(features.dtype)


def convolve(layer: Any, features: Tensor, *, add: Tensor | None = None, relu: bool = False) -> Tensor:
    """layer(features), then plus `add` or ReLU: with the bias, in one pass, where kernels can."""
    if fast.take(features):
        from carlreg.fast import channels

        if layer.in_channels < 8 and layer.dilation[0] == 1:  # cuDNN is slow where channels are few
            change = conv_by_patches(features, layer.weight)
        else:
            change = channels_last(layer._conv_forward(features, layer.weight, None))
        return channels.add_bias(change, layer.bias, other=add if add is None else channels_last(add), relu=relu)
    change = layer(features)
    if add is not None:
        change = add + change
    return change.relu() if relu else change


def fit_channels(features: Tensor, channels: int) -> Tensor:
    """Drop the last channels, or put channels of zeros in front."""
    missing = channels - features.shape[1]
    if missing <= 0:
        return features[:, :channels]
    return F.pad(features, (0, 0) * (features.dim() - 2) + (missing, 0))
