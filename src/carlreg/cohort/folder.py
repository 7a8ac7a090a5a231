"""The folder of a cohort: its settings, the rows of its pairs, and what people look at, `summary.csv` and `index.html`.

Each run appends a line to a file of its own for every pair that it has finished. The summary and the gallery are made
from all of these files and replaced as a whole, so that runs of several shards, on several machines, share a folder.
If a run is killed, the results and lines of all finished pairs are there; the next run continues.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carlreg.cohort.gallery import gallery
from carlreg.cohort.rows import Row, summary
from carlreg.cohort.shard import Shard
from carlreg.errors import OVERWRITE, ExistsError, InputError, OutputError
from carlreg.files.atomic import append_lines, in_turn, only_writer, sweep, write_atomically

SETTINGS, SUMMARY, GALLERY, ROWS = "cohort.json", "summary.csv", "index.html", ".rows"
RESERVED = (SETTINGS, SUMMARY, GALLERY, ROWS)
SHARE = 0.05
"""At most this share of the time is spent on rewriting the summary and the gallery: those of many pairs are long."""


@dataclass(frozen=True)
class CohortFolder:
    """A folder that `carl cohort` writes."""

    path: Path

    def pin(self, settings: Mapping[str, Any], defaults: Mapping[str, Any], *, overwrite: bool) -> bool:
        """Keep the settings of a new cohort, or compare them with those of the cohort that is there.

        Returns whether the cohort has been overwritten, so that results with other settings are of an older one. A
        setting that a cohort of an earlier version lacks is compared with its default.
        """
        sweep(self.path / SETTINGS)  # a run that goes on does not write it again
        held = None if overwrite else self._read_settings()
        if held is None:
            content = {"settings": dict(settings), "overwritten": overwrite}
            write_atomically(self.path / SETTINGS, (json.dumps(content, indent=2) + "\n").encode())
            return overwrite
        before = held["settings"]
        different = [
            f"{name}={mine!r} instead of {value!r}"
            for name, value in settings.items()
            if (mine := before.get(name, defaults.get(name, value))) != value
        ]
        if different:
            found = f"{self.path} holds a cohort with {', '.join(different)}"
            raise ExistsError(f"{found}; choose a new folder, use the same settings, or {OVERWRITE}")
        return bool(held.get("overwritten"))

    def _read_settings(self) -> dict[str, Any] | None:
        target = self.path / SETTINGS
        if not target.exists():
            return None
        try:
            held = json.loads(target.read_text(encoding="utf-8"))
            if isinstance(held["settings"], dict):
                return dict(held)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise InputError(f"{target} is damaged; expected the settings of a cohort: choose a new folder, or {OVERWRITE}")

    @contextmanager
    def board(self, names: Sequence[str], shard: Shard, *, failed_first: bool) -> Iterator[Board]:
        """Record the rows of a shard, of all pairs by `names`. One run at a time works on a shard."""
        mine = self.path / ROWS / str(shard)
        which = "" if shard.count == 1 else f"shard {shard.number}/{shard.count} of "
        busy = ExistsError(f"another process works on {which}{self.path}; wait for it, or choose another folder")
        with only_writer(mine, busy):
            board = Board(self.path, names, mine / "rows.jsonl", failed_first=failed_first)
            try:
                yield board
            finally:
                board.close()


class Board:
    """Writes a line for every row, and keeps the summary and the gallery up to date in the background."""

    def __init__(self, folder: Path, names: Sequence[str], journal: Path, *, failed_first: bool = False) -> None:
        self._folder, self._journal, self._failed_first = folder, journal, failed_first
        self._rows = {name: Row(name) for name in names}
        self._expected = frozenset(names)
        self._read: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._changed, self._closed = threading.Event(), threading.Event()
        self._collect(first=True)
        self._changed.set()
        self._thread = threading.Thread(target=self._keep_up, daemon=True)
        self._thread.start()

    @property
    def rows(self) -> list[Row]:
        """The rows of all pairs, in order; those of pairs that are not in this run's list come last."""
        with self._lock:
            return list(self._rows.values())

    def add(self, *rows: Row) -> None:
        finished = [row.now() for row in rows]
        append_lines(self._journal, (json.dumps(row.to_json()) for row in finished))
        self._merge(finished)
        self._changed.set()

    def forget(self, names: Iterable[str]) -> None:
        """Take pairs as pending that are going to be registered again."""
        with self._lock:
            known = [name for name in names if self._rows[name].status != "pending"]
        if known:
            self.add(*(Row(name) for name in known))

    def close(self) -> None:
        """Write the summary and the gallery a last time; raise if that fails."""
        self._closed.set()
        self._changed.set()
        self._thread.join()
        self._write()

    def _keep_up(self) -> None:
        while not self._closed.is_set():
            self._changed.wait()
            self._changed.clear()
            start = time.monotonic()
            with suppress(OutputError):  # the disk is full, say: the last attempt raises
                self._write()
            self._closed.wait((time.monotonic() - start) * (1 / SHARE - 1))

    def _write(self) -> None:
        with in_turn(self._folder / ROWS):
            self._collect()
            rows = self.rows
            write_atomically(self._folder / SUMMARY, summary(rows))
            write_atomically(self._folder / GALLERY, self._gallery(rows))

    def _gallery(self, rows: Sequence[Row]) -> bytes:
        return gallery(rows, title=self._folder.name, failed_first=self._failed_first).encode()

    def _collect(self, *, first: bool = False) -> None:
        """Read what other runs, or earlier ones, have added to their files."""
        for path in sorted((self._folder / ROWS).glob("*/rows.jsonl")):
            if path == self._journal and not first:
                continue
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                content = file.read()
            whole = content.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            found = _parsed(content[:whole].splitlines())
            if first:  # a pair of another table whose folder was removed is gone
                found = (row for row in found if row.name in self._expected or self._exists(row))
            self._merge(found)

    def _exists(self, row: Row) -> bool:
        return bool(row.page) and (self._folder / row.page).exists()

    def _merge(self, rows: Iterable[Row]) -> None:
        with self._lock:
            for row in rows:
                held = self._rows.get(row.name)
                if held is None or row.finished >= held.finished:
                    self._rows[row.name] = row


def _parsed(lines: Iterable[bytes]) -> Iterator[Row]:
    for line in lines:
        with suppress(ValueError, TypeError):
            yield Row.from_json(json.loads(line))
