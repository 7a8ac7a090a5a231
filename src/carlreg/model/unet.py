"""The U-Net that predicts displacements, Ψ."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carlreg.errors import InputError
from carlreg.fast import layers as fast
from carlreg.geometry.grids import enlarge, pool
from carlreg.model.layers import batch_norm, check_dimension, conv, fit_channels, transposed_conv


class UNet(fast.ChannelsLast):
    """The refinement network: two images in, D numbers per voxel out.

    Strided convolutions go down and transposed ones up, each beside a shortcut that pools or enlarges its input. The
    last convolution starts at zero, so that a new step changes nothing until it is trained.
    """

    def __init__(
        self,
        dim: int,
        channels: int = 1,
        down: Sequence[int] = (16, 32, 64, 256, 512),
        up: Sequence[int] = (256, 128, 64, 32, 16),
    ) -> None:
        super().__init__()
        if len(down) != len(up):
            raise InputError(f"down has {len(down)} levels but up has {len(up)}; expected the same number")
        self.dim, self.channels, self.down, self.up = check_dimension(dim), channels, tuple(down), tuple(up)
        inputs = (2 * channels, *down)
        self.down_convs = nn.ModuleList(
            conv(dim)(wide, narrow, 3, stride=2, padding=1) for wide, narrow in itertools.pairwise(inputs)
        )
        # On the way up, a level's input is the level below, concatenated with the skip of the same size.
        skips = inputs[-2::-1]
        widths = (down[-1], *(width + skip for width, skip in zip(up, skips, strict=True)))
        self.up_convs = nn.ModuleList(
            transposed_conv(dim)(wide, narrow, 4, stride=2, padding=1)
            for wide, narrow in zip(widths[:-1], up, strict=True)
        )
        self.norms = nn.ModuleList(batch_norm(dim)(width) for width in up)
        self.last = conv(dim)(widths[-1], dim, 3, padding=1)
        nn.init.zeros_(self.last.weight)
        if self.last.bias is not None:
            nn.init.zeros_(self.last.bias)

    def forward(self, moving: Tensor, fixed: Tensor) -> Tensor:  # two (B, C, *shape) → (B, D, *shape)
        features = fast.network_input(torch.cat([moving, fixed], dim=1))
        skips = []
        for layer in self.down_convs:
            skips.append(features)
            change = layer(F.leaky_relu(features))
            features = change + fit_channels(pool(features), change.shape[1])
        for layer, norm in zip(self.up_convs, self.norms, strict=True):
            skip = skips.pop()
            inside = (slice(None), slice(None), *(slice(n) for n in skip.shape[2:]))
            features = torch.cat([fast.normalize(norm, up_step(layer, features))[inside], skip], dim=1)
        return fast.convolve_to_few(self.last, features) / 10


def up_step(layer: Any, features: Tensor) -> Tensor:
    """Double the voxels per axis: a transposed convolution beside a shortcut."""
    change = F.leaky_relu(features)
    fused = fast.fused_up_step(layer, change, features)
    if fused is not None:
        return fused
    return fast.transposed_convolve(layer, change) + enlarge(fit_channels(features, layer.out_channels))
