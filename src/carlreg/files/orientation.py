"""The axis order and directions of an image: its own, and those closest to RAS."""

from __future__ import annotations

import itertools

import numpy as np

from carlreg.files.images import Image


def to_closest_ras(image: Image) -> Image:
    """The same voxels at the same world positions, with array axes that run closest to right, anterior, superior.

    The order of the axes is the one with the largest sum of |cosines|. 2-D images are returned as they are.
    """
    if image.dim == 2:
        return image
    cosines = np.diag([-1.0, -1.0, 1.0]) @ image.affine[:-1, :-1] / np.array(image.spacing)  # RAS rows, array columns

    def quality(order: tuple[int, ...]) -> tuple[float, ...]:
        chosen = cosines[:, order]
        chosen = chosen * np.sign(chosen.diagonal())
        # The matrix itself decides at 45°, in the same way however the image is stored.
        return (round(float(chosen.trace()), 6), *chosen.ravel().round(6).tolist())

    order = max(itertools.permutations(range(3)), key=quality)
    old_from_new = np.zeros((4, 4))
    old_from_new[3, 3] = 1
    flipped = []
    for new, old in enumerate(order):
        backwards = cosines[new, old] < 0
        old_from_new[old, new] = -1 if backwards else 1
        old_from_new[old, 3] = image.shape[old] - 1 if backwards else 0
        flipped += [new] if backwards else []
    data = np.ascontiguousarray(np.flip(image.data.transpose(order), tuple(flipped)))
    return Image(data, image.affine @ old_from_new, image.name)


def orientation(image: Image) -> str:
    """The direction of each array axis as a letter: "RAS" is right, anterior, superior; the closest if oblique."""
    letters = ("LR", "PA", "IS") if image.dim == 3 else ("LR", "PA")
    words = []
    for axis in range(image.dim):
        cosines = np.diag([-1.0, -1.0, 1.0][: image.dim]) @ image.affine[:-1, axis]
        row = int(np.abs(cosines).argmax())
        words.append(letters[row][int(cosines[row] > 0)])
    return "".join(words)
