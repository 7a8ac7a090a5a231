"""Layers by dimension, as the encoder and the U-Net use them."""

import torch.nn.functional as F
from torch import Tensor, nn

from carlreg.errors import InputError


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


def fit_channels(features: Tensor, channels: int) -> Tensor:
    """Drop the last channels, or prepend channels of zeros."""
    missing = channels - features.shape[1]
    if missing <= 0:
        return features[:, :channels]
    return F.pad(features, (0, 0) * (features.dim() - 2) + (missing, 0))
