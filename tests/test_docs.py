"""The prose is held to the code: examples run, links lead somewhere, names exist, figures are those measured."""

import ast
import importlib
import json
import math
import re
import runpy
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
import torch

import carlreg

ROOT = Path(__file__).parent.parent
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "experiments").rglob("*.md"))]

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
    source = (tmp_path / "src/carlreg/fast/attention.py.md").read_text(encoding="utf-8")
    assert read("src/carlreg/fast/attention.py") in source
    assert "](../src/carlreg/fast/attention.py.md)" in (tmp_path / "docs/paper.md").read_text(encoding="utf-8")
    for page in (path for path in PAGES if (tmp_path / name_of(path)).exists()):
        written = tmp_path / name_of(page)
        for link in LINK.findall(without_code(written.read_text(encoding="utf-8"))):
            if "://" not in link:
                assert (written.parent / link.partition("#")[0]).exists(), f"{written} links to {link}"


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


def room_of(path: Path) -> str:
    """As the table of CONTRIBUTING.md names it: `demo` for a module, `geometry/` for a package."""
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


def test_rooms_import_only_from_those_above_them() -> None:
    order = {
        CODE.findall(row)[0]: n for n, row in enumerate(table(read("CONTRIBUTING.md"), "| room | what is inside |"))
    }
    files = [path for path in SOURCE.rglob("*.py") if path.name != "__main__.py" and path != SOURCE / "__init__.py"]
    assert set(order) == {room_of(path) for path in files}, "the table of rooms in CONTRIBUTING.md"
    for path in files:
        for parts in filter(None, imported(path)):
            other = parts[0] if parts[0] in order else f"{parts[0]}/"
            if other in order:
                assert order[other] <= order[room_of(path)], f"{name_of(path)} imports {other}, which is below it"


def test_modules_of_a_room_do_not_import_each_other_in_a_circle() -> None:
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
    names = {
        "brain": "brain, 14 subcortical structures",
        "abdomen": "abdomen, 13 organs",
        "hippocampus": "hippocampus, 2 parts",
    }
    for key, name in names.items():
        row, kinds = scores[key], native(key)
        assert f"| {name} | {row['pairs']} | {row['before']:.3f} | {row['dice']:.3f} | {row['folds']:.3f} |" in card, (
            name
        )
        last = kinds["fields"]
        figures = [str(len(last)), *(f"{mean([r[f'before_{k}'] for r in last]):.3f}" for k in ("headers", "stretched"))]
        figures += [f"{mean([r['after'] for r in rows]):.3f}" for rows in kinds.values()]
        figures += [f"{mean([r['metrics']['folds_percent'] for r in rows]):.3f}" for rows in kinds.values()]
        figures += [f"{median(r['command_seconds'] for r in rows):.0f}" for rows in kinds.values()]
        assert f"| {name} | {' | '.join(figures)} |" in card, name


NATIVE = ("brain", "abdomen", "hippocampus")


def native(name: str) -> dict[str, list[dict[str, Any]]]:
    """`carl register` on the pairs of a set, with the network alone and with optimised fields."""
    rows = [row for row in experiment("native/results/native.json")["rows"] if row["set"] == name]
    return {kind: [row for row in rows if row["kind"] == kind] for kind in ("network", "fields")}


def experiment(path: str) -> Any:
    return json.loads(read(f"experiments/{path}"))


def test_retina_on_the_walkthrough_is_what_the_runs_say() -> None:
    result = experiment("retina/results/runs.json")
    sets = ("Baseline", "Shift", "Scale Shift")
    before = (f"{mean(result['unregistered'][name]):.3f}" for name in sets)
    rows = [f"| unregistered | | {' | '.join(before)} |"]
    for network in ("displacement", "Ξ", "CARL"):
        runs = [run for run in result["runs"] if run["network"] == network and run["trained on"] == "Baseline"]
        scores = (f"{mean(mean(run['dice'][name]) for run in runs):.3f}" for name in sets)
        rows.append(f"| {network} | {len(runs)} | {' | '.join(scores)} |")
    header = "| trained on Baseline | runs | Baseline | Shift | Scale Shift |"
    walkthrough, page = read("docs/walkthrough.md"), read("experiments/retina/README.md")
    assert table(walkthrough, header) == rows
    own = {(run["trained on"], run["seed"]): mean(run["dice"][run["trained on"]]) for run in of(result, "CARL")}
    failed = [trained for (trained, _), score in own.items() if score < 0.5]
    counts = {name: (failed.count(name), sum(trained == name for trained, _ in own)) for name in sets}
    assert counts["Baseline"][0] == 0
    shifted = [counts[name] for name in sets[1:]]
    assert "{} of {} on Shift, {} of {} on Scale Shift".format(*shifted[0], *shifted[1]) in page
    some, all_ = (sum(numbers) for numbers in zip(*shifted, strict=True))
    assert f"so do we, {some} of {all_}." in walkthrough
    assert f"ours are {some} of {all_}." in page


COLUMNS = ("Baseline", "Shift", "Scale Shift")


def of(result: dict[str, Any], network: str) -> list[dict[str, Any]]:
    return [run for run in result["runs"] if run["network"] == network]


def test_the_page_about_retinas_says_what_the_files_say() -> None:
    page, walkthrough = read("experiments/retina/README.md"), read("docs/walkthrough.md")
    result, look, speed = (experiment(f"retina/results/{name}.json") for name in ("runs", "look", "speed"))
    header = "| trained on → tested on | unregistered | displacement | Ξ | CARL |"
    means = table(read("experiments/retina/results/table.md"), header)
    assert table(page, header) == means
    errors, shifts = look["equivariance"], look["equivariance"]["shifts_pixels"]
    shown = [shifts.index(n) for n in (4, 13, 24, 37, 48)]
    rows = [
        f"| {network}, {kind} | {' | '.join(f'{errors[network][kind][n]:.2f}' for n in shown)} |"
        for network in ("CARL", "displacement")
        for kind in ("[W, U]", "[U, U]")
    ]
    assert table(page, "| shift, pixels | 4 | 13 | 24 | 37 | 48 |") == rows
    ours = errors["CARL"]["[W, U]"][1:]
    assert f"off by {min(ours):.1f} to {max(ours):.1f} pixels after any shift" in page
    assert f"off by {min(ours):.1f} to {max(ours):.1f} pixels after any shift up to {shifts[-1]}" in walkthrough
    assert f"the displacement network's by {errors['displacement']['[W, U]'][-1]:.0f} after the largest" in walkthrough
    final, diffused = (look["masks"][f"CARL-Baseline-0{end}"] for end in ("", "-diffusion"))
    quartiles = " and ".join(f"{value:.1f}" for value in final["spread_pixels_quartiles"])
    assert f"is {final['spread_pixels_median']:.1f} pixels in the median, with quartiles of {quartiles}" in page
    assert f"After diffusion alone it is {diffused['spread_pixels_median']:.1f} pixels" in page
    score = {s: mean(mean(r["dice"][s]) for r in of(result, "CARL") if r["trained on"] == "Baseline") for s in COLUMNS}
    losses = [score["Baseline"] - score[name] for name in COLUMNS[1:]]
    assert "CARL loses {:.3f} on Shift and {:.3f} on Scale Shift".format(*losses) in page
    rows = []
    for name, found in speed["networks"].items():
        fast = " | ".join(f"{found['steps_per_second'][n]:.0f}" for n in "136")
        small = found["shorter_than_10_us"]
        rows.append(f"| {name} | {fast} | {found['kernels']} | {small} | {found['kernel_ms']:.1f} |")
    header = "| network | 1 run | 3 runs | 6 runs | kernels a step | of them under 10 µs | kernel time, ms |"
    assert table(page, header) == rows
    gains = [found["steps_per_second"]["6"] / found["steps_per_second"]["1"] for found in speed["networks"].values()]
    assert f"six of them make {min(gains):.1f} to {max(gains):.1f} times as many steps" in page


def test_the_page_about_a_killed_run_says_what_the_file_says() -> None:
    run, page = experiment("training/results/training.json"), read("experiments/training/README.md")
    one, other = run["losses"].values()
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    killed = (100 + run["killed_at"]["step"]) // 10  # a line of the log for every ten steps
    dice = run["dice"]["unbroken"]
    for sentence in (
        f"({run['images']} to train on",
        f"the run takes {run['seconds']:.0f} s",
        f"rises from {dice[0]:.2f} after 100 steps to {dice[-1]:.2f} at the end",
        "({:.2f} and {:.2f} in the killed run)".format(*(run["dice"]["broken"][n] for n in (0, -1))),
        f"killed {run['killed_at']['step']} steps into its second stage",
        f"is {max(apart[:killed]):.3f} before the kill and {max(apart[killed:]):.3f} after it",
    ):
        assert sentence in page, sentence


def test_the_page_about_the_inside_says_what_the_file_says() -> None:
    result, page = experiment("inside/results.json"), read("experiments/inside/README.md")
    probes = result["mean_probe_dice"]
    row = f"| mean Dice of the probe, {result['pairs']} pairs | {' | '.join(f'{v:.2f}' for v in probes.values())} |"
    assert table(page, f"| | {' | '.join(probes)} |") == [row]
    rows = result["rows"]
    spread = median(row["spread_mm_of_25_voxels"]["median"] for row in rows)
    near = median(row["share_within_30_mm_of_the_peak"]["median"] for row in rows)
    border = max(row["share_in_the_two_outermost_layers_of_the_padding"]["largest"] for row in rows)
    liver = [row["probe_dice"]["liver"] for row in rows]
    for sentence in (
        f"is {spread:.0f} mm in the median of voxels and pairs, and {100 * near:.0f} % of a mask lies within 30 mm",
        f"hold at most {100 * border:.1f} % of a mask",
        f"with Dice from {min(liver):.2f} to {max(liver):.2f}",
    ):
        assert sentence in page, sentence


def test_the_ablation_says_what_the_files_say() -> None:
    page, index = read("experiments/refinement/README.md"), read("experiments/README.md")
    rows = []
    for name, words in (("abdomen", "abdomen, 5 organs"), ("brain", "brain, 14 structures")):
        found = experiment(f"refinement/{name}/scores.json")["methods"]
        dice = [found[method]["dice"] for method in ("Ξ alone", "Ξ and 1 Ψ", "Ξ and 2 Ψ")]
        (pairs,) = {method["pairs"] for method in found.values()}
        rows.append(f"| {words} | {pairs} | {' | '.join(f'{value:.3f}' for value in dice)} |")
        assert "{:.1f} after Ξ, {:.1f} after Ψ1, {:.1f} after Ψ2".format(*(100 * value for value in dice)) in index
        assert all(found[method]["folds_percent"] == 0 for method in ("Ξ alone", "Ξ and 1 Ψ"))
    assert table(page, "| | pairs | Ξ alone | Ξ and 1 Ψ | Ξ and 2 Ψ |") == rows
    folds = experiment("refinement/abdomen/scores.json")["methods"]["Ξ and 2 Ψ"]["folds_percent"]
    assert f"{folds:.3f} % of the voxels" in page


def test_every_table_and_figure_says_what_the_files_say() -> None:
    """Figures of carl-base and of the retina networks in experiments/README.md."""
    page = read("experiments/README.md")
    network = experiment("base/results/scores.json")["val"]["network"]
    runs, errors = experiment("retina/results/runs.json"), experiment("retina/results/look.json")["equivariance"]
    trained = {
        name: [
            mean(mean(run["dice"][tested]) for run in of(runs, name) if run["trained on"] == "Baseline")
            for tested in COLUMNS
        ]
        for name in ("CARL", "Ξ", "displacement")
    }
    shown = {name: " / ".join(f"{value:.2f}" for value in values) for name, values in trained.items()}
    last = {(name, kind): errors[name][kind][-1] for name in ("CARL", "displacement") for kind in ("[W, U]", "[U, U]")}
    probes = list(experiment("inside/results.json")["mean_probe_dice"].values())
    for sentence in (
        f"{100 * network['abdomen']['dice_five']:.1f} at the grid, without IO",
        f"{100 * network['brain']['dice']:.1f} at the grid, without IO",
        f"BTCV {network['abdomen']['folds']:.1e}, OASIS {network['brain']['folds']:.0e}, at the grid".replace(
            "e-0", "e-"
        ),
        f"is {shown['CARL']} for CARL, {shown['Ξ']} for Ξ, {shown['displacement']} for GradICON",
        f"off by {last['CARL', '[W, U]']:.2f} pixels for CARL and {last['displacement', '[W, U]']:.2f} for GradICON",
        f"[U, U] by {last['CARL', '[U, U]']:.2f} and {last['displacement', '[U, U]']:.2f}",
        f"{probes[0]:.2f} for the liver, {min(probes[1:]):.2f} to {max(probes[1:]):.2f} for the others",
    ):
        assert sentence in page, sentence


def accuracy_rows() -> tuple[list[str], dict[tuple[str, str], list[str]]]:
    """For the page about accuracy: a row for each task of table.md; and the cells of table.md by task and method."""
    text = read("experiments/accuracy/results/table.md")
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    found = {(line[0], line[1]): line[2:] for line in lines[1:]}
    rows = []
    for task in dict.fromkeys(task for task, _ in found):
        others = [found[task, method][1] if (task, method) in found else "" for method in PROGRAMS]
        ours = [found[task, method] for method in ("boxes laid onto one another", "CARL", "CARL with optimisation")]
        note = next(
            line for line in text.splitlines() if line.startswith(f"- {task}: ") and f"− {PROGRAMS[0]} is" in line
        )
        difference, won = re.findall(r"is (\S+) Dice", note)[0], re.findall(r"better on (.*) pairs", note)[0]
        dice = [cells[1] for cells in ours] + others
        rows.append(f"| {task} | {ours[0][0]} | {' | '.join(dice)} | {difference}, {won} |")
    return rows, found


PROGRAMS = ("ANTs SyNQuick", "greedy", "ConvexAdam")


def test_accuracy_beside_other_programs_is_what_was_measured() -> None:
    page = read("experiments/accuracy/README.md")
    header = (
        "| | pairs | boxes | CARL | with optimisation | ANTs SyNQuick | greedy | ConvexAdam | CARL − ANTs, better on |"
    )
    rows, found = accuracy_rows()
    assert table(page, header) == rows
    assert len(rows) == 4
    brain = [found["brain, 14 subcortical structures", method][5] for method in ("CARL", "CARL with optimisation")]
    assert all(cell.endswith("(56)") for cell in brain)
    assert f"on all 56 CARL has {brain[0][:5]}, and {brain[1][:5]} with optimisation" in page
    readme = read("README.md")
    for what, task in (
        ("13 organs, {} pairs of abdominal CT", "abdomen, 13 organs"),
        ("14 structures, {} pairs of brain MRI", "brain, 14 subcortical structures"),
    ):
        before, network, best, ants = (
            found[task, method] for method in ("unregistered", "CARL", "CARL with optimisation", "ANTs SyNQuick")
        )
        own = f"{best[1]} (network alone {network[1]}); {best[4]} s ({network[4]} s)"
        assert (
            f"| Dice, {what.format(best[0])}; time on 2 CPU cores | {own} | SyNQuick: {ants[1]}; {ants[4]} s |"
            in readme
        )
        assert f"{before[1]}" in readme[readme.index("unregistered it is") :].splitlines()[0]
        assert float(best[1]) > float(ants[1])


def test_the_demo_does_what_the_readme_says() -> None:
    demo, page = experiment("demo/demo.json"), read("README.md")
    before, after, shifted = (demo[name][when]["dice"] for name, when in DEMO)
    shift = math.hypot(*demo["shift_mm"])
    assert abs(after - shifted) <= 0.01
    assert f"Dice goes from {before:.3f} to {after:.3f}, and with one image shifted by {shift:.0f} mm" in page
    assert f"it is {shifted:.3f} ([figures]" in page
    assert f"{demo['command_seconds']:.0f} s for the demo" in page


DEMO = (("pair", "before"), ("pair", "after"), ("shifted", "after"))


AXES = ("left to right", "back to front", "bottom to top")


def test_the_page_about_shifts_says_what_the_files_say() -> None:
    page = read("experiments/moved/README.md")
    ways = ("96", "160-seen-96", "160-cropped-96", "192")
    own, room, cropped, framed = (experiment(f"moved/results/shifts-{way}.json") for way in ways)
    rows = []
    for found in (own, room, cropped, framed):
        for name in ("carl-base", "gradicon"):
            assert len(found["methods"][name]["pairs"]) == 56
            for axis in AXES:
                dice = [f"{mean(row['dice']):.3f}" for row in found["methods"][name]["rows"] if row["axis"] == axis]
                rows.append(f"| {name}, {axis} | {' | '.join(dice)} |")
        if found is own:
            ants, base = (found["methods"][name] for name in ("ANTs", "carl-base"))
            some = [base["pairs"].index(pair) for pair in ants["pairs"]]
            dice = [f"{mean(row['dice']):.3f}" for row in ants["rows"]]
            rows.append(f"| ANTs SyNQuick on 3 pairs, {AXES[0]} | {' | '.join(dice)} |")
            same = [[row["dice"][n] for n in some] for row in base["rows"] if row["axis"] == AXES[0]]
            rows.append(f"| carl-base on these 3, {AXES[0]} | {' | '.join(f'{mean(dice):.3f}' for dice in same)} |")
        for axis in AXES if found is own else ():
            seen = [row["visible"] for row in found["methods"]["carl-base"]["rows"] if row["axis"] == axis]
            rows.append(f"| in view, {axis} | {' | '.join(f'{100 * mean(share):.0f} %' for share in seen)} |")
    first = "| shift, voxels | 0 | 3 | 7 | 13 | 20 | 29 | 38 | 48 |"
    assert [line for line in page.splitlines() if line.startswith("| ") and line != first] == rows
    ours, theirs = (own["in_view"][name] for name in ("carl-base", "gradicon"))
    cube, other = (framed["in_view"][name] for name in ("carl-base", "gradicon"))
    matches = experiment("moved/results/attention.json")["rows"][0]
    changed = ours["mean_absolute_change"]
    lost = {
        name: max(
            own["in_view"][name]["at_rest"] - mean(row["dice"])
            for row in own["methods"][name]["rows"]
            if row["voxels"] <= 29
        )
        for name in ("carl-base", "gradicon")
    }
    assert f"carl-base loses at most {lost['carl-base']:.3f} up to 29 voxels" in page
    assert f"GradICON at most {lost['gradicon']:.3f}." in page
    seen, other_seen = (room["in_view"][name] for name in ("carl-base", "gradicon"))
    cut, other_cut = (cropped["in_view"][name] for name in ("carl-base", "gradicon"))
    assert max(changed, seen["mean_absolute_change"], cube["mean_absolute_change"]) < 0.01
    for name, sentence in (
        ("moved/README.md", f"changes by {seen['mean_absolute_change']:.4f} on average over {seen['cases']} cases"),
        ("moved/README.md", f"in view (at worst {seen['lowest']:.3f}), GradICON"),
        ("moved/README.md", f"by {other_seen['mean_absolute_change']:.4f} (at worst {other_seen['lowest']:.3f})"),
        ("moved/README.md", f"{cut['at_rest']:.3f} instead of {seen['at_rest']:.3f}, and carl-base changes by"),
        ("moved/README.md", f"{cut['mean_absolute_change']:.4f} on average (at worst {cut['lowest']:.3f})"),
        ("moved/README.md", f"GradICON does not mind them either ({other_cut['mean_absolute_change']:.4f})"),
        ("moved/README.md", f"Dice changes by {changed:.3f} to {cube['mean_absolute_change']:.3f} on average, however"),
        ("moved/README.md", f"changes by {changed:.4f} on average over {ours['cases']} cases"),
        ("moved/README.md", f"({ours['mean_change']:+.4f} with its sign; at worst {ours['lowest']:.3f})"),
        ("moved/README.md", f"GradICON's by {theirs['mean_absolute_change']:.4f} (at worst {theirs['lowest']:.3f})"),
        ("moved/README.md", f"from {ours['at_rest']:.3f} to {cube['at_rest']:.3f}, GradICON to {other['at_rest']:.3f}"),
        ("README.md", f"carl-base changes by {changed:.4f} while the brain is in view"),
        ("../docs/models.md", f"[{changed:.3f} Dice on average]"),
        ("../docs/models.md", f"Dice is {ours['at_rest'] - cube['at_rest']:.2f} lower before any shift"),
        ("../docs/models.md", f"changes by {cube['mean_absolute_change']:.3f} on average with one"),
        ("README.md", f"carl-base changes by {cube['mean_absolute_change']:.3f} on average"),
        ("moved/README.md", f"it changes by {cube['mean_absolute_change']:.3f} on average ({cube['cases']} cases"),
        ("moved/README.md", f"at worst {cube['lowest']:.3f}; GradICON's by {other['mean_absolute_change']:.3f})"),
        ("moved/README.md", f"to within {matches['brain_missed_by_voxels']['median']:.3f} of a voxel in the median"),
        ("moved/README.md", f"follow by {matches['empty_space_followed_by_voxels']:.0f} voxels"),
    ):
        assert sentence in read(f"experiments/{name}"), f"{name} should say: {sentence}"


def angle_row(label: str, scores: dict[str, list[float]], angles: str) -> str:
    return f"| {label} | {' | '.join(f'{mean(scores[angle]):.3f}' for angle in angles.split())} |"


def test_the_page_about_rotations_says_what_the_files_say() -> None:
    page = read("experiments/rotation/README.md")
    runs, sweep = (experiment(f"rotation/results/{name}.json") for name in ("runs", "sweep"))
    names = {"rot": "CARL{ROT}", "CARL": "CARL", "displacement": "displacement"}
    names["outside"] = "CARL{ROT}, augmented outside the loss"
    angles = "0 15 30 45 90 135 180"
    rows = [angle_row("unregistered", runs["unregistered"], angles)]
    rows += [angle_row(names[run["network"]], run["dice"], angles) for run in runs["runs"]]
    for network in ("rot", "CARL", "displacement"):
        rows.append(angle_row(f"{names[network]}, alone", sweep["network"][network], angles))
        rows.append(angle_row(f"{names[network]}, with 50 steps", sweep["optimised"][network], angles))
    for name, words in TURNED.items():
        found = experiment(f"rotation/results/turned-{name}.json")["rows"]
        for plane in ("sagittal", "coronal", "axial"):
            dice = {row["degrees"]: row["dice"] for row in found if row["plane"] == plane or not row["degrees"]}
            cells = [f"{mean(dice[angle]):.3f}" if angle in dice else "" for angle in (0, 15, 30, 45, 60, 90, 135, 180)]
            rows += [f"| {words}, {plane} | {' | '.join(cells)} |"] if len(dice) > 1 else []
    assert [line for line in page.splitlines() if re.match(r"\| (?!degrees)\w", line)] == rows
    base = experiment("rotation/results/turned-base-optimised.json")["rows"]
    (straight,) = (mean(row["dice"]) for row in base if not row["degrees"])
    auto, rot = (experiment(f"rotation/results/turned-{name}-optimised.json")["rows"] for name in ("auto", "rot"))
    for found, where in ((auto, "at every angle that was tried"), (rot, "at every angle")):
        (upright,) = (mean(row["dice"]) for row in found if not row["degrees"])
        turned = [mean(row["dice"]) for row in found]
        assert max(abs(value - upright) for value in turned) < 0.03
        assert max(abs(value - straight) for value in turned) < 0.03
        assert upright > 0.7
        assert f"lies between {min(turned):.3f} and {max(turned):.3f} {where}, {upright:.3f} without a turn" in page
    alone = [mean(row["dice"]) for row in experiment("rotation/results/turned-rot.json")["rows"]]
    assert f"carl-rot alone lies between {min(alone):.3f} and {max(alone):.3f}: no other" in page
    card = read("docs/models.md")
    for words, found in (("network alone", "rot"), ("fields optimised", "rot-optimised")):
        by_angle = experiment(f"rotation/results/turned-{found}.json")["rows"]
        dice = [mean(row["dice"]) for row in by_angle]
        (upright,) = (mean(row["dice"]) for row in by_angle if not row["degrees"])
        assert f"| {words} | {upright:.3f} | {min(dice):.3f} to {max(dice):.3f} |" in card
    picture = experiment("rotation/results/picture.json")["methods"]
    turns = {name: [f"{abs(found['grid_turned_by'][key]):.0f}°" for key in WHERE] for name, found in picture.items()}
    inside, around = turns["carl-rot"]
    assert f"by {inside} in the median of the slice's small steps inside of the brain and by {around} in" in page
    assert f"auto's turns by {' and '.join(turns['auto'])}: there" in page
    learnt, later = (logged(f"rot-{run}", "validation") for run in (3, 4))
    assert f"rose from {' to '.join(f'{value:.3f}' for value in learnt)} (every 425 steps)" in page
    assert f"and to {max(later):.3f} in a second one of 4,520" in page
    again = [round(value) for value in logged("encoder-2", "dev_median")]
    assert f"was at {again[7]} mm after 2,000 steps, and at {again[-1]} mm after 3,000" in page
    known = [round(value) for value in logged("encoder", "dev_median")]
    assert (known[13], known[19], known[-1]) == (26, 8, 7)
    assert "it did not in 3,500 steps (26 mm off in the median)" in page
    assert "400 steps later the median was 8 mm, and 7 mm at the end" in page
    assert all(told["turned_back"] == (row["degrees"] > 20) for row in auto for told in row["told"])
    (of_retinas,) = of(runs, "rot")
    alone, optimised = (
        [mean(dice) for dice in found.values()] for found in (of_retinas["dice"], sweep["optimised"]["rot"])
    )
    assert f"between {min(alone):.3f} and {max(alone):.3f} at every angle" in page
    assert f"stays between {min(optimised):.3f} and {max(optimised):.3f}." in page
    assert f"between {min(alone):.2f} and {max(alone):.2f} at every angle" in read("experiments/README.md")
    (outside,) = of(runs, "outside")
    assert all(mean(outside["dice"][angle]) < mean(runs["unregistered"][angle]) for angle in outside["dice"])


def logged(run: str, key: str) -> list[float]:
    """What a log of experiments/rotation has under a key, in order."""
    entries = map(json.loads, read(f"experiments/rotation/results/log-{run}.jsonl").splitlines())
    return [entry[key] for entry in entries if key in entry]


WHERE = ("brain", "empty_space")
TURNED = {
    "base-optimised": "carl-base",
    "auto-optimised": "auto",
    "rot-optimised": "carl-rot",
    "gradicon-optimised": "GradICON",
    "ANTs": "ANTs SyNQuick",
    "base": "carl-base alone",
    "rot": "carl-rot alone",
    "gradicon": "GradICON alone",
}
"""Registrations of turned brains, and what the page calls them."""


def test_the_page_about_carl_base_says_what_the_files_say() -> None:
    page, index = read("experiments/base/README.md"), read("experiments/README.md")
    files = {"carl-base": "", "GradICON, 10.1 M parameters": "-grad", "CARL without abdomens": "-left"}
    files |= {"carl-base 3": "-4", "carl-base 3 with Ψ3": "-refine", "carl-base 2": "-3"}
    files |= {"GradICON after its first run": "-grad-1", "GradICON after its second run": "-grad-2"}
    scores = {name: experiment(f"base/results/scores{end}.json")["val"]["network"] for name, end in files.items()}
    shown = {}
    for name, found in scores.items():
        dice = [found["brain"]["dice"], found["abdomen"]["dice"], found["abdomen"]["dice_five"]]
        dice.append(found["hippocampus"]["dice"])
        folds = ", ".join(f"{found[key]['folds']:.4f}" for key in NATIVE)
        assert f"| {name} | {' | '.join(f'{value:.3f}' for value in dice)} | {folds} |" in page, name
        shown[name] = [f"{100 * value:.1f}" for value in dice]
    brain, _, five, parts = zip(shown["carl-base 3"], shown["carl-base 3 with Ψ3"], strict=True)
    assert f"brain {' / '.join(brain)}, abdomen (5 organs) {' / '.join(five)}, hippocampus {' / '.join(parts)}." in page
    assert f"abdomen (5 organs) {' / '.join(five)}, brain {' / '.join(brain)}]" in index
    theirs = shown["GradICON, 10.1 M parameters"]
    assert f"[{theirs[0]}, {theirs[2]}, {theirs[3]}]" in index
    now = shown["carl-base"]
    assert f"carl-base {now[0]}, {now[2]}, {now[3]} after as many |" in index
    ours, others = (
        [found["brain"]["dice"], found["abdomen"]["dice"], found["abdomen"]["dice_five"], found["hippocampus"]["dice"]]
        for found in (scores["carl-base"], scores["GradICON, 10.1 M parameters"])
    )
    ahead = [f"{a - b:.3f}" for a, b in zip(ours, others, strict=True)]
    assert f"by {ahead[0]} on brains, {ahead[1]} and {ahead[2]} on abdomens, {ahead[3]} on hippocampi" in page
    runs = [experiment(f"base/results/scores-grad{end}.json")["training_seconds"] for end in ("-1", "-2", "")]
    assert f"That is {sum(runs) / 60:.1f} minutes on one H200" in page
    rows = []
    for width in (32, 64, 96):
        found = experiment(f"base/results/scores-width-{width}.json")["dev"]["network"]
        dice = [f"{found[name]['dice']:.3f}" for name in NATIVE]
        rows.append(f"| {width} | {' | '.join(dice)} |")
    assert table(page, "| width | brain | abdomen, 13 organs | hippocampus |") == rows
    unseen = experiment("base/results/unseen.json")["means"]
    assert [row.split(" | ", 1)[1] for row in table(page, "| | 13 organs | 5 organs | folds, % |")] == [
        f"{found['dice']:.3f} | {found['dice_five']:.3f} | {found['folds']:.4f} |" for found in unseen.values()
    ]
    means = {how: f"{found['dice']:.3f}" for how, found in unseen.items()}
    assert f"from {means['affine']} to {means['network']}, and optimisation brings it to {means['optimised']}" in page
    card = f"has a mean Dice of {means['network']} on them, {means['optimised']} once the fields are optimised"
    assert card in read("docs/models.md")
    found = {
        (name, json.dumps(row["settings"]), row["set"]): [
            f"{row[key]:.3f}" for key in ("dice", "dice_five") if key in row
        ]
        for name in ("", "-3")
        for row in experiment(f"base/results/fields{name}.json")["rows"]
    }
    rows = table(page, "| | abdomen, 13 organs | 5 organs | brain | hippocampus |")
    for row, (name, settings) in zip(rows, TRIED, strict=True):
        cells = [cell for key in ("abdomen", "brain", "hippocampus") for cell in found[name, json.dumps(settings), key]]
        assert row.endswith(f" | {' | '.join(cells)} |"), (row, settings)
    found = {
        (json.dumps(row["settings"]), row["set"]): row
        for name in ("-4", "-4h")
        for row in experiment(f"base/results/fields{name}.json")["rows"]
    }
    settings: list[dict[str, float]] = [{"steps": 0}, {}, {"window": 1.5}, {"window": 1.5, "weight": 0.75}]
    cells = []
    for one in settings:
        abdomen, brains = (found[json.dumps(one), key] for key in ("abdomen", "brain"))
        dice = (abdomen["dice"], abdomen["dice_five"], brains["dice"])
        cells.append(f"{' | '.join(f'{value:.3f}' for value in dice)} |")
    rows = table(page, "| | abdomen, 13 organs | 5 organs | brain |")
    assert [row.split(" | ", 1)[1] for row in rows] == cells
    rows = table(page, "| hippocampus, on half the grid | Dice |")
    dice = [found[json.dumps(one), "hippocampus"]["dice"] for one in SMALL]
    assert [row.split(" | ", 1)[1] for row in rows] == [f"{value:.3f} |" for value in dice]


SMALL: list[dict[str, float]] = [
    {"steps": 0},
    {"side": 48},
    {"side": 48, "weight": 6},
    {"side": 48, "steps": 10},
    {"side": 48, "levels": 2},
    {"side": 48, "levels": 1},
    {"side": 48, "levels": 1, "window": 1.5, "weight": 0.75},
    *({"side": 48, "levels": 1, "learning_rate": rate, "window": 1.5, "weight": 0.75} for rate in (0.25, 0.1)),
    {"side": 48, "levels": 1, "learning_rate": 0.1, "steps": 10, "window": 1.5, "weight": 0.75},
]
"""The same of its table about small scans."""


TRIED: list[tuple[str, dict[str, float]]] = [
    ("", {"steps": 0}),
    ("-3", {}),
    ("-3", {"sigma": 3.0}),
    ("", {}),
    ("", {"window": 1.5}),
    ("", {"weight": 3.0}),
    ("", {"weight": 0.75}),
    ("", {"steps": 40}),
    ("-3", {"levels": 4, "sigma": 2.0}),
    ("-3", {"side": 48, "sigma": 2.0}),
    *(("", {"stay": weight}) for weight in (0.003, 0.01, 0.03, 0.1)),
]
"""What the rows of that table were made with, and in which file it is."""


def test_shifts_are_what_was_measured() -> None:
    errors = experiment("shift/results.json")["errors"]
    rows = [f"| {name} | {' | '.join(f'{curve[n]:.2g}' for n in (4, 8, 16, 24))} |" for name, curve in errors.items()]
    assert table(read("experiments/shift/README.md"), "| shift, voxels | 4 | 8 | 16 | 24 |") == rows
    displacements, _, exact = errors.values()
    sentence = f"{displacements[24]:.2g} voxels after a shift of 24; CARL's tree, next claim, is off by {exact[24]:.2g}"
    assert sentence in read("docs/walkthrough.md")
    assert max(exact[::4]) < 1e-12


def test_other_figures_in_sentences_are_what_was_measured() -> None:
    closed, landscape = experiment("closed_form/results.json")["1d"], experiment("landscape/results.json")
    one = results("gpu")["forward"]["ours"]["ms"] / 1e3
    fifty = results("gpu")["instance_optimisation_step"]["ours"]["ms"] / 20
    seconds = {
        kind: [round(median(row["command_seconds"] for row in native(name)[kind])) for name in NATIVE]
        for kind in ("network", "fields")
    }
    network, fields = (f"{min(seconds[kind])} to {max(seconds[kind])} s" for kind in seconds)
    shares = {name: f"{100 * curve['share_towards_0']['0.2']:.0f} %" for name, curve in landscape["curves"].items()}
    for page, sentence in (
        ("docs/walkthrough.md", f"the mean error is {closed['mean_error']:.7f} of the image's length"),
        ("docs/walkthrough.md", f"and the worst {closed['max_error']:.4f},"),
        ("docs/walkthrough.md", f"from {shares['TwoStep{τ, Φ}']} with a briefly trained Φ behind τ"),
        ("docs/walkthrough.md", f"and from {shares['τ']} without"),
        ("README.md", f"takes {network} for a pair with the network alone, and {fields} with optimisation"),
        ("experiments/README.md", f"| {one:.3f} and {fifty:.0f}, on an H200"),
    ):
        assert sentence in read(page), f"{page} should say: {sentence}"
