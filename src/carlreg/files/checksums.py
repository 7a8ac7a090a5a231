"""Checksums of files and folders."""

import hashlib
import os
from pathlib import Path


def sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file; for a folder, such as a DICOM series, of the names and contents of its readable files."""
    path, total = Path(path), hashlib.sha256()
    if path.is_dir():
        for file in sorted(one for one in path.iterdir() if one.is_file() and os.access(one, os.R_OK)):
            total.update(os.fsencode(f"{file.name}\0{sha256(file)}\n"))
        return total.hexdigest()
    with open(path, "rb") as stream:
        while block := stream.read(2**20):
            total.update(block)
    return total.hexdigest()
