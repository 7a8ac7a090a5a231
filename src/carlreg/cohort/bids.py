"""BIDS in and out: the images of a dataset by the names of subjects and sessions, and results as a derivative of it.

Result files are named by the moving image and by the space that they lie in:

    sub-01/ses-02/anat/sub-01_ses-02_space-sub01ses01_desc-registered_T1w.nii.gz     the warped image
    sub-01/ses-02/anat/sub-01_ses-02_space-sub01ses01_desc-registered_T1w.json       the report of the registration
    sub-01/ses-02/anat/sub-01_ses-02_from-T1w_to-sub01ses01_mode-image_xfm.h5        resamples the moving image
    sub-01/ses-02/anat/sub-01_ses-02_from-sub01ses01_to-T1w_mode-image_xfm.h5        its inverse
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import carlreg
from carlreg.cohort.sources import against, between, read_fixed
from carlreg.errors import ExistsError, InputError, OutputError
from carlreg.files.atomic import write_atomically
from carlreg.files.folders import Subject
from carlreg.files.results import INVERSE, PAGE, REPORT, THUMBNAIL, TRANSFORM, WARP, WARPED, WARPED_LABELS, ResultFolder
from carlreg.files.tables import Pair, stem

VERSION = "1.9.0"
"""The version of the specification that the derivative follows."""
DESCRIPTION, IGNORED = "dataset_description.json", ".bidsignore"
USUAL = "T1w"
IMAGE = re.compile(r"(?P<entities>sub-[0-9A-Za-z]+(?:_[a-z]+-[0-9A-Za-z]+)*)_(?P<suffix>[0-9A-Za-z]+)\.nii(?:\.gz)?")


def find_bids_pairs(
    dataset: Path,
    *,
    suffix: str | None = None,
    fixed: Path | None = None,
    fixed_seg: Path | None = None,
    fixed_mask: Path | None = None,
    all_pairs: bool = False,
) -> list[Pair]:
    """The pairs of a BIDS dataset: each image with one `fixed` image, all pairs, or by default each later session of a
    subject with its first one. Images are those with this suffix: T1w, or the only one that there is.

    >>> find_bids_pairs(Path("dataset"), fixed=Path("template.nii.gz"))
    """
    if fixed is not None and all_pairs:
        raise InputError("a fixed image and all pairs were asked for; expected one of them, or neither")
    subjects = find_images(dataset, suffix)
    if fixed is not None:
        return against(read_fixed(fixed, fixed_seg, fixed_mask), subjects)
    if all_pairs:
        return between(subjects)
    by_subject = itertools.groupby(subjects, key=lambda one: one.name.partition("_")[0])
    pairs = [pair for _, (first, *later) in by_subject for pair in against(first, later)]
    if not pairs:
        advice = "expected --fixed IMAGE, to register all of them to it, or --all-pairs"
        raise InputError(f"no subject of {dataset} has several images to register to one another; {advice}")
    return pairs


def find_images(dataset: Path, suffix: str | None = None) -> list[Subject]:
    """The anatomical images of a dataset with this suffix, by subject and session, without results of `carl cohort`;
    label maps and masks that have the same entities belong to them."""
    if not dataset.is_dir():
        raise InputError(f"{dataset} is not a folder; expected a BIDS dataset: check the path")
    files = sorted(path for pattern in ("sub-*/anat/*", "sub-*/ses-*/anat/*") for path in dataset.glob(pattern))
    named = [(path, match) for path in files if (match := _raw(path.name))]
    present = sorted({match["suffix"] for _, match in named} - {"dseg", "mask"})
    if not present:
        raise InputError(f"{dataset} holds no image sub-*/anat/sub-*.nii.gz; expected a BIDS dataset")
    chosen = suffix or (USUAL if USUAL in present else present[0])
    if chosen not in present or (suffix is None and chosen != USUAL and len(present) > 1):
        given = f"no image {suffix}" if suffix else "no T1w image"
        raise InputError(f"{dataset} has {given}, but {', '.join(present)}; expected one of these as --suffix")
    beside = {(match["entities"], match["suffix"]): path for path, match in named}
    return [
        Subject(stem(path), path, beside.get((match["entities"], "dseg")), beside.get((match["entities"], "mask")))
        for path, match in named
        if match["suffix"] == chosen
    ]


def _raw(name: str) -> re.Match[str] | None:
    """The parts of an image's name; None for a registered image."""
    match = IMAGE.fullmatch(name)
    return None if match is None or "desc-registered" in match["entities"].split("_") else match


def result_folder(out: Path, pair: Pair) -> ResultFolder:
    """The folder of a pair's results in a derivative, which it may share with others, and the names of its files."""
    match = IMAGE.fullmatch(pair.moving.name)
    if match is None:
        raise InputError(f"{pair.moving} has not the name of a BIDS image; expected sub-LABEL_..._SUFFIX.nii.gz")
    entities, suffix = match["entities"], match["suffix"]
    parts = dict(part.split("-", 1) for part in entities.split("_"))
    session = [f"ses-{parts['ses']}"] if "ses" in parts else []
    space = space_of(pair.fixed)
    there, back = f"from-{suffix}_to-{space}_mode-image", f"from-{space}_to-{suffix}_mode-image"
    warped = f"{entities}_space-{space}_desc-registered_{suffix}"
    names = {
        WARPED: f"{warped}.nii.gz",
        WARPED_LABELS: f"{entities}_space-{space}_dseg.nii.gz",
        TRANSFORM: f"{entities}_{there}_xfm.h5",
        INVERSE: f"{entities}_{back}_xfm.h5",
        WARP: f"{entities}_{there}_xfm.nii.gz",
        REPORT: f"{warped}.json",
        PAGE: f"{warped}.html",
        THUMBNAIL: f"{warped}.jpg",
    }
    return ResultFolder(Path(out, f"sub-{parts['sub']}", *session, "anat"), names)


def space_of(fixed: Path) -> str:
    """The label of the space that a fixed image spans: what is alphanumeric of its entities, or of its name."""
    match = IMAGE.fullmatch(fixed.name)
    return re.sub(r"[^0-9A-Za-z]", "", match["entities"] if match else stem(fixed)) or "fixed"


def check_derivative(out: Path, dataset: Path) -> None:
    """Raise if results of a dataset would be written among its images, or into another dataset."""
    if os.path.realpath(out) == os.path.realpath(dataset):
        advice = f"choose another folder, such as {out / 'derivatives' / 'carlreg'}"
        raise OutputError(f"{out} is the dataset, where results are not written; {advice}")
    if (out / DESCRIPTION).exists() and not _is_own(out / DESCRIPTION):
        raise ExistsError(f"{out / DESCRIPTION} describes another dataset; choose another folder")


def _is_own(description: Path) -> bool:
    with suppress(OSError, ValueError, TypeError, KeyError):
        makers = json.loads(description.read_text(encoding="utf-8"))["GeneratedBy"]
        return any(one["Name"] == "carlreg" for one in makers)
    return False


def describe(out: Path, dataset: Path, more: Iterable[str]) -> None:
    """Write what makes a folder a derivative dataset; `more` are files that validators ignore."""
    if (out / DESCRIPTION).exists():
        return
    description = {
        "Name": "Registrations by carlreg",
        "BIDSVersion": VERSION,
        "DatasetType": "derivative",
        "GeneratedBy": [{"Name": "carlreg", "Version": carlreg.__version__}],
        "SourceDatasets": [{"URL": dataset.resolve().as_uri()}],
    }
    if not (out / IGNORED).exists():
        write_atomically(out / IGNORED, "".join(f"{name}\n" for name in (*more, "*.html", "*.jpg")).encode())
    write_atomically(out / DESCRIPTION, (json.dumps(description, indent=2) + "\n").encode())
