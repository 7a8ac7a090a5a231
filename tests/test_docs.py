"""The prose is held to the code: examples run, links lead somewhere, names exist."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def python_blocks(text: str) -> list[str]:
    """The blocks to run, each with blank lines in front, so that a traceback names the page's own line."""
    return [
        "\n" * (text.count("\n", 0, block.start()) + 1) + block[2]
        for block in FENCE.finditer(text)
        if block[1].strip() == "python"
    ]


def without_code(text: str) -> str:
    return CODE.sub("", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """What a heading's link is called: lower case, punctuation dropped, a hyphen for each space."""
    headings = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_column(text: str) -> list[str]:
    """Everything in backticks in the 'in code' column of a page's tables."""
    names: list[str] = []
    column = None
    for line in text.splitlines():
        if not line.startswith("|"):
            column = None
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if column is None:
            column = cells.index("in code") if "in code" in cells else -1
        elif column > 0:
            names += CODE.findall(cells[column])
    return names


def resolve(name: str) -> object:
    """`carlreg.x.y` or `x.y`: the module with the longest matching name, then attributes."""
    parts = ["carlreg", *name.removeprefix("carlreg.").split(".")]
    found: object = importlib.import_module("carlreg")
    for depth, part in enumerate(parts[1:], start=2):
        try:
            found = importlib.import_module(".".join(parts[:depth]))
        except ModuleNotFoundError:
            found = getattr(found, part)
    return found


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Examples are so small that threads spend their time waiting for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_examples_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples write files
    torch.manual_seed(0)
    namespace = {"__name__": "__main__"}
    for block in python_blocks(page.read_text(encoding="utf-8")):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}, which does not exist"
        if anchor:
            known = anchors(target.read_text(encoding="utf-8"))
            assert anchor in known, f"{name_of(page)} links to {link}; {target.name} has {sorted(known)}"


def test_names_on_the_paper_page_exist() -> None:
    names = code_column((ROOT / "docs/paper.md").read_text(encoding="utf-8"))
    dotted = [name for name in names if DOTTED.fullmatch(name)]
    assert len(dotted) > 40, "the tables of docs/paper.md were not recognised"
    for name in dotted:
        resolve(name)


def test_a_wrong_name_is_noticed() -> None:
    with pytest.raises(AttributeError):
        resolve("registration.ThreeStep")
    with pytest.raises(AttributeError):
        resolve("carlreg.nothing.here")
    assert code_column("| paper | in code |\n|---|---|\n| ∘ | `a.b` and `c` |\n\n`d.e`") == ["a.b", "c"]
    assert anchors("# The authors' `x` page\n```\n# no\n```\n") == {"the-authors-x-page"}
    assert python_blocks("a\n```python\nx\n```\n```python no-run\ny\n```\n") == ["\n\nx\n"]
