"""The list of the paper's tables and figures is complete: every row has a command, and every command exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from carlreg.cli import load
from carlreg.paper_data import DATASETS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "experiments" / "README.md"


def rows() -> list[tuple[str, str]]:
    """The first two cells of every row: the part of the paper, and the command."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if line.startswith("|") and not set(line) <= set("|- ") and cells[1] != "paper":
            found.append((cells[1], cells[2]))
    return found


def test_no_row_without_a_command() -> None:
    assert len(rows()) > 20
    for what, command in rows():
        assert re.search(r"`(carl|python) [^`]+`", command) or "the commands above" in command, what


def test_every_table_and_figure_has_a_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert {"## Table 1", "## Table 2: ablation of the final refinement, without instance optimisation"} <= set(
        text.splitlines()
    )
    listed = {int(n) for what, _ in rows() for n in re.findall(r"\d+", what.split(",")[0]) if what.startswith("Fig")}
    listed |= {13} if any(what.startswith("Figs. 12–14") for what, _ in rows()) else set()
    assert listed == {1, *range(3, 15)}  # Fig. 2 is the architecture


def test_commands_exist_and_take_these_options() -> None:
    for what, text in rows():
        for command in re.findall(r"`((?:carl|python) [^`]+)`", text):
            words = shlex.split(command)
            if words[0] == "python":
                path = words[3] if words[1:3] == ["-m", "pytest"] else words[1]
                assert (ROOT / path).is_file(), (what, path)
                continue
            options = {name for one in load(words[1]).params for name in one.opts}
            assert {word for word in words if word.startswith("--")} <= options, what
            if "--dataset" in words:
                assert words[words.index("--dataset") + 1] in DATASETS
