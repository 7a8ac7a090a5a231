"""A look inside a trained network: where each point attends, how certain it is, and what the features encode.

Ξθ sees both images pooled, and keys of the moving image padded beyond its border; `Inside` holds what it sees. Masks
and maps are images with world coordinates, so that any viewer can overlay them on the scans.
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
    """A network's Ξθ, and the poolings above it, the outermost first."""
    poolings, here = [], model
    while not isinstance(here, CoordinateAttention):
        if isinstance(here, Downsample):
            poolings.append(here)
        elif not isinstance(here, TwoStep | Augmented):
            raise InputError(f"the model begins with {type(here).__name__}; expected one with coordinate attention")
        here = here.phi
    return here, poolings


@dataclass(frozen=True)
class Level:
    """The grid that Ξθ sees of an image: unit coordinates there are scale · x + shift of the image's own."""

    shape: tuple[int, ...]
    scale: tuple[float, ...]
    shift: tuple[float, ...]

    @classmethod
    def below(cls, shape: Sequence[int], poolings: Sequence[Downsample]) -> Level:
        sides, scale, shift = tuple(shape), np.ones(len(shape)), np.zeros(len(shape))
        for pooling in poolings:
            if pooling.aligned:
                by, plus = (np.array(values) for values in fine_to_coarse(sides))
                scale, shift = scale * by, shift * by + plus
            sides = pooled_shape(sides)
        return cls(sides, tuple(scale), tuple(shift))

    def index_of(self, points: Matrix, padding: int = 0) -> Matrix:
        """Fractional indices on this grid of unit coordinates (..., D) of the image."""
        spacing = np.array(Grid.of(self.shape).spacing)
        return (points * np.array(self.scale) + np.array(self.shift)) / spacing + padding

    def index_to_unit(self, padding: int = 0) -> Matrix:
        """(D + 1, D + 1): indices on this grid, padded, to the image's unit coordinates."""
        grid = Grid.of(self.shape).pad(padding)
        matrix = np.eye(len(self.shape) + 1)
        matrix[:-1, :-1] = np.diag(np.array(grid.spacing) / self.scale)
        matrix[:-1, -1] = (np.array(grid.origin) - self.shift) / self.scale
        return matrix


@dataclass(frozen=True, eq=False)
class Inside:
    """What Ξθ makes of a pair. Voxels are those of the pooled images; masks lie on the moving one's padded grid."""

    xi: CoordinateAttention
    moving_level: Level
    fixed_level: Level
    moving_features: Tensor  # (1, C, *padded shape)
    fixed_features: Tensor  # (1, C, *shape)
    moving: Tensor  # (1, 1, *shape), as Ξθ sees it
    fixed: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: RegistrationAlgorithm, moving: Tensor, fixed: Tensor) -> Inside:
        """From a pair of images, (1, 1, *shape) each, as the model takes them."""
        xi, poolings = find_attention(model)
        moving_level, fixed_level = (Level.below(image.shape[2:], poolings) for image in (moving, fixed))
        for _ in poolings:
            moving, fixed = pool(moving), pool(fixed)
        features = [scale_to_length(xi.features(image), xi.length) for image in (moving, fixed)]
        keys, queries = features[0].movedim(-1, 1), xi.crop(features[1]).movedim(-1, 1)
        return cls(xi, moving_level, fixed_level, keys, queries, moving, fixed)

    @property
    def keys(self) -> Grid:
        return Grid.of(self.moving_level.shape).pad(self.xi.padding)

    def masks(self, voxels: Sequence[Sequence[int]]) -> Tensor:
        """The attention of fixed voxels (N indices): (N, *padded shape), each normalised to sum to 1."""
        queries = self.fixed_features[0].movedim(0, -1)[tuple(torch.tensor(voxels).T)]
        logits = queries.double() @ as_vectors(self.moving_features)[0].double().mT
        return logits.softmax(dim=-1).reshape(len(queries), *self.keys.shape)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (*shape, D) and covariance (*shape, D, D) of every fixed voxel's attention, in the unit coordinates of
        the pooled moving image."""
        shape, dim = self.fixed_level.shape, len(self.fixed_level.shape)
        mean, covariance = attention_moments(
            as_vectors(self.fixed_features), as_vectors(self.moving_features), self.keys, bound=self.xi.length**2
        )
        return mean.reshape(*shape, dim), covariance.reshape(*shape, dim, dim)


@dataclass(frozen=True, eq=False)
class Explanation:
    """`Inside` of two scans, with their places in the world."""

    inside: Inside
    fixed: Image
    moving: Image

    def voxel_at(self, point: Sequence[float]) -> tuple[int, ...]:
        """The voxel that Ξθ sees of the fixed image nearest to a world point (LPS, mm)."""
        level = self.inside.fixed_level
        index = level.index_of(map_points(self.fixed.world_to_unit(), point))
        rounded = np.rint(index).astype(int)
        if ((rounded < 0) | (rounded >= np.array(level.shape))).any():
            given = ", ".join(f"{x:g}" for x in point)
            raise InputError(
                f"the point ({given}) lies outside of what the network sees of {self.fixed.name}; expected LPS "
                "millimetres of a point in it"
            )
        return tuple(int(n) for n in rounded)

    def fixed_lattice(self) -> Matrix:
        """(D + 1, D + 1): fixed voxels, as Ξθ sees them, to world points."""
        return self.fixed.unit_to_world() @ self.inside.fixed_level.index_to_unit()

    def moving_lattice(self) -> Matrix:
        """(D + 1, D + 1): voxels of a mask, padding included, to world points."""
        return self.moving.unit_to_world() @ self.inside.moving_level.index_to_unit(self.inside.xi.padding)

    def mask(self, voxel: Sequence[int]) -> Image:
        """A fixed voxel's attention on the moving image's padded grid, normalised to sum to 1."""
        return Image(self.inside.masks([voxel])[0].float().cpu().numpy(), self.moving_lattice(), "attention")

    def match(self, mask: Image) -> tuple[Matrix, float]:
        """A mask's centre of mass, in world coordinates of the moving image, and its spread: the root mean square
        distance from it, in mm."""
        weights = mask.data.astype(np.float64) / mask.data.sum(dtype=np.float64)
        index = np.stack(np.meshgrid(*(np.arange(n) for n in mask.shape), indexing="ij"), axis=-1)
        world = map_points(mask.affine, index)
        centre = np.tensordot(weights, world, axes=mask.dim)
        spread = np.sqrt((weights * ((world - centre) ** 2).sum(-1)).sum())
        return np.asarray(centre), float(spread)

    def certainty(self) -> Image:
        """The spread of every fixed voxel's attention, in mm: small where the network knows where it is."""
        _, covariance = self.inside.moments()
        level = self.inside.moving_level
        to_mm = (self.moving.unit_to_world()[:-1, :-1] / np.array(level.scale)).astype(np.float64)
        matrix = torch.from_numpy(to_mm).to(covariance)
        in_mm = matrix @ covariance @ matrix.mT
        spread = in_mm.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=0).sqrt()
        return Image(spread.float().cpu().numpy(), self.fixed_lattice(), "spread of attention, mm")

    def random_voxels(self, count: int = 25, seed: int = 0) -> list[tuple[int, ...]]:
        """Voxels of the fixed image drawn from where it is brighter than a tenth of its range: not in the air."""
        image = self.inside.fixed[0, 0]
        bright = (image > image.min() + 0.1 * (image.max() - image.min())).nonzero().cpu().numpy()
        drawn = np.random.default_rng(seed).permutation(len(bright))[:count]
        return [tuple(int(n) for n in bright[number]) for number in drawn]


def explain(
    *,
    fixed: Any,
    moving: Any,
    model: str | os.PathLike[str] | RegistrationAlgorithm = "default",
    device: str | torch.device = "auto",
) -> Explanation:
    """Look at how a network matches two images, given as `register` takes them.

    >>> seen = explain(fixed="fixed.nii.gz", moving="moving.nii.gz")
    >>> mask = seen.mask(seen.voxel_at((12.0, -40.5, 130.0)))
    """
    place = choose_device(device)
    loaded = load_model(model, place)
    if loaded.searches_rotation:
        raise InputError("model is 'auto', which is not a model of its own; expected carl-base, or another model")
    f, m = prepare_pair(as_image(fixed, "fixed"), as_image(moving, "moving"), loaded, place)
    return Explanation(Inside.of(loaded.network, m.tensor, f.tensor), f.image, m.image)


# ---- the linear probe -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Probe:
    """A linear map from features to structures, fitted by least squares: for each, 1 inside and 0 outside."""

    labels: tuple[int, ...]
    weights: Tensor  # (C + 1, number of labels)
    thresholds: Tensor  # (number of labels,)
    """Heat above which a voxel belongs to a structure, chosen for the best Dice on the training image. They differ,
    because the least-squares fit gives small structures low heat."""

    @classmethod
    def fit(cls, features: Tensor, labels: Tensor, wanted: Sequence[int], *, ridge: float = 1e-6) -> Probe:
        """From features (1, C, *shape) and a label map (1, 1, *shape) on the same grid."""
        inputs, flat = _with_one(features), labels.flatten()
        targets = torch.stack([flat == label for label in wanted], dim=-1).to(inputs)
        square = inputs.mT @ inputs
        square += ridge * square.diagonal().mean() * torch.eye(len(square)).to(square)
        weights = torch.linalg.solve(square, inputs.mT @ targets)
        heat = inputs @ weights
        return cls(
            tuple(wanted),
            weights,
            torch.stack([_best_threshold(*pair) for pair in zip(heat.T, targets.T, strict=True)]),
        )

    def heat(self, features: Tensor) -> Tensor:
        """The probe's output for each structure, (number of labels, *shape)."""
        return (_with_one(features) @ self.weights).mT.reshape(-1, *features.shape[2:])

    def segment(self, features: Tensor) -> Tensor:
        """The structure whose heat is furthest above its threshold, 0 where none is: (1, 1, *shape)."""
        kinds = torch.tensor([0, *self.labels], device=features.device)
        above = self.heat(features).movedim(0, -1) / self.thresholds - 1
        best, which = above.max(dim=-1)
        return kinds[torch.where(best > 0, which + 1, 0)][None, None]


def _best_threshold(heat: Tensor, target: Tensor) -> Tensor:
    """The threshold with the best Dice, 2 |A ∩ B| / (|A| + |B|), over the k hottest voxels for every k."""
    order = heat.argsort(descending=True)
    inside = target[order].cumsum(0)
    scores = 2 * inside / (torch.arange(1, len(heat) + 1).to(heat) + target.sum())
    last = int(scores.argmax())
    following = heat[order[min(last + 1, len(heat) - 1)]]
    return ((heat[order[last]] + following) / 2).clamp(min=1e-6)


@torch.no_grad()
def encode(xi: CoordinateAttention, image: Tensor) -> Tensor:
    """Conv_θ of an image as Ξθ sees it, (1, C, *shape), before features are scaled to one length."""
    return xi.crop(xi.features(image)).movedim(-1, 1)


def probe(
    seen: Explanation, moving_labels: Image, fixed_labels: Image, wanted: Sequence[int] | None = None
) -> tuple[Probe, Tensor, dict[int, float]]:
    """Train a probe on the moving image's features and apply it to the fixed one's: the probe, its heat there, and the
    Dice of its segmentation, on the grid that Ξθ sees."""
    inside = seen.inside
    maps = [
        _seen(moving_labels, seen.moving, inside.moving_level),
        _seen(fixed_labels, seen.fixed, inside.fixed_level),
    ]
    if wanted is None:
        wanted = sorted({int(n) for n in maps[0].unique()} & {int(n) for n in maps[1].unique()} - {0})
    if not len(wanted):
        raise InputError("the two label maps have no label in common; expected at least one to train a probe on")
    trained = Probe.fit(encode(inside.xi, inside.moving).cpu(), maps[0], wanted)
    features = encode(inside.xi, inside.fixed).cpu()
    return trained, trained.heat(features), dice(trained.segment(features), maps[1], list(wanted))


def _seen(labels: Image, image: Image, level: Level) -> Tensor:
    """A label map at the voxels that Ξθ sees of an image, (1, 1, *shape): 0 where the map ends."""
    index = np.moveaxis(np.indices(level.shape), 0, -1)
    world = map_points(image.unit_to_world() @ level.index_to_unit(), index)
    found = np.rint(map_points(np.linalg.inv(labels.affine), world)).astype(int)
    ends = np.array(labels.shape) - 1
    there = ((found >= 0) & (found <= ends)).all(axis=-1)
    data = np.where(there, labels.data[tuple(np.moveaxis(found.clip(0, ends), -1, 0))], 0)
    return torch.from_numpy(data.astype(np.int64))[None, None]


def _with_one(features: Tensor) -> Tensor:
    """(1, C, *shape) → (voxels, C + 1), in double precision."""
    flat = as_vectors(features)[0].double()
    return torch.cat([flat, torch.ones_like(flat[:, :1])], dim=1)


# ---- pictures -------------------------------------------------------------------------------------------------------


def draw_point(seen: Explanation, voxel: Sequence[int]) -> bytes:
    """A fixed voxel, its attention over the moving image through the match, and the mask's maximum-intensity
    projections, along each axis: a PNG."""
    mask = seen.mask(voxel)
    centre, spread = seen.match(mask)
    index = np.rint(map_points(np.linalg.inv(mask.affine), centre)).astype(int).clip(0, np.array(mask.shape) - 1)
    padding = seen.inside.xi.padding
    grey = np.pad(seen.inside.moving[0, 0].cpu().numpy(), padding)
    fixed = seen.inside.fixed[0, 0].cpu().numpy()
    axes_of = [(0,)] if mask.dim == 2 else [(0,), (1,), (2,)]
    figure, plots = _figure(3, len(axes_of))
    for column, (axis,) in enumerate(axes_of):
        flat = mask.dim == 2
        here = fixed if flat else fixed.take(voxel[axis], axis)
        there = grey if flat else grey.take(int(index[axis]), axis)
        over = mask.data if flat else mask.data.take(int(index[axis]), axis)
        kept = [n for n in range(mask.dim) if flat or n != axis]
        _show(plots[0][column], here, _aspect(seen.fixed_lattice(), kept))
        plots[0][column].plot(voxel[kept[0]], voxel[kept[1]], "+", color="red", markersize=10)
        _show(plots[1][column], there, _aspect(mask.affine, kept))
        _show(plots[1][column], over, _aspect(mask.affine, kept), cmap="hot", alpha=_opacity(over))
        _show(plots[2][column], mask.data if flat else mask.data.max(axis), _aspect(mask.affine, kept), cmap="hot")
    plots[0][0].set_title("fixed, and the point", fontsize=8, loc="left")
    plots[1][0].set_title(f"moving, and its attention: spread {spread:.1f} mm", fontsize=8, loc="left")
    plots[2][0].set_title("attention, maximum-intensity projections", fontsize=8, loc="left")
    return _png(figure)


def draw_masks(seen: Explanation, voxels: Sequence[Sequence[int]], *, axis: int = 1) -> bytes:
    """Maximum-intensity projections of the masks of some voxels, as in the paper's appendix: a PNG."""
    side = int(np.ceil(np.sqrt(len(voxels))))
    figure, plots = _figure(int(np.ceil(len(voxels) / side)), side)
    grey = np.pad(seen.inside.moving[0, 0].cpu().numpy(), seen.inside.xi.padding)
    flat = grey.ndim == 2
    kept = [n for n in range(grey.ndim) if flat or n != axis]
    aspect = _aspect(seen.moving_lattice(), kept)
    for number, voxel in enumerate(voxels):
        plot = plots[number // side][number % side]
        mask = seen.inside.masks([voxel])[0].cpu().numpy()
        projected = mask if flat else mask.max(axis)
        _show(plot, grey if flat else grey.mean(axis), aspect)
        _show(plot, projected, aspect, cmap="hot", alpha=_opacity(projected))
    return _png(figure)


def draw_certainty(seen: Explanation, certainty: Image) -> bytes:
    """The map of certainty beside the fixed image, middle slices: a PNG."""
    fixed = seen.inside.fixed[0, 0].cpu().numpy()
    flat = certainty.dim == 2
    columns = [0] if flat else [0, 1, 2]
    figure, plots = _figure(2, len(columns))
    for column, axis in enumerate(columns):
        kept = [n for n in range(certainty.dim) if flat or n != axis]
        aspect = _aspect(certainty.affine, kept)
        _show(plots[0][column], fixed if flat else fixed.take(fixed.shape[axis] // 2, axis), aspect)
        data = certainty.data if flat else certainty.data.take(certainty.shape[axis] // 2, axis)
        top = float(np.percentile(certainty.data, 99))
        shown = _show(plots[1][column], data, aspect, cmap="viridis", vmin=0, vmax=top)
    figure.colorbar(shown, ax=plots[1], label="spread of attention, mm")
    return _png(figure)


def draw_probe(
    seen: Explanation, trained: Probe, heat: Tensor, scores: dict[int, float], names: dict[int, str]
) -> bytes:
    """The probe's heat for each structure on the fixed image, in the slice where it is largest, up to twice the
    structure's threshold: a PNG."""
    fixed = seen.inside.fixed[0, 0].cpu().numpy()
    figure, plots = _figure(1, len(scores))
    for column, (label, score) in enumerate(scores.items()):
        map_ = (heat[column] / (2 * trained.thresholds[column])).clamp(0, 1).numpy()
        flat = map_.ndim == 2
        slices = None if flat else int(map_.sum((0, 1)).argmax())
        shown = map_ if slices is None else map_[..., slices]
        aspect = _aspect(seen.fixed_lattice(), [0, 1])
        _show(plots[0][column], fixed if slices is None else fixed[..., slices], aspect)
        _show(plots[0][column], shown, aspect, cmap="hot", vmin=0, vmax=1, alpha=shown)
        plots[0][column].set_title(f"{names.get(label, label)}: Dice {score:.2f}", fontsize=8)
    figure.suptitle(f"linear probe, mean Dice {mean_score(scores):.2f}", fontsize=9)
    return _png(figure)


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


def _show(plot: Any, data: Any, aspect: float, **options: Any) -> Any:
    """An array (x, y), x to the right, y upwards."""
    alpha = options.pop("alpha", None)
    given = {"cmap": "gray"} | options | ({} if alpha is None else {"alpha": np.asarray(alpha).T})
    return plot.imshow(np.asarray(data).T, origin="lower", aspect=aspect, interpolation="nearest", **given)


def _opacity(mask: Any) -> Any:
    top = float(np.max(mask))
    return np.sqrt(np.asarray(mask) / top) if top > 0 else np.zeros_like(mask)


def _aspect(lattice: Matrix, axes: Sequence[int]) -> float:
    size = np.linalg.norm(lattice[:-1, :-1], axis=0)
    return float(size[axes[1]] / size[axes[0]])


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def as_vectors(features: Tensor) -> Tensor:
    """(B, C, *shape) → (B, voxels, C)."""
    return features.flatten(2).mT
