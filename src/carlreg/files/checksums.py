"""Checksums of files."""

from __future__ import annotations

import hashlib
import os


def sha256(path: str | os.PathLike[str]) -> str:
    """A file's checksum."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            total.update(block)
    return total.hexdigest()
