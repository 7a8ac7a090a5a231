"""A network that recognises anatomical structures, in any contrast: the probability of each at every voxel.

It is not part of the package, nor of the paper: README.md tells what came of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carlreg.fast import layers as fast
from carlreg.model.layers import check_dimension, conv

SIDED = (
    "cerebral white matter",
    "cerebral cortex",
    "lateral ventricle",
    "cerebellar white matter",
    "cerebellar cortex",
    "thalamus",
    "caudate",
    "putamen",
    "pallidum",
    "hippocampus",
    "amygdala",
    "accumbens",
    "ventral diencephalon",
)
"""Structures of the brain that have a left and a right side."""
STRUCTURES = (
    *(f"{side} {name}" for name in SIDED for side in ("left", "right")),
    *("third ventricle", "fourth ventricle", "brain stem"),
    *("right ventricle of the heart", "myocardium", "left ventricle of the heart"),
    *("spleen", "right kidney", "left kidney", "gallbladder", "oesophagus", "liver", "stomach", "aorta"),
    *("inferior vena cava", "portal and splenic veins", "pancreas", "right adrenal", "left adrenal"),
    *("anterior hippocampus", "posterior hippocampus"),
)
"""Structures that the network knows; in label maps, structure n of this list has the value n + 1."""
WIDTHS = (24, 48, 80, 96, 96)


class StructureNet(fast.ChannelsLast):
    """A U-Net: (B, 1, *shape) → logits (B, 1 + structures, *shape), of the background and of each structure.

    Every level halves the resolution. Features are normalised for each image, so that what they mean does not depend
    on the other images of a batch, nor on an image's contrast. Skips are added, not concatenated, and the finest grid
    has two convolutions only, since most of the work is there.
    """

    def __init__(self, dim: int, structures: int, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.dim, self.structures, self.widths = check_dimension(dim), structures, tuple(widths)
        make = conv(dim)
        self.down = nn.ModuleList([nn.Sequential(_Layer(dim, 1, widths[0]))])
        for before, width in itertools.pairwise(widths):
            self.down.append(nn.Sequential(_Layer(dim, before, width, stride=2), _Layer(dim, width, width)))
        steps = [*itertools.pairwise(reversed(widths))]
        self.narrow = nn.ModuleList(make(below, width, 1) for below, width in steps)
        self.up = nn.ModuleList(_Layer(dim, width, width) for _, width in steps)
        self.last = make(widths[0], 1 + structures, 1)

    def forward(self, image: Tensor) -> Tensor:
        features, skips = fast.network_input(image), []
        for level in self.down:
            features = level(features)
            skips.append(features)
        skips.pop()
        for narrow, layer in zip(self.narrow, self.up, strict=True):
            skip = skips.pop()
            larger = F.interpolate(narrow(features), scale_factor=2.0, mode="nearest")
            inside = (slice(None), slice(None), *(slice(n) for n in skip.shape[2:]))
            features = layer(skip + larger[inside])
        return self.last(features)


class _Layer(nn.Module):
    """A convolution, a normalisation of every image and channel, and a leaky ReLU."""

    def __init__(self, dim: int, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = conv(dim)(before, width, 3, stride=stride, padding=1, bias=False)
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, features: Tensor) -> Tensor:
        if features.is_cuda and features.shape[1] == 1:  # cuDNN is slow for few channels
            features = fast.channels_last(fast.convolve_patches(features, self.conv.weight.to(features.dtype)))
        else:
            features = self.conv(features)
        axes, exact = tuple(range(2, features.dim())), features.float()
        mean = exact.mean(axes, keepdim=True)
        spread = (exact - mean).square().mean(axes, keepdim=True)
        column = (1, -1) + (1,) * len(axes)
        factor = self.scale.reshape(column) * (spread + 1e-5).rsqrt()
        return F.leaky_relu((exact - mean) * factor + self.shift.reshape(column), 0.01).to(features.dtype)


def mirrored(labels: Tensor) -> Tensor:
    """Label maps of a mirrored brain: left structures become right ones."""
    swapped = torch.arange(256, device=labels.device)
    sided = 2 * len(SIDED)
    swapped[1 : 1 + sided] = torch.arange(1, 1 + sided, device=labels.device).unflatten(0, (-1, 2)).flip(1).flatten()
    return swapped[labels.long()].to(labels.dtype)
