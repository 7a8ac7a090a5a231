"""Provenance for result files, and compact pictures."""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any


def commit() -> str:
    """The commit of this checkout, with the suffix "-dirty" if files were changed. For a copy without git, it is
    the value of the variable COMMIT, or "unknown"."""
    words, found = ["git", "describe", "--always", "--dirty"], ""
    if shutil.which("git") is not None:
        found = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    return found or os.environ.get("COMMIT", "unknown")


def tree() -> str:
    """The git tree hash of src/carlreg, which stays the same while only other files are committed; with the suffix
    "-dirty" if files there differ from the last commit, "unknown" without git."""
    if shutil.which("git") is None:
        return "unknown"

    def git(*words: str) -> str:
        root = Path(__file__).parents[1]
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=root).stdout.strip()

    found = git("rev-parse", "--short=12", "HEAD:src/carlreg")
    return found + "-dirty" * bool(git("status", "--porcelain", "src/carlreg")) if found else "unknown"


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} CPU cores"


def png(figure: Any, dpi: int) -> bytes:
    """Encode a Matplotlib figure as PNG with 256 colours: half the size, no visible difference."""
    from PIL import Image

    buffer, small = io.BytesIO(), io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    picture = Image.open(buffer).convert("RGB")
    picture.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()
