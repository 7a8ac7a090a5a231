"""Weights, images and fields by closed formulas, so that both implementations get the same numbers and none is stored.

Everything is a function of the index alone, with no random numbers. Needs numpy only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float32]

# A sine of the index itself would make each weight matrix of rank two (sin(a + b) = sin a cos b + cos a sin b), which
# forgives many mistakes. The square of the index, modulo a prime, gives full rank, and integers are exact everywhere.
PRIME = 65521
SINES = np.sin(2 * np.pi * np.arange(PRIME) / PRIME).astype(np.float32)

# Sides differ where the authors' code allows it, and some are odd. Theirs needs at least 17 where a U-Net works.
SHAPES: dict[str, tuple[int, ...]] = {
    "encoder-2d": (24, 19),
    "encoder-3d": (9, 12, 11),
    "broad-3d": (9, 12, 11),
    "unet-2d": (40, 35),
    "unet-3d": (20, 17, 18),
    "similarity-2d": (40, 35),
    "similarity-3d": (20, 23, 18),
    "diffusion-2d": (24, 24),
    "diffusion-3d": (12, 12, 12),
    "regularity-2d": (30, 26),
    "regularity-3d": (10, 12, 9),
    "carl-2d": (67, 60),
    "carl-3d": (40, 33, 36),
    "carl-rot-3d": (36, 33, 38),
    "gradicon-2d": (68, 75),
}


def sines(count: int, order: int) -> Array:
    """`count` numbers in [-1, 1], of mean square ½; another `order` gives other numbers."""
    i = np.arange(count, dtype=np.int64)
    return SINES[(40503 * (i * i % PRIME) + (7919 * order + 104) * i + 2741 * order + 17) % PRIME]


def parameter(name: str, shape: Sequence[int], order: int) -> NDArray[np.generic]:
    """The value of one entry of a state dict."""
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    values = sines(math.prod(shape), order).reshape(shape)
    if "batchnorms" in name.lower():
        if name.endswith("running_var"):
            return np.float32(1) + np.float32(0.5) * values
        if name.endswith("weight"):
            return np.float32(1) + np.float32(0.3) * values
        return np.float32(0.2) * values
    if name.endswith("bias"):
        return np.float32(0.1) * values
    if "lastConv" in name:
        # Taps that mostly agree give smoother fields; rough ones multiply rounding errors at every step.
        first_tap = (slice(None), slice(None), *(slice(1) for _ in shape[2:]))
        values = values[first_tap] + np.float32(0.5) * values
    # As many terms as enter one output voxel: a transposed convolution of stride 2 sees one tap in 2 per axis.
    terms = shape[0] * math.prod(n // 2 for n in shape[2:]) if "upConvs" in name else math.prod(shape[1:])
    return np.float32(gain(name) * math.sqrt(2 / terms)) * values


def gain(name: str) -> float:
    """What keeps the outputs telling: features that differ from voxel to voxel, so that attention is not the same
    everywhere, and refinements that move points by some voxels, but not so far that rounding errors grow on the way.
    """
    if "lastConv" in name:
        return 0.6 if "netPhi" in name else 0.3  # coarse steps have fewer, larger voxels
    return 12.0 if "convs.0." in name else 1.0


def fill(shapes: Mapping[str, Sequence[int]]) -> dict[str, NDArray[np.generic]]:
    """A whole state dict from its names and shapes, in their order."""
    return {name: parameter(name, shape, order) for order, (name, shape) in enumerate(shapes.items())}


def image(shape: Sequence[int], which: int) -> Array:
    """Some blobs of different sizes and a faint wave: (1, 1, *shape), values about 0 to 1.

    `which` moves each blob a little. No rotation of the grid maps the image to anything like itself.
    """
    x = _unit_points(shape)
    total = 0.05 + 0.05 * np.sin(sum((7 + 4 * d) * x_d for d, x_d in enumerate(x)) + which)
    for k in range(1, 6):
        centre = [0.5 + 0.4 * math.sin(2.4 * k + 1.9 * k * d) + 0.04 * which * math.cos(k + d) for d in range(len(x))]
        distance = sum((x_d - c) ** 2 for x_d, c in zip(x, centre, strict=True))
        total = total + (0.3 + 0.12 * k) * np.exp(-distance / (2 * (0.07 + 0.02 * k) ** 2))
    return total.astype(np.float32)[None, None]


def field(shape: Sequence[int], which: int, size: float = 0.06) -> Array:
    """A smooth displacement of up to `size` in unit coordinates: (1, D, *shape)."""
    x = _unit_points(shape)
    waves = [
        np.sin(2 * np.pi * sum((1 + (c + d + which) % 2) * x[d] for d in range(len(shape))) + c + 1.3 * which)
        for c in range(len(shape))
    ]
    return (size * np.stack(waves)).astype(np.float32)[None]


def noise(shape: Sequence[int]) -> Array:
    """In the place of Gaussian noise: mean square 1, unrelated from voxel to voxel."""
    return np.float32(math.sqrt(2)) * sines(math.prod(shape), 1).reshape(shape)


def thin(values: ArrayLike, most: int = 6000) -> Array:
    """About `most` values spread over a larger array. The step divides no side, so that no place is left out."""
    flat = np.asarray(values, np.float32).reshape(-1)
    steps = (1, 7, 13, 29, 59, 127)
    return flat[:: next(s for s in steps if flat.size // s <= most)]


def to_text(shapes: Mapping[str, Sequence[int]]) -> NDArray[np.str_]:
    return np.array(json.dumps(shapes))


def from_text(text: NDArray[np.str_]) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = json.loads(str(text))
    return shapes


def _unit_points(shape: Sequence[int]) -> list[NDArray[np.float64]]:
    return list(np.meshgrid(*(np.linspace(0, 1, n) for n in shape), indexing="ij"))
