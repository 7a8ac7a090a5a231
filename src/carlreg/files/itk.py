"""SimpleITK, imported where it is used: its axis order, its positions, and its errors in one line."""

import os
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from carlreg.errors import DependencyError
from carlreg.files.checks import Matrix


def simpleitk() -> Any:
    """The module SimpleITK."""
    try:
        import SimpleITK
    except ImportError as error:
        raise DependencyError("this file format needs SimpleITK: pip install SimpleITK") from error
    return SimpleITK


def read_header(path: str | os.PathLike[str]) -> Any:
    """A SimpleITK reader that knows size, type and positions of an image file, but has not read its voxels."""
    reader = simpleitk().ImageFileReader()
    reader.SetFileName(str(path))
    reader.ReadImageInformation()
    return reader


def affine_of(image: Any) -> Matrix:
    """(D + 1, D + 1), from indices to world points, of a SimpleITK image or reader."""
    dim = image.GetDimension()
    affine = np.eye(dim + 1)
    affine[:-1, :-1] = np.reshape(image.GetDirection(), (dim, dim)) * np.asarray(image.GetSpacing())
    affine[:-1, -1] = image.GetOrigin()
    return affine


def place(image: Any, affine: Matrix) -> Any:
    """A SimpleITK image, moved to where `affine` puts its voxels."""
    spacing = np.linalg.norm(affine[:-1, :-1], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetDirection((affine[:-1, :-1] / spacing).ravel().tolist())
    image.SetOrigin(affine[:-1, -1].tolist())
    return image


def vector_image(vectors: npt.NDArray[Any], affine: Matrix) -> Any:
    """A SimpleITK image of vectors (*shape, D) on the lattice that `affine` describes."""
    return place(simpleitk().GetImageFromArray(np.ascontiguousarray(itk_order(vectors)), isVector=True), affine)


def itk_order(vectors: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(x, y, z, D) to (z, y, x, D) and back, without a copy: ITK's arrays have the last axis first."""
    dim = vectors.ndim - 1
    return vectors.transpose(*reversed(range(dim)), dim)


def reason(error: Exception) -> str:
    """The last line of an error of SimpleITK's, whose messages are pages long and name its source files."""
    text = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)  # KeyError adds quotes
    last = (text.strip() or type(error).__name__).splitlines()[-1]
    return re.sub(r"(sitk::|ITK )ERROR: |\w+\(0x[0-9a-f]+\): |\[nrrd\] \w+: ", "", last).strip(" .")
