"""Inside a trained network: the attention of each point, how certain it is, and what the features encode.

Ξθ sees both images pooled, and the moving one padded beyond its border; `Inside` holds what it computes. Masks and maps
are images in world coordinates, so that any viewer can overlay them on the scans.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carlreg.errors import DependencyError, InputError
from carlreg.fast.devices import choose_device
from carlreg.files.images import Image, Matrix, as_image, map_points
from carlreg.geometry.grids import Grid, fine_to_coarse, pool, pooled_shape
from carlreg.model.algorithms import Augmented, CoordinateAttention, Downsample, RegistrationAlgorithm, TwoStep
from carlreg.model.attention import attention_moments, scale_to_length
from carlreg.model.loaded import load_model
from carlreg.objective.metrics import dice, mean_score
from carlreg.preparation import prepare_pair


def find_attention(model: RegistrationAlgorithm) -> tuple[CoordinateAttention, list[Downsample]]:
    """A network's Ξθ, and the poolings around it, the outermost first."""
    poolings, part = [], model
    while not isinstance(part, CoordinateAttention):
        if isinstance(part, Downsample):
            poolings.append(part)
        elif not isinstance(part, TwoStep | Augmented):
            raise InputError(f"the model begins with {type(part).__name__}; expected one with coordinate attention")
        part = part.phi
    return part, poolings


def index_to_unit(shape: Sequence[int], poolings: Sequence[Downsample], padding: int = 0) -> Matrix:
    """(D + 1, D + 1): indices on the grid that poolings make of an image, padded → the image's unit coordinates."""
    sides, to_coarse = tuple(shape), np.eye(len(shape) + 1)
    for pooling in poolings:
        if pooling.aligned:
            to_coarse = _scaling(*fine_to_coarse(sides)) @ to_coarse
        sides = pooled_shape(sides)
    grid = Grid.of(sides).pad(padding)
    return np.asarray(np.linalg.inv(to_coarse) @ _scaling(grid.spacing, grid.origin))


def _scaling(scale: Sequence[float], shift: Sequence[float]) -> Matrix:
    matrix = np.diag([*scale, 1.0])
    matrix[:-1, -1] = shift
    return matrix


@dataclass(frozen=True, eq=False)
class Inside:
    """What Ξθ computes from a pair. Voxels are those of the pooled images; masks lie on the moving one's, padded."""

    xi: CoordinateAttention
    moving_to_unit: Matrix  # indices on the moving image's padded grid → its unit coordinates
    fixed_to_unit: Matrix  # indices on the fixed image's grid → its unit coordinates
    moving_features: Tensor  # (1, *padded shape, C)
    fixed_features: Tensor  # (1, *shape, C)
    moving: Tensor  # (1, 1, *shape), as Ξθ sees it
    fixed: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: RegistrationAlgorithm, moving: Tensor, fixed: Tensor) -> Inside:
        """Run Ξθ on a pair of images, (1, 1, *shape) each."""
        xi, poolings = find_attention(model)
        lattices = index_to_unit(moving.shape[2:], poolings, xi.padding), index_to_unit(fixed.shape[2:], poolings)
        for _ in poolings:
            moving, fixed = pool(moving), pool(fixed)
        keys, queries = (scale_to_length(xi.features(image), xi.length) for image in (moving, fixed))
        return cls(xi, *lattices, keys, xi.crop(queries), moving, fixed)

    @property
    def keys(self) -> Grid:
        return Grid.of(self.moving.shape[2:]).pad(self.xi.padding)

    def masks(self, voxels: Sequence[Sequence[int]]) -> Tensor:
        """The attention of N fixed voxels, given by their indices: (N, *padded shape), each summing to 1."""
        queries = self.fixed_features[0][tuple(torch.tensor(voxels).T)]
        logits = queries.double() @ self.moving_features[0].flatten(0, -2).double().mT
        return logits.softmax(dim=-1).reshape(len(queries), *self.keys.shape)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (*shape, D) and covariance (*shape, D, D) of every fixed voxel's attention, in unit coordinates of the
        pooled moving image."""
        queries, keys = self.fixed_features.flatten(1, -2), self.moving_features.flatten(1, -2)
        mean, covariance = attention_moments(queries, keys, self.keys, bound=self.xi.length**2)
        return mean[0].unflatten(0, self.fixed.shape[2:]), covariance[0].unflatten(0, self.fixed.shape[2:])


@dataclass(frozen=True, eq=False)
class Explanation:
    """`Inside` of two scans, in world coordinates."""

    inside: Inside
    fixed: Image
    moving: Image

    def voxel_at(self, point: Sequence[float]) -> tuple[int, ...]:
        """The pooled voxel of the fixed image nearest to a world point (LPS, mm)."""
        voxel = np.rint(map_points(np.linalg.inv(self.fixed_lattice()), point)).astype(int)
        if ((voxel < 0) | (voxel >= np.array(self.inside.fixed.shape[2:]))).any():
            text = ", ".join(f"{x:g}" for x in point)
            raise InputError(f"the point ({text}) lies outside of {self.fixed.name}; expected a point in it, in LPS mm")
        return tuple(voxel.tolist())

    def fixed_lattice(self) -> Matrix:
        """(D + 1, D + 1): pooled voxels of the fixed image → world points."""
        return self.fixed.unit_to_world() @ self.inside.fixed_to_unit

    def moving_lattice(self) -> Matrix:
        """(D + 1, D + 1): voxels of a mask, padding included → world points."""
        return self.moving.unit_to_world() @ self.inside.moving_to_unit

    def mask(self, voxel: Sequence[int]) -> Image:
        """The attention of a fixed voxel on the moving image's padded grid, summing to 1."""
        return Image(self.inside.masks([voxel])[0].float().cpu().numpy(), self.moving_lattice(), "attention")

    def match(self, mask: Image) -> tuple[Matrix, float]:
        """A mask's centre of mass, as a world point of the moving image, and its spread in mm: the root mean square
        distance from there."""
        weights = mask.data.astype(np.float64) / mask.data.sum(dtype=np.float64)
        world = map_points(mask.affine, np.moveaxis(np.indices(mask.shape), 0, -1))
        centre = np.tensordot(weights, world, axes=mask.dim)
        spread = np.sqrt((weights * ((world - centre) ** 2).sum(-1)).sum())
        return np.asarray(centre), float(spread)

    def certainty(self) -> Image:
        """The spread of every fixed voxel's attention, in mm: small where the match is certain."""
        _, covariance = self.inside.moments()
        to_mm = torch.from_numpy(self.moving_lattice()[:-1, :-1] / self.inside.keys.spacing).to(covariance)
        in_mm = to_mm @ covariance @ to_mm.mT
        spread = in_mm.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=0).sqrt()
        return Image(spread.float().cpu().numpy(), self.fixed_lattice(), "spread of attention, mm")

    def random_voxels(self, count: int = 25, seed: int = 0) -> list[tuple[int, ...]]:
        """Random voxels of the fixed image among those brighter than a tenth of its range, to avoid air."""
        image = self.inside.fixed[0, 0]
        bright = (image > image.min() + 0.1 * (image.max() - image.min())).nonzero().cpu().numpy()
        drawn = np.random.default_rng(seed).permutation(len(bright))[:count]
        return [tuple(voxel) for voxel in bright[drawn].tolist()]


def explain(
    *,
    fixed: Any,
    moving: Any,
    model: str | os.PathLike[str] | RegistrationAlgorithm = "default",
    device: str | torch.device = "auto",
) -> Explanation:
    """Show how a network matches two images, in any form that `register` accepts.

    >>> explanation = explain(fixed="fixed.nii.gz", moving="moving.nii.gz")
    >>> mask = explanation.mask(explanation.voxel_at((12.0, -40.5, 130.0)))
    """
    torch_device = choose_device(device)
    loaded = load_model(model, torch_device)
    if loaded.searches_rotation:
        raise InputError("model is 'auto', which is not a model of its own; expected carl-base, or another model")
    images = as_image(fixed, "fixed"), as_image(moving, "moving")
    loaded = loaded.for_dimension(images[0].dim)
    f, m = prepare_pair(*images, loaded, torch_device)
    return Explanation(Inside.of(loaded.network, m.tensor, f.tensor), f.image, m.image)


# ---- the linear probe -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Probe:
    """A linear map from features to structures, fitted by least squares: for each, 1 inside and 0 outside."""

    labels: tuple[int, ...]
    weights: Tensor  # (C + 1, number of labels)
    thresholds: Tensor  # (number of labels,)
    """Heat above which a voxel belongs to the structure, for the best Dice on the training image. Small structures have
    little heat, since the target of nearly all voxels is 0."""

    @classmethod
    def fit(cls, features: Tensor, labels: Tensor, wanted: Sequence[int], *, ridge: float = 1e-6) -> Probe:
        """Fit to features (1, C, *shape) and a label map (1, 1, *shape) on the same grid."""
        inputs, flat = _with_one(features), labels.flatten()
        targets = torch.stack([flat == label for label in wanted], dim=-1).to(inputs)
        square = inputs.mT @ inputs
        square += ridge * square.diagonal().mean() * torch.eye(len(square)).to(square)
        weights = torch.linalg.solve(square, inputs.mT @ targets)
        heat = inputs @ weights
        thresholds = [_best_threshold(*pair) for pair in zip(heat.T, targets.T, strict=True)]
        return cls(tuple(wanted), weights, torch.stack(thresholds))

    def heat(self, features: Tensor) -> Tensor:
        """The linear map of the features: (number of labels, *shape)."""
        return (_with_one(features) @ self.weights).mT.reshape(-1, *features.shape[2:])

    def segment(self, features: Tensor) -> Tensor:
        """The structure whose heat is furthest above its threshold, or 0 if none is: (1, 1, *shape)."""
        kinds = torch.tensor([0, *self.labels], device=features.device)
        above = self.heat(features).movedim(0, -1) / self.thresholds - 1
        best, which = above.max(dim=-1)
        return kinds[torch.where(best > 0, which + 1, 0)][None, None]


def _best_threshold(heat: Tensor, target: Tensor) -> Tensor:
    """The threshold with the best Dice, 2 |A ∩ B| / (|A| + |B|) for the k hottest voxels, over all k."""
    order = heat.argsort(descending=True)
    inside = target[order].cumsum(0)
    scores = 2 * inside / (torch.arange(1, len(heat) + 1).to(heat) + target.sum())
    last = int(scores.argmax())
    following = heat[order[min(last + 1, len(heat) - 1)]]
    return ((heat[order[last]] + following) / 2).clamp(min=1e-6)


@torch.no_grad()
def encode(xi: CoordinateAttention, image: Tensor) -> Tensor:
    """Conv_θ of a pooled image, (1, C, *shape), before features are scaled to one length."""
    return xi.crop(xi.features(image)).movedim(-1, 1)


def probe(
    explanation: Explanation, moving_labels: Image, fixed_labels: Image, wanted: Sequence[int] | None = None
) -> tuple[Probe, Tensor, dict[int, float]]:
    """Train a probe on the features of the moving image and apply it to those of the fixed one. Returns the probe, its
    heat, and the Dice of its segmentation, on the pooled grid."""
    inside = explanation.inside
    of_moving = _labels_at(moving_labels, explanation.moving_lattice(), inside.moving, inside.xi.padding)
    of_fixed = _labels_at(fixed_labels, explanation.fixed_lattice(), inside.fixed)
    if wanted is None:
        wanted = sorted({*of_moving.unique().tolist()} & {*of_fixed.unique().tolist()} - {0})
    if not len(wanted):
        raise InputError("the two label maps have no label in common; expected some to train a probe on")
    trained = Probe.fit(encode(inside.xi, inside.moving).cpu(), of_moving, wanted)
    features = encode(inside.xi, inside.fixed).cpu()
    return trained, trained.heat(features), dice(trained.segment(features), of_fixed, list(wanted))


def _labels_at(labels: Image, lattice: Matrix, pooled: Tensor, padding: int = 0) -> Tensor:
    """A label map at the voxels of a pooled image, (1, 1, *shape): 0 outside of the map."""
    world = map_points(lattice, np.moveaxis(np.indices(pooled.shape[2:]), 0, -1) + padding)
    nearest = np.rint(map_points(np.linalg.inv(labels.affine), world)).astype(int)
    last = np.array(labels.shape) - 1
    inside = ((nearest >= 0) & (nearest <= last)).all(axis=-1)
    data = np.where(inside, labels.data[tuple(np.moveaxis(nearest.clip(0, last), -1, 0))], 0)
    return torch.from_numpy(data.astype(np.int64))[None, None]


def _with_one(features: Tensor) -> Tensor:
    """(1, C, *shape) → (voxels, C + 1), with a constant feature, in double precision."""
    flat = features[0].flatten(1).mT.double()
    return torch.cat([flat, torch.ones_like(flat[:, :1])], dim=1)


# ---- pictures -------------------------------------------------------------------------------------------------------


def draw_point(explanation: Explanation, voxel: Sequence[int]) -> bytes:
    """A fixed voxel, its attention in slices of the moving image through the match, and maximum-intensity projections
    of the attention: a PNG."""
    mask = explanation.mask(voxel)
    centre, spread = explanation.match(mask)
    index = np.rint(map_points(np.linalg.inv(mask.affine), centre)).astype(int).clip(0, np.array(mask.shape) - 1)
    fixed, moving = _fixed(explanation), _padded_moving(explanation)
    figure, plots = _figure(3, len(_axes(mask.dim)))
    for (top, middle, bottom), axis in zip(plots.T, _axes(mask.dim), strict=True):
        _show(top, fixed, explanation.fixed_lattice(), axis, voxel)
        top.plot(*(n for number, n in enumerate(voxel) if number != axis), "+", color="red", markersize=10)
        _show(middle, moving, mask.affine, axis, index)
        _show(middle, mask.data, mask.affine, axis, index, cmap="hot", opacity=_root)
        _show(bottom, mask.data, mask.affine, axis, cmap="hot")
    plots[0][0].set_title("fixed image and point", fontsize=8, loc="left")
    plots[1][0].set_title(f"moving image and attention: spread {spread:.1f} mm", fontsize=8, loc="left")
    plots[2][0].set_title("attention, maximum-intensity projections", fontsize=8, loc="left")
    return _png(figure)


def draw_masks(explanation: Explanation, voxels: Sequence[Sequence[int]], *, axis: int = 1) -> bytes:
    """Maximum-intensity projections of the masks of some voxels, as in the paper's appendix: a PNG."""
    side = int(np.ceil(np.sqrt(len(voxels))))
    figure, plots = _figure(int(np.ceil(len(voxels) / side)), side)
    moving, lattice = _padded_moving(explanation), explanation.moving_lattice()
    along = None if moving.ndim == 2 else axis
    mean = moving if along is None else moving.mean(along, keepdims=True)
    for plot, voxel in zip(plots.ravel(), voxels, strict=False):
        _show(plot, mean, lattice, along)
        _show(plot, explanation.mask(voxel).data, lattice, along, cmap="hot", opacity=_root)
    return _png(figure)


def draw_certainty(explanation: Explanation, certainty: Image) -> bytes:
    """Middle slices of the fixed image and of the map of certainty: a PNG."""
    axes, middle = _axes(certainty.dim), [n // 2 for n in certainty.shape]
    figure, plots = _figure(2, len(axes))
    colours = {"cmap": "viridis", "vmin": 0, "vmax": float(np.percentile(certainty.data, 99))}
    for (above, below), axis in zip(plots.T, axes, strict=True):
        _show(above, _fixed(explanation), certainty.affine, axis, middle)
        shown = _show(below, certainty.data, certainty.affine, axis, middle, **colours)
    figure.colorbar(shown, ax=plots[1], label="spread of attention, mm")
    return _png(figure)


def draw_probe(
    explanation: Explanation, trained: Probe, heat: Tensor, scores: dict[int, float], names: dict[int, str]
) -> bytes:
    """The probe's heat for each structure on the fixed image, in the slice where it is largest, up to twice the
    structure's threshold: a PNG."""
    fixed, lattice = _fixed(explanation), explanation.fixed_lattice()
    axis = None if fixed.ndim == 2 else 2
    figure, plots = _figure(1, len(scores))
    for column, (plot, (label, score)) in enumerate(zip(plots[0], scores.items(), strict=True)):
        relative = (heat[column] / (2 * trained.thresholds[column])).clamp(0, 1).numpy()
        hottest = [0, 0, int(relative.sum((0, 1)).argmax())]
        _show(plot, fixed, lattice, axis, hottest)
        _show(plot, relative, lattice, axis, hottest, cmap="hot", vmin=0, vmax=1, opacity=lambda shown: shown)
        plot.set_title(f"{names.get(label, label)}: Dice {score:.2f}", fontsize=8)
    figure.suptitle(f"linear probe, mean Dice {mean_score(scores):.2f}", fontsize=9)
    return _png(figure)


def _fixed(explanation: Explanation) -> Any:
    return explanation.inside.fixed[0, 0].cpu().numpy()


def _padded_moving(explanation: Explanation) -> Any:
    return np.pad(explanation.inside.moving[0, 0].cpu().numpy(), explanation.inside.xi.padding)


def _axes(dim: int) -> list[int | None]:
    """The axes across which slices are drawn; a 2-D image is drawn as it is."""
    return [None] if dim == 2 else [0, 1, 2]


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError("pictures need matplotlib: pip install 'carlreg[plots]'") from error
    figure = Figure(figsize=(2.2 * columns + 0.4, 2.2 * rows + 0.4), layout="constrained")
    plots = figure.subplots(rows, columns, squeeze=False)
    for plot in plots.ravel():
        plot.set_axis_off()
    return figure, plots


def _show(
    plot: Any, data: Any, lattice: Matrix, axis: int | None, index: Any = None, *, opacity: Any = None, **options: Any
) -> Any:
    """Draw a slice at an index, or else the maximum-intensity projection, across an axis of a lattice: x to the right
    and y upwards. `opacity` is a function of the drawn values."""
    if axis is not None:
        data = data.max(axis) if index is None else data.take(int(index[axis]), axis)
    size = [mm for n, mm in enumerate(np.linalg.norm(lattice[:-1, :-1], axis=0)) if n != axis]
    options = {"cmap": "gray", "origin": "lower", "interpolation": "nearest", "aspect": size[1] / size[0]} | options
    return plot.imshow(data.T, alpha=None if opacity is None else opacity(data.T), **options)


def _root(mask: Any) -> Any:
    """Opacity of an attention mask."""
    return np.sqrt(mask / max(mask.max(), 1e-30))


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
