"""AbdomenCT-1K: abdominal CT of very different fields of view, with four labelled organs.

Layout, as distributed:

    AbdomenCT-1K-ImagePart1/Case_00001_0000.nii.gz   (and Part2, Part3)
    Mask/Case_00001.nii.gz

The paper trains on the first 800 cases, validates on 900–1000, and tests on 30 pairs of the cases 800–900, listed in
its appendix. It stretches every image to 175³ and divides by the maximum.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from carlreg.files.images import Image, PathLike
from carlreg.files.tables import Pair
from carlreg.paper_data.dataset import Dataset, Subject, complete, every_pair, pair_of, stretch

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
"""The pairs of the appendix: the moving case, then the fixed one."""


def pairs(root: PathLike, split: str = "test") -> list[Pair]:
    """The paper's 30 pairs; for another split, all ordered pairs of its cases. Some numbers have no case."""
    root = Path(root)
    if split == "test":
        found = [pair_of(_subject(root, fixed), _subject(root, moving)) for moving, fixed in TEST_PAIRS]
    else:
        cases = [_subject(root, case) for case in SPLITS[split]]
        found = every_pair([case for case in cases if case.image.is_file()])
    return complete(found, root, LAYOUT)


def preprocess(image: Image, mask: Image | None = None) -> tuple[Tensor, str]:
    """(1, 1, 175, 175, 175): stretched, and divided by its maximum. Air stays below 0. A mask has no effect."""
    return stretch(image, GRID, maximum=1.0)


def _subject(root: Path, case: int) -> Subject:
    name = f"Case_{case:05}"
    images = sorted(root.glob(f"AbdomenCT-1K-ImagePart*/{name}_0000.nii.gz"))
    image = images[0] if images else root / "AbdomenCT-1K-ImagePart1" / f"{name}_0000.nii.gz"
    return Subject(f"{case:05}", image, root / "Mask" / f"{name}.nii.gz")


DATASET = Dataset(pairs, LABELS, preprocess)
