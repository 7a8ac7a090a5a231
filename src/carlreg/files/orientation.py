"""The axis order and directions of an image: its own, and those closest to RAS."""

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
    flipped = [new for new, old in enumerate(order) if cosines[new, old] < 0]
    old_from_new = np.eye(4)[:, [*order, 3]]
    for new in flipped:
        old_from_new[order[new], [new, 3]] = -1, image.shape[order[new]] - 1
    data = np.ascontiguousarray(np.flip(image.data.transpose(order), tuple(flipped)))
    return Image(data, image.affine @ old_from_new, image.name)


def orientation(image: Image) -> str:
    """The direction of each array axis as a letter: "RAS" is right, anterior, superior; the closest if oblique."""
    cosines = np.diag([-1.0, -1.0, 1.0][: image.dim]) @ image.affine[:-1, :-1]  # RAS rows, array columns
    closest = np.abs(cosines).argmax(axis=0)
    return "".join(("LR", "PA", "IS")[row][int(cosines[row, axis] > 0)] for axis, row in enumerate(closest))
