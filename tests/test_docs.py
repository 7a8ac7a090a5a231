"""The prose is held to the code: examples run, links lead somewhere, names exist, figures are those measured."""

import importlib
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def test_the_page_of_commands_is_current() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "commands.py"))["page"]()
    assert read("docs/commands.md") == written, "run python docs/commands.py"
    assert "| `--fixed, -f` |" in written


# ---- measured figures -----------------------------------------------------------------------------------------------


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text(encoding="utf-8"))


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


def number(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def times(what: str, ours: float, plain: float, unit: str = "ms") -> str:
    return f"| {what} | {number(ours)} {unit} | {number(plain)} {unit} | {plain / ours:.1f} |"


def speed_rows() -> dict[str, str]:
    """Each row of times and, where memory was measured, what follows it on the page about speed."""
    gpu, cpu = results("gpu"), results("cpu")["both_directions"]
    trained = next(entry for entry in gpu["attention"] if entry["features"] == "trained")
    ours, plain = trained["ours"], trained["plain"]
    both, alone = cpu["ours"], cpu["one_after_the_other"]
    attention = "attention, one direction, forward"
    rows = {
        times(attention, ours["forward_ms"], plain["forward_ms"]): " | |",
        times(f"{attention} and backward", ours["forward_backward_ms"], plain["forward_backward_ms"]): " | |",
    }
    for what, entry, side in (
        ("network, one direction, side {}", gpu["forward"], gpu["forward"]["side"]),
        ("instance optimisation step, side {}", *step("instance_optimisation_step", pairs=1)),
        ("training step, side {}, four pairs, two refinements", *step("training_step", pairs=4)),
    ):
        row = times(what.format(side), entry["ours"]["ms"], entry["plain"]["ms"])
        measured = entry.get("without_graph", entry["ours"])  # a graph's memory is not counted as such
        rows[row] = f" {measured['peak_gb']:.1f} GB | {entry['plain']['peak_gb']:.1f} GB |"
    row = times(f"both directions on the CPU, side {cpu['side']}", both["seconds"], alone["seconds"], "s")
    rows[row] = f" {both['peak_resident_gb']:.1f} GiB | |"
    return rows


def step(name: str, pairs: int) -> tuple[dict[str, Any], int]:
    entry = results("gpu")[name]
    assert entry["ours"]["pairs"] == entry["plain"]["pairs"] == pairs
    assert entry["ours"]["side"] == entry["plain"]["side"]
    return entry, entry["ours"]["side"]


def test_speed_tables_are_what_was_measured() -> None:
    rows = speed_rows()
    page = table(read("docs/performance.md"), "| what | carlreg | plain | ratio | memory | plain memory |")
    assert page == [row + memory for row, memory in rows.items()]
    assert table(read("README.md"), "| what | carlreg | plain | ratio |") == list(rows)[2:5]


def test_sweep_is_what_was_measured() -> None:
    header = "| side | both directions | memory | optimisation step | step memory |"
    assert table(read("docs/performance.md"), header) == [
        f"| {e['side']} | {number(e['both_directions_ms'])} ms | {e['both_directions_gb']:.1f} GB "
        f"| {number(e['step_ms'])} ms | {e['step_gb']:.1f} GB |"
        for e in results("gpu")["sweep"]
    ]


def test_accuracy_is_what_was_measured() -> None:
    header = "| features | worst, 10⁻³ voxels | mean, 10⁻³ voxels | query gradient | key gradient |"
    expected = []
    for entry in results("gpu")["attention"]:
        a = entry["accuracy"]
        gradients = f"{100 * a['query_gradient_relative']:.2f} % | {100 * a['key_gradient_relative']:.2f} %"
        distances = f"{1e3 * a['worst_voxels']:.2f} | {1e3 * a['mean_voxels']:.2f}"
        expected.append(f"| {entry['features']} | {distances} | {gradients} |")
    assert table(read("docs/performance.md"), header) == expected


def test_figures_in_sentences_are_what_was_measured() -> None:
    gpu, cpu = results("gpu"), results("cpu")
    trained = next(entry for entry in gpu["attention"] if entry["features"] == "trained")
    floor = 2e3 * trained["queries"] * trained["keys"] * trained["width"] / 792e12  # milliseconds
    forward = trained["ours"]["forward_ms"]
    backward = trained["ours"]["forward_backward_ms"] - forward
    one, both = gpu["forward"]["ours"]["ms"], {e["side"]: e["both_directions_ms"] for e in gpu["sweep"]}[175]
    optimisation = gpu["instance_optimisation_step"]["ours"]["ms"]
    training, small = gpu["training_step"]["ours"]["ms"], {e["side"]: e["step_ms"] for e in gpu["sweep"]}[96]
    eager = gpu["training_step"]["without_graph"]["ms"]
    fifty = f"{50 * optimisation / 1e3:.0f} s"
    assert gpu["forward"]["same_bits"] is True
    for page, sentence in (
        ("docs/performance.md", f"- GPU: {gpu['machine']}, PyTorch {gpu['torch']}, commit `{gpu['commit']}`."),
        ("docs/performance.md", f"- CPU: {cpu['machine']}, PyTorch {cpu['torch']}, commit `{cpu['commit']}`."),
        ("docs/performance.md", f"TFLOP | {floor:.1f} ms |"),
        ("docs/performance.md", f"TFLOP | {4 * floor:.0f} ms |"),
        ("docs/performance.md", f"takes {forward / floor:.1f} times the floor, and its backward pass"),
        ("docs/performance.md", f"and its backward pass {backward / (4 * floor):.1f} times."),
        ("docs/performance.md", f"The training step's goal was 75 ms: it takes {number(training)} ms,"),
        ("docs/performance.md", f"and {number(eager)} ms without a CUDA graph."),
        ("docs/performance.md", f"Fifty optimisation steps come to {fifty}."),
        ("docs/performance.md", f"differs from float32 by {gpu['forward']['mean_distance_voxels']:.3f} voxels"),
        ("docs/performance.md", f"takes {number(small)} ms for one pair (three refinements) and {number(eager)} ms"),
        ("README.md", f"on an {gpu['machine']}, beside the plain way"),
        ("README.md", f"take {number(cpu['both_directions']['ours']['seconds'])} s."),
        ("docs/paper.md", f"{number(one)} ms forward in one direction, {number(both)} ms in both"),
        ("docs/paper.md", f"{number(optimisation)} ms for a step, so {fifty} for fifty"),
        ("docs/paper.md", f"{number(optimisation)} ms a step on an H200"),
    ):
        assert sentence in read(page), f"{page} should say: {sentence}"


def test_the_model_card_says_what_the_files_say() -> None:
    card = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    results = ROOT / "experiments" / "base" / "results"
    scores = json.loads((results / "scores.json").read_text(encoding="utf-8"))["val"]["network"]
    cpu = json.loads((results / "cpu.json").read_text(encoding="utf-8"))["sets"]
    names = {
        "brain": "brain, 14 subcortical structures",
        "abdomen": "abdomen, 13 organs",
        "hippocampus": "hippocampus, 2 parts",
    }
    for key, name in names.items():
        row, both = scores[key], cpu[key]
        assert f"| {name} | {row['pairs']} | {row['before']:.3f} | {row['dice']:.3f} | {row['folds']:.3f} |" in card, (
            name
        )
        figures = [both["pairs"], *(f"{both[kind]['dice']:.3f}" for kind in ("before", "network", "fields"))]
        figures += [f"{both[kind]['folds_percent']:.3f}" for kind in ("network", "fields")]
        figures += [f"{both[kind]['seconds']:.0f}" for kind in ("network", "fields")]
        assert f"| {name} | {' | '.join(map(str, figures))} |" in card, name
