"""What every result says of how it was made."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path


def commit() -> str:
    """Of this checkout, with "-dirty" behind it where files were changed; "unknown" without git."""
    if shutil.which("git") is None:
        return "unknown"
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} CPU cores"
