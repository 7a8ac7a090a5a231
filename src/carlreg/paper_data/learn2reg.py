"""Learn2Reg AbdomenCTCT: abdominal CT, affinely aligned and resampled to 192 × 160 × 256, with 13 labelled organs.

Layout, as distributed by the challenge:

    AbdomenCTCT_dataset.json
    imagesTr/AbdomenCTCT_0001_0000.nii.gz    imagesTs/…
    labelsTr/AbdomenCTCT_0001_0000.nii.gz

The JSON file lists the training images under "training" and the validation pairs under "registration_val". The
challenge keeps the labels of the test pairs: their results are submitted as displacements. Preprocessing is that of
Abdomen1K.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from carlreg.errors import InputError
from carlreg.files.images import PathLike
from carlreg.files.tables import Pair, stem
from carlreg.paper_data.abdomen1k import preprocess
from carlreg.paper_data.dataset import Dataset, Subject, complete, every_pair, pair_of

ORGANS = (
    *("spleen", "right kidney", "left kidney", "gallbladder", "oesophagus", "liver", "stomach", "aorta"),
    *("inferior vena cava", "portal and splenic veins", "pancreas", "right adrenal", "left adrenal"),
)
LABELS = dict(enumerate(ORGANS, start=1))
FILE = "AbdomenCTCT_dataset.json"
KEYS = {"train": "training", "val": "registration_val", "test": "registration_test"}
LAYOUT = f"{FILE}, imagesTr/ and labelsTr/"


def pairs(root: PathLike, split: str = "val") -> list[Pair]:
    """The pairs of the JSON file, for "train" all ordered pairs of its training images."""
    root = Path(root)
    rows = [{column: _subject(root, name) for column, name in row.items()} for row in _listed(root, KEYS[split])]
    if split == "train":
        return complete(every_pair([row["image"] for row in rows]), root, LAYOUT)
    return complete([pair_of(row["fixed"], row["moving"]) for row in rows], root, LAYOUT)


def _listed(root: Path, key: str) -> list[dict[str, str]]:
    path, names = root / FILE, ("image",) if key == "training" else ("fixed", "moving")
    if not path.is_file():
        raise InputError(f"{root} lacks {FILE}; expected {LAYOUT}")
    try:
        rows: Any = json.loads(path.read_text(encoding="utf-8")).get(key)
    except (ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}); expected the challenge's own file") from error
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{path} lists nothing under {key!r}; expected the challenge's own file")
    if any(not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in names) for row in rows):
        raise InputError(f"{path} has rows under {key!r} without {' and '.join(names)}; expected the challenge's file")
    return [{name: row[name] for name in names} for row in rows]


def _subject(root: Path, name: str) -> Subject:
    image = root / name
    labels = image.parent.with_name(image.parent.name.replace("images", "labels")) / image.name
    number = stem(image).removeprefix("AbdomenCTCT_").removesuffix("_0000")
    return Subject(number, image, labels if "Tr" in image.parent.name or labels.is_file() else None)


DATASET = Dataset(pairs, LABELS, preprocess)
