"""The convolutional network that turns voxels into feature vectors, Conv_θ of Ξθ."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carlreg.errors import InputError
from carlreg.fast.layers import ChannelsLast, channels_last, convolve, network_input, normalize
from carlreg.geometry.jacobian import determinant
from carlreg.model.layers import batch_norm, check_dimension, conv


class ResidualBlock(nn.Module):
    """Normalise the features, then add the output of a chain of dilated convolutions to them."""

    def __init__(self, dim: int, width: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.norm = batch_norm(dim)(width)
        self.convs = nn.ModuleList(conv(dim)(width, width, 3, padding="same", dilation=d) for d in dilations)

    def forward(self, features: Tensor) -> Tensor:
        features = normalize(self.norm, features)
        change = features
        for layer in self.convs[:-1]:
            change = convolve(layer, change, relu=True)
        return convolve(self.convs[-1], change, add=features)


class Handedness(nn.Module):
    """Add features that distinguish left from right: det(∇a, ∇b, ∇c) of channels a, b, c.

    Features that do not change when a body is rotated can encode how deep, how high and how far forward a point lies,
    but hardly on which side: the sides of a symmetric body differ by a reflection alone. The gradients of such features
    rotate with the body, so their determinant does not change; a reflection changes its sign. `count` determinants of D
    channels each are computed, from differences over `distance` voxels to either side, and mixed into all channels.
    """

    def __init__(self, dim: int, width: int, count: int, distance: int = 2) -> None:
        super().__init__()
        if dim * count > width:
            needed = f"{count} determinants of {dim} channels each need {dim * count} channels"
            raise InputError(f"{needed}; the encoder has {width}")
        self.dim, self.count, self.distance = dim, count, distance
        self.norm = batch_norm(dim)(count)
        self.mix = conv(dim)(count, width, 1)

    def forward(self, features: Tensor) -> Tensor:
        exact = torch.promote_types(features.dtype, torch.float32)
        parts = features[:, : self.dim * self.count].to(exact).unflatten(1, (self.count, self.dim)).movedim(2, -1)
        gradients = [_difference(parts, 2 + axis, self.distance) for axis in range(self.dim)]
        sides = normalize(self.norm, determinant(gradients))
        return channels_last(features + self.mix(sides.to(features.dtype)))


def _difference(values: Tensor, axis: int, distance: int) -> Tensor:
    """(v(x + d) − v(x − d)) / 2 along an axis, zeros beyond its ends."""
    ends = (0, 0) * (values.dim() - 1 - axis) + (distance, distance)
    padded, side = F.pad(values, ends), values.shape[axis]
    return (padded.narrow(axis, 2 * distance, side) - padded.narrow(axis, 0, side)) / 2


class Encoder(ChannelsLast):
    """Conv_θ of Ξθ: a feature vector for every voxel, at the image's own resolution, so integer shifts pass through.

    A voxel's features depend on its neighbours up to `reach` voxels away. `handed` is the number of determinants that
    `Handedness` adds to the features; the paper has none.
    """

    def __init__(
        self,
        dim: int,
        channels: int = 1,
        width: int = 128,
        blocks: int = 3,
        dilations: Sequence[int] = (1, 2, 4),
        handed: int = 0,
    ) -> None:
        super().__init__()
        self.dim, self.channels, self.width, self.handed = check_dimension(dim), channels, width, handed
        self.dilations = tuple(dilations)
        self.stem = conv(dim)(channels, width, 3, padding="same")
        self.blocks = nn.ModuleList(ResidualBlock(dim, width, self.dilations) for _ in range(blocks))
        self.sides = Handedness(dim, width, handed) if handed else None

    @property
    def reach(self) -> int:
        return 1 + len(self.blocks) * sum(self.dilations) + (self.sides.distance if self.sides else 0)

    def forward(self, image: Tensor) -> Tensor:  # (B, C, *shape) → (B, width, *shape)
        features = channels_last(convolve(self.stem, network_input(image), relu=True))
        for block in self.blocks:
            features = block(features)
        return features if self.sides is None else self.sides(features)


class Symmetrized(nn.Module):
    """An encoder averaged over a group of rotations of the grid: mean of g⁻¹ · Conv(g · image).

    "pi" is the group of half turns about the axes (4 with the identity in 3-D, 2 in 2-D), as in the paper; "quarter"
    is that of all rotations that map the voxel grid to itself (24 in 3-D, 4 in 2-D). The result commutes with each of
    them, so Ξθ becomes [W, U] equivariant to them.
    """

    def __init__(self, encoder: Encoder, group: Literal["pi", "quarter"] = "pi") -> None:
        super().__init__()
        if group not in ("pi", "quarter"):
            raise InputError(f"unknown rotation group {group!r}; expected 'pi' or 'quarter'")
        self.encoder, self.group = encoder, group
        self.dim, self.channels, self.width = encoder.dim, encoder.channels, encoder.width
        self.reach = encoder.reach

    def forward(self, image: Tensor) -> Tensor:
        rotations = list(axis_rotations(self.dim, self.group))
        rotated = [rotate_grid(image, *g) for g in rotations]
        if self.training and len({one.shape for one in rotated}) == 1:  # one batch is faster, but needs more memory
            features = self.encoder(torch.cat(rotated)).chunk(len(rotated))
        else:
            features = [self.encoder(one) for one in rotated]
        back = [unrotate_grid(part, *g) for part, g in zip(features, rotations, strict=True)]
        return torch.stack(back).mean(dim=0)  # mean of g⁻¹ · Conv(g · image)


Axes = tuple[int, ...]


def axis_rotations(dim: int, group: Literal["pi", "quarter"]) -> Iterator[tuple[Axes, Axes]]:
    """Rotations of the voxel grid as (permutation of the axes, axes to flip afterwards), with determinant +1."""
    for axes in itertools.permutations(range(dim)) if group == "quarter" else [tuple(range(dim))]:
        swaps = sum(axes[i] > axes[j] for i in range(dim) for j in range(i + 1, dim))
        for count in range(swaps % 2, dim + 1, 2):  # an odd permutation needs an odd number of flips
            for flips in itertools.combinations(range(dim), count):
                yield axes, flips


def rotate_grid(image: Tensor, axes: Axes, flips: Axes) -> Tensor:
    """Permute the spatial axes of (B, C, *shape), then flip."""
    return image.permute(0, 1, *(2 + a for a in axes)).flip([2 + f for f in flips])


def unrotate_grid(image: Tensor, axes: Axes, flips: Axes) -> Tensor:
    """Undo `rotate_grid`."""
    inverse = [axes.index(a) for a in range(len(axes))]
    return image.flip([2 + f for f in flips]).permute(0, 1, *(2 + a for a in inverse))
