"""The paper's datasets, one file each: the layout on disk, the pairs, and the preprocessing."""

from __future__ import annotations

import importlib

from carlreg.errors import InputError
from carlreg.paper_data.dataset import Dataset

DATASETS = ("abdomen1k", "copdgene", "dirlab", "hcp", "learn2reg", "oasis")
"""Those with pairs to evaluate on."""


def find_dataset(name: str) -> Dataset:
    """A dataset by its name."""
    if name not in DATASETS:
        raise InputError(f"no dataset {name!r}; expected one of {', '.join(DATASETS)}")
    dataset: Dataset = importlib.import_module(f"carlreg.paper_data.{name}").DATASET
    return dataset
