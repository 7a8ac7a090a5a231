"""The recipes of containers: what they copy exists, and their steps install a working program in a clean environment.

Installing takes minutes and a package index: run it by `CARL_TEST_CONTAINERS=1 pytest tests/test_containers.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECIPES = {"docker": ROOT / "containers" / "Dockerfile", "apptainer": ROOT / "containers" / "carlreg.def"}


def section(text: str, name: str) -> list[str]:
    """The lines of a section of an Apptainer definition."""
    found = re.search(rf"^%{name}\n(.*?)(?=^%|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return [line.strip() for line in found[1].splitlines() if line.strip()]


def copies(kind: str) -> list[tuple[str, str]]:
    """What a recipe copies, and where to."""
    text = RECIPES[kind].read_text(encoding="utf-8")
    if kind == "docker":
        lines = re.findall(r"^COPY (.*)$", text, re.MULTILINE)
        return [(source, words[-1]) for words in map(str.split, lines) for source in words[:-1]]
    return [(line.split()[0], line.split()[1]) for line in section(text, "files")]


def steps(kind: str) -> list[str]:
    """The commands that a recipe runs."""
    text = RECIPES[kind].read_text(encoding="utf-8")
    return re.findall(r"^RUN (.*)$", text, re.MULTILINE) if kind == "docker" else section(text, "post")


def test_both_recipes_do_the_same() -> None:
    assert steps("docker") == steps("apptainer")
    assert sorted(copies("docker")) == sorted(copies("apptainer"))


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_copies_what_the_package_is_built_from(kind: str) -> None:
    sources = {source for source, _ in copies(kind)}
    assert all((ROOT / source).exists() for source in sources)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lines = re.findall(r"^(?:readme|license-files) = (.*)$", project, re.MULTILINE)
    named = [name.split("/")[0] for line in lines for name in re.findall(r'"([^"]+)"', line)]
    assert len(named) > 2
    assert {"pyproject.toml", "src", *named} <= sources


@pytest.mark.skipif("CARL_TEST_CONTAINERS" not in os.environ, reason="slow: set CARL_TEST_CONTAINERS=1")
@pytest.mark.parametrize("kind", RECIPES)
def test_the_steps_of_a_recipe_in_a_clean_environment(kind: str, tmp_path: Path) -> None:
    """Without an engine for containers: in a new virtual environment, with paths below a folder instead of the root."""
    root, home = tmp_path / "root", tmp_path / "venv"
    for source, target in copies(kind):
        where = root / target.strip("/") / (source if target.endswith("/") else "")
        where.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, where, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, where)
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**plain, "PATH": f"{home}/bin:/usr/bin:/bin"}
    for step in steps(kind):
        command = step.replace("/carlreg", f"{root}/carlreg")
        subprocess.run(["/bin/sh", "-ec", command], env=environment, check=True, cwd=tmp_path)
    ran = subprocess.run(["carl", "cohort", "--help"], env=environment, check=True, capture_output=True, text=True)
    assert "--ray" in ran.stdout
    subprocess.run(
        [home / "bin" / "python", "-c", "import ray, carlreg; carlreg.pretrained()"], env=environment, check=True
    )
