"""The documentation matches the code: examples run, links and names exist, tables match the result files."""

import ast
import importlib
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from browser import Page, needs_browser

import carlreg

ROOT = Path(__file__).parent.parent
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted(page for folder in ("benchmarks", "experiments") for page in (ROOT / folder).rglob("*.md"))
PAGES = [*GUIDES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *RESULTS]

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def table(text: str, header: str) -> list[str]:
    """The rows of the one table with this header."""
    lines = text.splitlines()
    assert lines.count(header) == 1, f"expected one table with the header {header}"
    rows = []
    for line in lines[lines.index(header) + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(line)
    return rows


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
    """The anchors of all headings: lower case, without punctuation, a hyphen for each space."""
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
    """Use one thread: for examples this small, threads only wait for each other."""
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
        resolve("model.algorithms.ThreeStep")
    with pytest.raises(AttributeError):
        resolve("carlreg.nothing.here")
    assert code_column("| paper | in code |\n|---|---|\n| ∘ | `a.b` and `c` |\n\n`d.e`") == ["a.b", "c"]
    assert anchors("# The authors' `x` page\n```\n# no\n```\n") == {"the-authors-x-page"}
    assert python_blocks("a\n```python\nx\n```\n```python no-run\ny\n```\n") == ["\n\nx\n"]


def test_the_page_of_commands_is_current() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "commands.py"))["page"]()
    assert read("docs/commands.md") == written, "run python docs/commands.py"
    assert "| `--fixed, -f` |" in written


# ---- the website ----------------------------------------------------------------------------------------------------

SITE = runpy.run_path(str(ROOT / "docs" / "build.py"))


def test_the_website_has_every_page_and_what_pages_link_to(tmp_path: Path) -> None:
    SITE["stage"](ROOT, tmp_path)
    nav = re.findall(r"^ +- .*: (\S+\.md)$", read("mkdocs.yml"), re.MULTILINE)
    assert sorted(nav) == sorted([*map(name_of, GUIDES), "CONTRIBUTING.md", "CHANGELOG.md", "experiments/README.md"])
    for name in nav:
        assert (tmp_path / name).is_file(), f"mkdocs.yml names {name}, to which no page leads"
    source = (tmp_path / "src/carlreg/fast/kernels/attention.py.md").read_text(encoding="utf-8")
    assert read("src/carlreg/fast/kernels/attention.py") in source
    assert "](../src/carlreg/fast/kernels/attention.py.md)" in (tmp_path / "docs/paper.md").read_text(encoding="utf-8")
    for page in (path for path in PAGES if (tmp_path / name_of(path)).exists()):
        written = tmp_path / name_of(page)
        for link in LINK.findall(without_code(written.read_text(encoding="utf-8"))):
            if "://" not in link:
                assert (written.parent / link.partition("#")[0]).exists(), f"{written} links to {link}"


@pytest.mark.browser
@needs_browser
def test_a_website_in_a_folder_says_how_to_search_it(tab: Page, tmp_path: Path) -> None:
    """With a header as the website has it. A script of the site runs after its own."""
    assert re.search(r"^extra_javascript:\n  - docs/folder.js$", read("mkdocs.yml"), re.MULTILINE)
    SITE["stage"](ROOT, tmp_path)
    header = '<label for="__search">icon</label><div class="md-search"><button>Search</button></div>'
    (tmp_path / "page.html").write_text(f'{header}<script src="docs/folder.js"></script>', encoding="utf-8")
    tab.open((tmp_path / "page.html").as_uri())
    tab.wait("document.getElementById('no-search')")
    assert "python -m http.server" in tab.get("document.querySelector('.md-search').textContent")
    assert tab.get("document.querySelectorAll('button').length") == 0
    assert tab.get("document.querySelector('label').hidden")
    assert tab.complaints == []


def test_a_link_that_the_website_could_not_follow_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for link in ("nowhere.md", "docs", "../outside.md"):
        (tmp_path / "README.md").write_text(f"`[code](is.none)` and [text]({link})", encoding="utf-8")
        with pytest.raises(ValueError, match=f"README.md links to {link}"):
            SITE["stage"](tmp_path, tmp_path / "out")


def test_broken_links_of_a_website_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<h2 id="there">b</h2>', encoding="utf-8")
    page = (
        '<a href="b.html#{}">b</a><a href="https://example.org">elsewhere</a><img src="{}"><script src="{}"></script>'
    )
    (tmp_path / "a.html").write_text(page.format("there", "b.html", "b.html"), encoding="utf-8")
    assert list(SITE["broken"](tmp_path)) == []
    (tmp_path / "a.html").write_text(page.format("gone", "c.png", "https://example.org/x.js"), encoding="utf-8")
    assert list(SITE["broken"](tmp_path)) == [
        "a.html: b.html#gone has no such heading",
        "a.html: c.png leads nowhere",
        "a.html: https://example.org/x.js is loaded from elsewhere",
    ]


# ---- what is where, and whose it is ---------------------------------------------------------------------------------


SOURCE = ROOT / "src" / "carlreg"


def part_of(path: Path) -> str:
    """A part's name in the table of CONTRIBUTING.md: `demo` for a module, `geometry/` for a package."""
    first, *rest = path.relative_to(SOURCE).parts
    return f"{first}/" if rest else path.stem


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """Modules of carlreg that a file imports when it is run, each as the parts of its name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {id(node) for block in for_types for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "carlreg":
            parts = tuple(node.module.split(".")[1:])
            for name in node.names:
                longer = (*parts, name.name)
                is_module = SOURCE.joinpath(*longer).with_suffix(".py").exists() or SOURCE.joinpath(*longer).is_dir()
                yield longer if is_module else parts
        elif isinstance(node, ast.Import):
            yield from (tuple(n.name.split(".")[1:]) for n in node.names if n.name.startswith("carlreg."))


def test_parts_import_only_from_those_above_them() -> None:
    order = {CODE.findall(row)[0]: n for n, row in enumerate(table(read("CONTRIBUTING.md"), "| part | contents |"))}
    files = [path for path in SOURCE.rglob("*.py") if path.name != "__main__.py" and path != SOURCE / "__init__.py"]
    assert set(order) == {part_of(path) for path in files}, "the table of parts in CONTRIBUTING.md"
    for path in files:
        for parts in filter(None, imported(path)):
            other = parts[0] if parts[0] in order else f"{parts[0]}/"
            if other in order:
                assert order[other] <= order[part_of(path)], f"{name_of(path)} imports {other}, which is below it"


def test_modules_of_a_part_do_not_import_each_other_in_a_circle() -> None:
    graph = {}
    for path in SOURCE.rglob("*.py"):
        here = path.relative_to(SOURCE).with_suffix("").parts
        graph[tuple(p for p in here if p != "__init__")] = {parts for parts in imported(path) if parts}
    graph = {
        module: {other for other in needs if other in graph and other != module} for module, needs in graph.items()
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def test_the_citation_is_that_of_the_readme_and_this_version() -> None:
    citation, readme = read("CITATION.cff"), read("README.md")
    assert f"version: {carlreg.__version__}\n" in citation
    families = re.findall(r"family-names: (\S+)", citation)
    assert len(families) == 6
    sentence = readme[readme.index("The method is the work of") :]
    assert [sentence.index(name) for name in families] == sorted(sentence.index(name) for name in families)


# ---- measured figures -----------------------------------------------------------------------------------------------


def test_tables_and_plots_are_what_the_result_files_give() -> None:
    """Every table byte for byte, every plot within a tolerance; `make figures` rebuilds them."""
    check = subprocess.run(
        [sys.executable, "experiments/figures.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_a_changed_figure_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import figures
    from PIL import Image

    text = read("docs/performance.md")
    assert figures.rebuilt(text) == text
    wrong = re.sub(r"(<!-- table: sides -->\n\n.*\n.*\n\| )\d+", r"\g<1>7", text)
    assert wrong != text
    assert figures.rebuilt(wrong) == text
    plot = ROOT / "experiments/shift/shift.png"
    Image.open(plot).convert("RGB").transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "mirrored.png")
    assert not figures.differs(plot, plot)
    assert figures.differs(plot, tmp_path / "mirrored.png")


def test_tables_of_the_default_answer_show_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parts, pairs and programs may be missing. Other programs are compared on pairs that all have."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import figures

    draw = figures.script("benchmarks/beside.py").draw
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    names = ("default_answer", "default_dice", "default_and_others", "time_and_dice")
    assert [figures.TABLES[name]() for name in names] == ["Not measured yet.\n", "", "", ""]

    def measured(kind: str, **parts: list[dict[str, object]]) -> None:
        path = tmp_path / f"benchmarks/results/answer-{kind}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"commit": "abc", "machine": f"x86_64, {kind}", **parts}))

    def row(pair: str, dice: float, seconds: float) -> dict[str, object]:
        spent = {"reading": 9.0, "network": 1.0, "optimisation": seconds - 1, "total": 99.0}
        return {
            "set": "brain",
            "pair": [pair, "b"],
            "before": 0.3,
            "default": dice,
            "folds_percent": 0,
            "seconds": spent,
        }

    def other(name: str, pair: str, dice: float, seconds: float) -> dict[str, object]:
        return {"program": name, "set": "brain", "pair": [pair, "b"], "dice": dice, "seconds": seconds}

    measured("gpu", memory=[{"side": 192, "peak_gb": 7.12}], dice=[row("p", 0.8, 2), row("q", 0.9, 4)])
    ours = "| carlreg, gpu | 0.900 | 4.0 |"
    assert "| peak memory of the optimisation | 7.1 GB at 192³ |\n| commit | abc |" in figures.TABLES[names[0]]()
    assert "| gpu | 2 | 0.300 |  |  | 0.850 | 0.0000 |" in figures.TABLES[names[1]]()
    assert figures.TABLES[names[2]]() == ""
    measured("others", others=[other("ANTs", "p", 0.5, 30), other("ANTs", "q", 0.6, 40), other("greedy", "q", 0.7, 50)])
    text = figures.TABLES[names[2]]()
    assert "subcortical structures, 1 pair | s |" in text
    assert text.endswith(f"{ours}\n| ANTs | 0.600 | 40.0 |\n| greedy | 0.700 | 50.0 |\n")
    assert "time-and-dice.png" in figures.TABLES[names[3]]()
    draw({words: scores for words, (_, scores) in figures.beside().items()}, tmp_path / "plot.png")
    assert not figures.differs(tmp_path / "plot.png", tmp_path / "plot.png")
    assert figures.differs(tmp_path / "none.png", tmp_path / "plot.png")


def test_every_table_of_the_script_is_in_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import figures

    used = {name for page in figures.pages() for _, name, _ in figures.BLOCK.findall(page.read_text(encoding="utf-8"))}
    assert used == set(figures.TABLES)
