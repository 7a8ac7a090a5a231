"""Maps from points to points, `compose` and `warp`.

The transform φ = Φ[moving, fixed] takes points of the fixed image to points of the moving image, both in unit
coordinates, so that moving ∘ φ resembles fixed: images are pulled back, points are pushed forward.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from carlreg import fast
from carlreg.errors import InputError
from carlreg.fast.precision import full_precision
from carlreg.geometry.grids import Interpolation, Outside, check_points, interpolate, voxel_points

Extrapolation = Literal["clamp", "mirror"]
Self = TypeVar("Self", bound="Transform")


@dataclass(frozen=True, eq=False)
class Transform(ABC):
    """A map from points of [0, 1]^D to points of R^D. Immutable; it contains one map per item of a batch.

    >>> phi(landmarks)        # (B, ..., D) → (B, ..., D)
    """

    @abstractmethod
    def __call__(self, points: Tensor) -> Tensor:
        """Push points (B, ..., D) forward."""

    def on_grid_of(self, image: Tensor) -> Tensor:
        """The map evaluated at an image's voxels: (B, *shape, D)."""
        return self(voxel_points(image))

    def map_tensors(self: Self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same transform with the function applied to every tensor in it."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{k: function(v) for k, v in values.items() if isinstance(v, Tensor)})

    def detach(self: Self) -> Self:
        return self.map_tensors(Tensor.detach)

    def to(self: Self, like: Tensor) -> Self:
        """Move to that tensor's device and dtype."""
        return self.map_tensors(lambda tensor: tensor.to(like))

    def __getitem__(self: Self, items: slice) -> Self:
        """Select items of the batch: `phi[:2]`."""
        if not isinstance(items, slice):
            raise TypeError(f"a transform is indexed by {items!r}; expected a slice: use phi[0:1] for one item")
        return self.map_tensors(lambda tensor: tensor if tensor.shape[0] == 1 else tensor[items])


@dataclass(frozen=True, eq=False)
class Identity(Transform):
    """x ↦ x."""

    def __call__(self, points: Tensor) -> Tensor:
        return points


@dataclass(frozen=True, eq=False)
class Affine(Transform):
    """x ↦ A x + b, with one matrix [A | b]."""

    matrix: Tensor  # (B, D, D+1)

    def __post_init__(self) -> None:
        if self.matrix.dim() != 3 or self.matrix.shape[2] != self.matrix.shape[1] + 1:
            raise InputError(f"an affine matrix has shape {tuple(self.matrix.shape)}; expected (B, D, D+1)")

    @classmethod
    def from_parts(cls, linear: Tensor, shift: Tensor) -> Affine:
        """From A, (B, D, D), and b, (B, D)."""
        return cls(torch.cat([linear, shift[..., None]], dim=-1))

    @classmethod
    def translation(cls, shift: Tensor) -> Affine:
        """x ↦ x + shift, for a shift (B, D)."""
        return cls.from_parts(torch.eye(shift.shape[-1]).to(shift).expand(len(shift), -1, -1), shift)

    @property
    def linear(self) -> Tensor:
        return self.matrix[..., :-1]

    @property
    def shift(self) -> Tensor:
        return self.matrix[..., -1]

    @full_precision
    def __call__(self, points: Tensor) -> Tensor:
        dim = self.matrix.shape[1]
        check_points(points, dim, len(self.matrix), "affine map")
        dtype = torch.promote_types(points.dtype, self.matrix.dtype)
        flat = points.reshape(points.shape[0], -1, dim).to(dtype)
        moved = flat @ self.linear.to(dtype).mT + self.shift[:, None].to(dtype)
        return moved.reshape(moved.shape[0], *points.shape[1:])

    @full_precision
    def inverse(self) -> Affine:
        """The inverse map, for D up to 3; that of a singular map is not finite."""
        # Cofactors over determinant: `torch.linalg.inv` synchronises with the device, which a CUDA graph cannot.
        dim = self.matrix.shape[1]
        whole = torch.eye(3, dtype=self.matrix.dtype, device=self.matrix.device).repeat(len(self.matrix), 1, 1)
        whole[:, :dim, :dim] = self.linear

        def rolled(rows: int, columns: int) -> Tensor:
            return whole.roll((-rows, -columns), dims=(1, 2))

        cofactors = rolled(1, 1) * rolled(2, 2) - rolled(1, 2) * rolled(2, 1)
        determinant = (whole * cofactors)[:, :1].sum(dim=2, keepdim=True)
        linear = (cofactors.mT / determinant)[:, :dim, :dim]
        return Affine.from_parts(linear, -(linear @ self.shift[..., None])[..., 0])


@dataclass(frozen=True, eq=False)
class Scaling(Transform):
    """x ↦ scale · x + shift along each axis, such as from an image's unit coordinates to those of its pooled image."""

    scale: Tensor  # (B, D)
    shift: Tensor  # (B, D)

    def __call__(self, points: Tensor) -> Tensor:
        check_points(points, self.scale.shape[1], len(self.scale), "scaling")
        shape = (len(self.scale), *(1,) * (points.dim() - 2), -1)
        return torch.addcmul(self.shift.reshape(shape), points, self.scale.reshape(shape))

    def inverse(self) -> Scaling:
        return Scaling(1 / self.scale, -self.shift / self.scale)


@dataclass(frozen=True, eq=False)
class DisplacementField(Transform):
    """x ↦ x + u(x), with u interpolated linearly between the voxels of a grid over [0, 1]^D.

    Outside the cube, "clamp" continues u by its border values; "mirror" is 2·u(clip x) − u(reflect x), which keeps
    the Jacobian continuous across the faces (Appendix, Improved Extrapolation of Displacement Fields).
    """

    displacement: Tensor  # (B, D, *shape), unit coordinates
    extrapolate: Extrapolation = "clamp"

    def __post_init__(self) -> None:
        field = self.displacement
        if field.dim() < 3 or field.shape[1] != field.dim() - 2:
            raise InputError(f"a displacement field has shape {tuple(field.shape)}; expected (B, D, *shape)")
        if self.extrapolate not in ("clamp", "mirror"):
            raise InputError(f"unknown extrapolation {self.extrapolate!r}; expected 'clamp' or 'mirror'")

    def __call__(self, points: Tensor) -> Tensor:
        check_points(points, self.displacement.shape[1], len(self.displacement), "field")
        moved = fast.sample(self.displacement, points, mirror=self.extrapolate == "mirror", add=True)
        if moved is not None:
            return moved
        inside = points.clamp(0, 1)
        if self.extrapolate == "clamp":
            return points + self._sample(inside)
        # Reflect, then clip: beyond one width of the cube, the opposite face is used.
        reflected = (2 * inside - points).clamp(0, 1)
        return points + 2 * self._sample(inside) - self._sample(reflected)

    def on_grid_of(self, image: Tensor) -> Tensor:
        if image.shape[2:] != self.displacement.shape[2:]:
            return super().on_grid_of(image)
        # The same voxels: no need to interpolate.
        return voxel_points(self.displacement) + self.displacement.movedim(1, -1)

    def _sample(self, points: Tensor) -> Tensor:
        return interpolate(self.displacement, points).movedim(1, -1)


@dataclass(frozen=True, eq=False)
class Composition(Transform):
    """x ↦ first(second(…(x))): the last transform acts first. Use `compose` to build one."""

    transforms: tuple[Transform, ...]

    def __call__(self, points: Tensor) -> Tensor:
        for transform in reversed(self.transforms):
            points = transform(points)
        return points

    def on_grid_of(self, image: Tensor) -> Tensor:
        *outer, inner = self.transforms
        return Composition(tuple(outer))(inner.on_grid_of(image))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Composition:
        return Composition(tuple(transform.map_tensors(function) for transform in self.transforms))


@full_precision
def compose(*transforms: Transform) -> Transform:
    """compose(f, g)(x) = f(g(x)). Flattens nested compositions and multiplies adjacent linear maps of one class."""
    parts: list[Transform] = []
    for transform in transforms:
        for part in transform.transforms if isinstance(transform, Composition) else (transform,):
            if isinstance(part, Identity):
                continue
            outer = parts[-1] if parts else None
            if isinstance(part, Affine) and isinstance(outer, Affine):
                shift = outer.linear @ part.shift[..., None] + outer.shift[..., None]
                parts[-1] = Affine.from_parts(outer.linear @ part.linear, shift[..., 0])
            elif isinstance(part, Scaling) and isinstance(outer, Scaling):
                parts[-1] = Scaling(outer.scale * part.scale, outer(part.shift[:, None])[:, 0])
            else:
                parts.append(part)
    if not parts:
        return Identity()
    return parts[0] if len(parts) == 1 else Composition(tuple(parts))


def warp(
    image: Tensor, transform: Transform, *, like: Tensor, mode: Interpolation = "linear", outside: Outside = "border"
) -> Tensor:
    """image ∘ transform, sampled on the voxels of `like`: (B, C, *image) → (B, C, *like).

    >>> warped = warp(moving, phi, like=fixed)
    """
    return interpolate(image, transform.on_grid_of(like), mode=mode, outside=outside)
