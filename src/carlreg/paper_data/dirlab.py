"""DIR-Lab COPD: ten pairs of chest CT, inhalation and exhalation, with 300 landmarks each.

Layout, as distributed, each case unpacked into a folder of any depth:

    copd1/copd1_iBHCT.img    copd1/copd1_300_iBH_xyz_r1.txt
    copd1/copd1_eBHCT.img    copd1/copd1_300_eBH_xyz_r1.txt

A volume holds 16-bit little-endian integers, x fastest, without a header: sizes and spacings are those published with
the dataset. A landmark file has a row x, y, z of voxel indices that count from 1. DIR-Lab has no lung masks: a network
trained as in the paper needs one beside each volume, copd1_iBHCT_mask.nii.gz, on its grid.

The inhalation is the moving image, the exhalation the fixed one. The paper registers scans of the same ten people in
higher resolution, from COPDGene, and measures at the same landmarks. Preprocessing is that of COPDGene.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from carlreg.errors import InputError
from carlreg.files.images import Image, Matrix, PathLike, from_array, map_points
from carlreg.files.tables import Pair
from carlreg.paper_data.copdgene import preprocess
from carlreg.paper_data.dataset import Dataset, complete

_SLICES = (121, 102, 126, 126, 131, 119, 112, 115, 116, 135)
_SIDES = (0.625, 0.645, 0.652, 0.590, 0.647, 0.633, 0.625, 0.586, 0.644, 0.742)
CASES = {f"copd{n}": case for n, case in enumerate(zip(_SLICES, _SIDES, strict=True), start=1)}
"""Number of slices, and voxel size within a slice in mm. Slices have 512 × 512 voxels and are 2.5 mm apart."""
IN_PLANE, SLICE = 512, 2.5
LAYOUT = "copd1/copd1_iBHCT.img, copd1_eBHCT.img, copd1_300_iBH_xyz_r1.txt, copd1_300_eBH_xyz_r1.txt, to copd10"


def pairs(root: PathLike, split: str = "test") -> list[Pair]:
    """The ten pairs, with their landmarks."""
    root, found = Path(root), []
    for case in CASES:
        files: dict[str, Any] = {}
        for side, phase in (("fixed", "e"), ("moving", "i")):
            image = _find(root, case, f"{case}_{phase}BHCT.img")
            mask = image.with_name(f"{image.stem}_mask.nii.gz")
            points = _find(root, case, f"{case}_300_{phase}BH_xyz_r1.txt")
            files |= {side: image, f"{side}_landmarks": points}
            files |= {f"{side}_mask": mask} if mask.is_file() else {}
        found.append(Pair(case, **files))
    return complete(found, root, LAYOUT)


def read(path: PathLike) -> Image:
    """Read a volume in Hounsfield units. The first slice is the uppermost: the third axis runs downwards."""
    path = Path(path)
    match = re.match(r"copd\d+", path.name)
    if match is None or match[0] not in CASES:
        raise InputError(f"{path} is not named after one of the ten cases; expected a name like copd1_iBHCT.img")
    slices, side = CASES[match[0]]
    shape = (IN_PLANE, IN_PLANE, slices)
    expected = 2 * IN_PLANE * IN_PLANE * slices
    if path.stat().st_size != expected:
        raise InputError(f"{path} has {path.stat().st_size} bytes; expected {expected} for {shape} voxels of 16 bits")
    data = np.fromfile(path, "<i2").reshape(shape[::-1]).T
    if data.min() >= 0:  # stored 1024 above Hounsfield units
        data = data - 1024
    return from_array(data, np.diag([side, side, -SLICE, 1.0]), name=str(path))


def read_landmarks(path: PathLike, image: Image) -> Matrix:
    """Landmarks (N, 3) in world millimetres, from voxel indices that count from 1."""
    try:
        index = np.loadtxt(path, dtype=np.float64, ndmin=2)[:, :3]
    except (ValueError, IndexError) as error:
        raise InputError(f"{path} cannot be read: {error}; expected rows of three numbers") from error
    return map_points(image.index_to_world(), index - 1)


def _find(root: Path, case: str, name: str) -> Path:
    return next(iter(sorted(root.rglob(name))), root / case / name)


DATASET = Dataset(pairs, {}, preprocess, read, read_landmarks)
