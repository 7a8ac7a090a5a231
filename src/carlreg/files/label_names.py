"""Names of labels: well-known tables, and files that users have.

A file has a row for each label: its number, then its name. A header may name the columns (`label`, `index`, `id`,
`value` or `number`, and `name` or `structure`); columns of other names are ignored. FreeSurfer's and ITK-SNAP's colour
tables are read too.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from carlreg.errors import InputError
from carlreg.files.atomic import PathLike
from carlreg.files.tables import read_text

Names = Mapping[int, str]
NUMBER = re.compile(r"label|index|id|value|number|label (number|value|id)")
NAME = re.compile(r"name|structure|label name|organ|region")


def read_names(source: PathLike | Names) -> dict[int, str]:
    """Names by label from a file, from one of `TABLES` by its name, or as they are.

    >>> read_names("btcv")[6]
    'liver'
    """
    if isinstance(source, Mapping):
        return {int(label): str(name) for label, name in source.items()}
    if str(source).lower() in TABLES:
        return dict(TABLES[str(source).lower()])
    path = Path(source)
    if not path.exists():
        known = ", ".join(sorted(TABLES))
        raise InputError(f"{path} does not exist; expected a CSV file with the columns label,name, or one of {known}")
    lines = [line for line in read_text(path, "a table of label names", InputError).splitlines() if line.strip()]
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    names = _read_columns(lines) or _read_colour_table(lines)
    if not names:
        raise InputError(f"{path} names no labels; expected a row for each: its number, then its name")
    return names


def guess_names(labels: Collection[int]) -> dict[int, str]:
    """FreeSurfer's names if the labels can hardly be anything else, otherwise none.

    Its numbers have gaps that counted labels fill, and run far beyond their count.
    """
    known = [label for label in labels if label]
    sure = len(known) >= 10 and max(known) > 40 and set(known) <= set(FREESURFER)
    return {label: FREESURFER[label] for label in known} if sure else {}


def _read_columns(lines: list[str]) -> dict[int, str]:
    """The names of a table with separators; empty if it is none."""
    if not lines or not any(mark in lines[0] for mark in ",;\t"):
        return {}
    rows = list(csv.reader(lines, delimiter=max(",;\t", key=lines[0].count), skipinitialspace=True))
    head = [cell.strip().lower().replace("_", " ") for cell in rows[0]]
    if _number(rows[0][0]) is None:
        numbers = [n for n, cell in enumerate(head) if NUMBER.fullmatch(cell)]
        names = [n for n, cell in enumerate(head) if NAME.fullmatch(cell)]
        if not numbers or not names:
            return {}
        columns, rows = (numbers[0], names[0]), rows[1:]
    else:
        columns = (0, 1)
    wide = [row for row in rows if len(row) > max(columns)]
    pairs = [(_number(row[columns[0]]), " ".join(row[columns[1]].split())) for row in wide]
    return {number: name for number, name in pairs if number is not None and name}


def _read_colour_table(lines: list[str]) -> dict[int, str]:
    """The names of a table without separators: the number first, the name in quotes or second."""
    names = {}
    for line in lines:
        cells, quoted = line.split(), re.search('"([^"]*)"', line)
        if len(cells) > 1 and (number := _number(cells[0])) is not None:
            names[number] = quoted[1] if quoted else cells[1]
    return {number: name for number, name in names.items() if _number(name) is None}


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\s*\d{1,9}\s*", text) else None


def _both_sides(names: Mapping[str, tuple[int, int]]) -> dict[int, str]:
    """Labels of the left and of the right half."""
    sides = ("left", "right")
    return {pair[n]: f"{sides[n]} {name}" for name, pair in names.items() for n in (0, 1)}


def _counted(*names: str) -> dict[int, str]:
    return dict(enumerate(names, 1))


FREESURFER = {
    14: "third ventricle", 15: "fourth ventricle", 16: "brain stem", 24: "cerebrospinal fluid", 72: "fifth ventricle",
    77: "white matter hypointensities", 80: "non-white-matter hypointensities", 85: "optic chiasm",
    251: "corpus callosum, posterior", 252: "corpus callosum, mid-posterior", 253: "corpus callosum, central",
    254: "corpus callosum, mid-anterior", 255: "corpus callosum, anterior",
    **_both_sides({
        "cerebral white matter": (2, 41), "cerebral cortex": (3, 42), "lateral ventricle": (4, 43),
        "inferior lateral ventricle": (5, 44), "cerebellar white matter": (7, 46), "cerebellar cortex": (8, 47),
        "thalamus": (10, 49), "caudate": (11, 50), "putamen": (12, 51), "pallidum": (13, 52), "hippocampus": (17, 53),
        "amygdala": (18, 54), "accumbens": (26, 58), "ventral diencephalon": (28, 60), "vessel": (30, 62),
        "choroid plexus": (31, 63),
    }),
    **_both_sides({name: (1000 + n, 2000 + n) for n, name in {
        1: "banks of the superior temporal sulcus", 2: "caudal anterior cingulate", 3: "caudal middle frontal",
        5: "cuneus", 6: "entorhinal", 7: "fusiform", 8: "inferior parietal", 9: "inferior temporal",
        10: "isthmus cingulate", 11: "lateral occipital", 12: "lateral orbitofrontal", 13: "lingual",
        14: "medial orbitofrontal", 15: "middle temporal", 16: "parahippocampal", 17: "paracentral",
        18: "pars opercularis", 19: "pars orbitalis", 20: "pars triangularis", 21: "pericalcarine", 22: "postcentral",
        23: "posterior cingulate", 24: "precentral", 25: "precuneus", 26: "rostral anterior cingulate",
        27: "rostral middle frontal", 28: "superior frontal", 29: "superior parietal", 30: "superior temporal",
        31: "supramarginal", 32: "frontal pole", 33: "temporal pole", 34: "transverse temporal", 35: "insula",
    }.items()}),
}  # fmt: skip
_ABDOMEN = ("spleen", "right kidney", "left kidney", "gallbladder", "oesophagus", "liver", "stomach", "aorta")
_BONES = {
    "humerus": (69, 70), "scapula": (71, 72), "clavicle": (73, 74), "femur": (75, 76), "hip": (77, 78),
    "gluteus maximus": (80, 81), "gluteus medius": (82, 83), "gluteus minimus": (84, 85), "autochthon": (86, 87),
    "iliopsoas": (88, 89), **{f"rib {n}": (91 + n, 103 + n) for n in range(1, 13)},
}  # fmt: skip
_VERTEBRAE = ["S1", *(f"L{n}" for n in range(5, 0, -1)), *(f"T{n}" for n in range(12, 0, -1))]
TABLES: Mapping[str, Names] = {
    "freesurfer": FREESURFER,
    "btcv": _counted(
        *_ABDOMEN, "inferior vena cava", "portal and splenic veins", "pancreas", "right adrenal", "left adrenal"
    ),
    "amos": _counted(
        *_ABDOMEN, "inferior vena cava", "pancreas", "right adrenal", "left adrenal", "duodenum", "bladder",
        "prostate or uterus",
    ),
    "acdc": _counted("right ventricle", "myocardium", "left ventricle"),
    "hippocampus": _counted("anterior hippocampus", "posterior hippocampus"),
    "totalsegmentator": {
        **_counted(
            "spleen", "right kidney", "left kidney", "gallbladder", "liver", "stomach", "pancreas", "right adrenal",
            "left adrenal", "left upper lobe of the lung", "left lower lobe of the lung",
            "right upper lobe of the lung", "right middle lobe of the lung", "right lower lobe of the lung",
            "oesophagus", "trachea", "thyroid", "small bowel", "duodenum", "colon", "bladder", "prostate",
            "left kidney cyst", "right kidney cyst", "sacrum",
            *(f"vertebra {name}" for name in [*_VERTEBRAE, *(f"C{n}" for n in range(7, 0, -1))]),
            "heart", "aorta", "pulmonary vein", "brachiocephalic trunk", "right subclavian artery",
            "left subclavian artery", "right common carotid artery", "left common carotid artery",
            "left brachiocephalic vein", "right brachiocephalic vein", "left atrial appendage", "superior vena cava",
            "inferior vena cava", "portal and splenic veins", "left iliac artery", "right iliac artery",
            "left iliac vein", "right iliac vein",
        ),
        **_both_sides(_BONES), 79: "spinal cord", 90: "brain", 91: "skull", 116: "sternum", 117: "costal cartilages",
    },
}  # fmt: skip
"""Well-known tables by name: FreeSurfer's numbers, and those of the BTCV, AMOS and ACDC challenges, of the hippocampus
of the Medical Segmentation Decathlon, and of TotalSegmentator 2."""
