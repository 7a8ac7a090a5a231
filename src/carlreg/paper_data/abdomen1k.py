"""AbdomenCT-1K: abdominal CT of very different fields of view, with four labelled organs.

Layout, as it is handed out:

    AbdomenCT-1K-ImagePart1/Case_00001_0000.nii.gz   (and Part2, Part3: any folder of that beginning)
    Mask/Case_00001.nii.gz

The paper trains on the first 800 cases, validates on 900–1000, and tests on 30 pairs of the cases 800–900, which its
appendix lists. It stretches every image to 175³ and divides by the maximum.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from carlreg.files.images import Image, PathLike
from carlreg.files.orientation import to_closest_ras
from carlreg.files.tables import Pair, Subject, every_pair, pair_of, require
from carlreg.geometry.resizing import resize

GRID = (175, 175, 175)
LABELS = {1: "liver", 2: "kidney", 3: "spleen", 4: "pancreas"}
SPLITS = {"train": range(1, 800), "val": range(900, 1000), "test": range(800, 900)}
LAYOUT = "AbdomenCT-1K-ImagePart*/Case_00800_0000.nii.gz and Mask/Case_00800.nii.gz"
# fmt: off
TEST_PAIRS = (
    (817, 872), (808, 832), (815, 863), (857, 860), (883, 848), (826, 812),
    (862, 803), (849, 855), (877, 800), (857, 834), (829, 875), (813, 840),
    (803, 802), (803, 883), (869, 801), (848, 887), (827, 854), (803, 867),
    (828, 856), (863, 870), (829, 844), (829, 886), (828, 858), (837, 802),
    (853, 871), (882, 812), (823, 880), (837, 815), (842, 864), (854, 864),
)
# fmt: on
"""The appendix's list, moving case first, fixed case second."""


def check(root: PathLike) -> None:
    """Refuse a folder in which an image or a label map of the 30 test pairs is missing."""
    cases = sorted({case for pair in TEST_PAIRS for case in pair})
    found = [_subject(Path(root), case) for case in cases]
    require([path for one in found for path in (one.image, one.labels) if path], Path(root), LAYOUT)


def subjects(root: PathLike, split: str = "test") -> list[Subject]:
    """The cases of a split that are there: some numbers never had a case."""
    found = [_subject(Path(root), case) for case in SPLITS[split]]
    present = [one for one in found if one.image.is_file()]
    require([one.image for one in present], Path(root), LAYOUT)
    return present


def pairs(root: PathLike, split: str = "test") -> list[Pair]:
    """The paper's 30 pairs; of another split, all ordered pairs."""
    if split != "test":
        return every_pair(subjects(root, split))
    check(root)
    return [pair_of(_subject(Path(root), fixed), _subject(Path(root), moving)) for moving, fixed in TEST_PAIRS]


def preprocess(image: Image) -> Tensor:
    """(1, 1, 175, 175, 175): stretched, and divided by its maximum. Air stays below 0."""
    data = torch.from_numpy(to_closest_ras(image).data.astype("float32"))[None, None]
    return resize(data, GRID) / data.max()


def _subject(root: Path, case: int) -> Subject:
    name = f"Case_{case:05}"
    images = sorted(root.glob(f"AbdomenCT-1K-ImagePart*/{name}_0000.nii.gz"))
    image = images[0] if images else root / "AbdomenCT-1K-ImagePart1" / f"{name}_0000.nii.gz"
    return Subject(f"{case:05}", image, root / "Mask" / f"{name}.nii.gz")
