"""Build the documentation as a website in site/, and check every link of it.

    python docs/build.py          # or: make docs

Pages are written for reading in the repository, where they link to each other and to sources, tests and results by
relative paths. So the site is built from a copy that keeps those paths: the README, the pages of docs/, and whatever
can be reached from them by links. A source file becomes a page that shows it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
STAGED = ROOT / "build" / "docs"
SITE = ROOT / "site"

CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
AS_THEY_ARE = {".png", ".webp", ".svg", ".json", ".jsonl"}
"""Files that a browser shows itself."""


def main() -> None:
    subprocess.run([sys.executable, str(ROOT / "docs" / "api.py")], cwd=ROOT, check=True)
    try:
        stage()
    except ValueError as error:
        sys.exit(f"{error}")
    built = subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT, check=False)
    wrong = list(broken(SITE)) if built.returncode == 0 else ["the website was not built"]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE.name}/, no broken link")
    print(f"open {SITE.name}/index.html; to search as well: {Path(sys.executable).name} -m http.server -d {SITE.name}")


def stage(root: Path = ROOT, out: Path = STAGED) -> None:
    """Copy the README, docs/*.md and every file that they lead to, under the same paths."""
    root = root.resolve()
    shutil.rmtree(out, ignore_errors=True)
    todo = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    seen = set(todo)
    (out / "docs").mkdir(parents=True)
    for script in (root / "docs").glob("*.js"):
        shutil.copyfile(script, out / "docs" / script.name)
    for page in todo:  # which grows
        text, targets = staged(page, root)
        todo += [target for target in targets if target not in seen]
        seen |= targets
        target = out / page.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix in AS_THEY_ARE:
            shutil.copyfile(page, target)
        else:
            target.with_name(shown(page)).write_text(text, encoding="utf-8")


def staged(path: Path, root: Path) -> tuple[str, set[Path]]:
    """A file's text as the site has it, and the files that it links to."""
    if path.suffix in AS_THEY_ARE:
        return "", set()
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        return f"# `{path.relative_to(root).as_posix()}`\n\n````{path.suffix[1:] or 'text'}\n{text}\n````\n", set()
    targets: set[Path] = set()

    def link(found: re.Match[str]) -> str:
        name, mark, anchor = found[0].partition("#")
        if "://" in name or not name:
            return found[0]
        target = (path.parent / name).resolve()
        if not target.is_file() or not target.is_relative_to(root):
            raise ValueError(f"{path.relative_to(root)} links to {found[0]}, which is not a file of this repository")
        targets.add(target)
        return f"{name.removesuffix(target.name)}{shown(target)}{mark}{anchor}"

    # Every second piece is code. Marks after a fence's language, as in "python no-run", are for the tests.
    pieces = CODE.split(text)
    pieces[::2] = [TARGET.sub(link, piece) for piece in pieces[::2]]
    pieces[1::2] = [re.sub(r"\A(```\w*)[^`\n]*\n", r"\1\n", piece) for piece in pieces[1::2]]
    return "".join(pieces), targets


def shown(path: Path) -> str:
    """The name of a file on the site: sources are pages."""
    return path.name if path.suffix in {".md", *AS_THEY_ARE} else f"{path.name}.md"


class Links(HTMLParser):
    """What a page links to or loads, as tags and addresses, and what can be linked to in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.targets += [(tag, values[name]) for name in ("href", "src") if name in values]


def broken(site: Path) -> Iterator[str]:
    """A line for every link that leads nowhere, and for everything that a page loads from elsewhere."""
    site = site.resolve()
    pages = {page: Links(page) for page in sorted(site.rglob("*.html"))}
    for page, links in pages.items():
        for tag, link in links.targets:
            name, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:|//", name):
                if tag != "a" and not name.startswith("data:"):
                    yield f"{page.relative_to(site)}: {link} is loaded from elsewhere"
                continue
            base = site if name.startswith("/") else page.parent
            target = (base / name.lstrip("/").partition("?")[0]).resolve() if name else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{page.relative_to(site)}: {link} leads nowhere"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{page.relative_to(site)}: {link} has no such heading"


if __name__ == "__main__":
    main()
