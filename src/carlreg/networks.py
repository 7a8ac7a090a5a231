"""The two convolutional networks of the paper: tensors in, tensors out, in one to three dimensions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carlreg import kernels
from carlreg.grids import determinant, enlarge, pool
from carlreg.precision import channels_last, network_input


def check_dimension(dim: int) -> int:
    if dim not in (1, 2, 3):
        raise ValueError(f"dim is {dim!r}; expected 1, 2 or 3")
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
            if kernels.take(features):
                from carlreg.kernels import channels

                return channels.batch_norm(features, norm)
            return norm(features.to(norm.weight.dtype)).to(features.dtype)
        # With fixed statistics it is an affine map, and its gradients are plain sums.
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        shift = norm.bias - norm.running_mean * scale
        shape = (1, -1) + (1,) * (features.dim() - 2)
        return torch.addcmul(shift.reshape(shape), features, scale.reshape(shape)).to(features.dtype)


def convolve(layer: Any, features: Tensor, *, add: Tensor | None = None, relu: bool = False) -> Tensor:
    """layer(features), then plus `add` or ReLU: with the bias, in one pass, where kernels can."""
    if kernels.take(features):
        from carlreg.kernels import channels

        if layer.in_channels < 8 and layer.dilation[0] == 1:  # cuDNN is slow where channels are few
            change = conv_by_patches(features, layer.weight)
        else:
            change = channels_last(layer._conv_forward(features, layer.weight, None))
        return channels.add_bias(change, layer.bias, other=add if add is None else channels_last(add), relu=relu)
    change = layer(features)
    if add is not None:
        change = add + change
    return change.relu() if relu else change


class ResidualBlock(nn.Module):
    """Normalise, then add what a chain of dilated convolutions makes of the normalised input."""

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
    """Adds to features what tells a body's left from its right: det(∇a, ∇b, ∇c) of their own channels a, b, c.

    Features that stay the same however a body is turned say how deep a place lies, how far up and how far in front, but
    hardly on which side: where a body is its own mirror image, its sides differ by a reflection alone. The gradients of
    such features turn with the body, and their determinant stays; in a mirror it changes its sign. `count` determinants
    of D channels each are taken, from differences over `distance` voxels to either side, and mixed into all channels.
    """

    def __init__(self, dim: int, width: int, count: int, distance: int = 2) -> None:
        super().__init__()
        if dim * count > width:
            raise ValueError(f"{count} determinants of {dim} channels each take more than the {width} there are")
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


class Encoder(Network):
    """Conv_θ of Ξθ: a feature vector for every voxel, at the image's own resolution, so integer shifts pass through.

    A voxel's features depend on its neighbours up to `reach` voxels away. With `handed`, so many determinants of what
    comes out are added to it (`Handedness`); the paper has none.
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
    """An encoder averaged over a group of axis-aligned rotations: mean of g⁻¹ · Conv(g · image).

    "pi" takes the half turns about the axes (4 of them with the identity in 3-D, 2 in 2-D), as the paper does;
    "quarter" takes all rotations that map the voxel grid to itself (24 in 3-D, 4 in 2-D). The result commutes with
    each of them, so Ξθ becomes [W, U] equivariant to them.
    """

    def __init__(self, encoder: Encoder, group: Literal["pi", "quarter"] = "pi") -> None:
        super().__init__()
        if group not in ("pi", "quarter"):
            raise ValueError(f"unknown rotation group {group!r}; expected 'pi' or 'quarter'")
        self.encoder, self.group = encoder, group
        self.dim, self.channels, self.width = encoder.dim, encoder.channels, encoder.width
        self.reach = encoder.reach

    def forward(self, image: Tensor) -> Tensor:
        rotations = list(axis_rotations(self.dim, self.group))
        turned = [rotate_grid(image, *g) for g in rotations]
        if self.training and len({one.shape for one in turned}) == 1:  # one batch is faster, but takes more memory
            features = self.encoder(torch.cat(turned)).chunk(len(turned))
        else:
            features = [self.encoder(one) for one in turned]
        back = [unrotate_grid(part, *g) for part, g in zip(features, rotations, strict=True)]
        return torch.stack(back).mean(dim=0)  # mean of g⁻¹ · Conv(g · image)


Axes = tuple[int, ...]


def axis_rotations(dim: int, group: Literal["pi", "quarter"]) -> Iterator[tuple[Axes, Axes]]:
    """The rotations of the voxel grid as (permutation of the axes, axes to flip afterwards), determinant +1."""
    for axes in itertools.permutations(range(dim)) if group == "quarter" else [tuple(range(dim))]:
        swaps = sum(axes[i] > axes[j] for i in range(dim) for j in range(i + 1, dim))
        for count in range(swaps % 2, dim + 1, 2):  # an odd permutation needs an odd number of flips
            for flips in itertools.combinations(range(dim), count):
                yield axes, flips


def rotate_grid(image: Tensor, axes: Axes, flips: Axes) -> Tensor:
    """Turn the spatial axes of (B, C, *shape): permute them, then flip."""
    return image.permute(0, 1, *(2 + a for a in axes)).flip([2 + f for f in flips])


def unrotate_grid(image: Tensor, axes: Axes, flips: Axes) -> Tensor:
    """Undo `rotate_grid`."""
    inverse = [axes.index(a) for a in range(len(axes))]
    return image.flip([2 + f for f in flips]).permute(0, 1, *(2 + a for a in inverse))


class UNet(Network):
    """The refinement network: two images in, D numbers per voxel out.

    Strided convolutions down, transposed ones up, each beside a shortcut that pools or enlarges its input. The last
    convolution starts at zero, so that a new step changes nothing until it is trained.
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
            raise ValueError(f"down has {len(down)} levels but up has {len(up)}; expected as many")
        self.dim, self.channels, self.down, self.up = check_dimension(dim), channels, tuple(down), tuple(up)
        inputs = (2 * channels, *down)
        self.down_convs = nn.ModuleList(
            conv(dim)(wide, narrow, 3, stride=2, padding=1) for wide, narrow in itertools.pairwise(inputs)
        )
        # Going up, each level sees the level below beside the skip of the same size.
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
        features = network_input(torch.cat([moving, fixed], dim=1))
        skips = []
        for layer in self.down_convs:
            skips.append(features)
            change = layer(F.leaky_relu(features))
            features = change + fit_channels(pool(features), change.shape[1])
        for layer, norm in zip(self.up_convs, self.norms, strict=True):
            skip = skips.pop()
            inside = (slice(None), slice(None), *(slice(n) for n in skip.shape[2:]))
            features = torch.cat([normalize(norm, up_step(features, layer))[inside], skip], dim=1)
        # cuDNN is slow where channels are few.
        return (conv_in_groups(features, self.last) if features.is_cuda else self.last(features)) / 10


def up_step(features: Tensor, layer: Any) -> Tensor:
    """To twice as many voxels per axis: a transposed convolution beside a shortcut."""
    change, outputs = F.leaky_relu(features), layer.out_channels
    if features.dim() == 5 and not _few(features) and outputs <= features.shape[1] and kernels.take(features):
        from carlreg.kernels import upsampling

        return upsampling.up_step(change, features, layer.weight, layer.bias)
    return up_conv(change, layer) + enlarge(fit_channels(features, outputs))


def _few(features: Tensor) -> bool:
    return features.shape[2:].numel() <= 16**3


def up_conv(features: Tensor, layer: Any) -> Tensor:
    """A transposed convolution of kernel 4 and stride 2, with its gradients as matrix products: for small grids on a
    GPU, where cuDNN takes many times as long."""
    if not (features.is_cuda and _few(features) and torch.is_grad_enabled()):
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


def fit_channels(features: Tensor, channels: int) -> Tensor:
    """Drop the last channels, or put channels of zeros in front."""
    missing = channels - features.shape[1]
    if missing <= 0:
        return features[:, :channels]
    return F.pad(features, (0, 0) * (features.dim() - 2) + (missing, 0))
