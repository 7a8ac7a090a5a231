"""A sample of `make torture`, in a process of its own: it forks, and preloads a library that makes writes fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("SimpleITK")
ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
def test_a_sample_of_every_attack() -> None:
    command = [sys.executable, "tests/torture/run.py", "--cases", "1", "--seconds", "900"]
    attacks = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False
    )
    assert attacks.returncode == 0, attacks.stdout + attacks.stderr[-2000:]
    assert "fuzzed NIfTI" in attacks.stdout
    assert "killed: register" in attacks.stdout
