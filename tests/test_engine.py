"""The engine of cohorts: every task has one outcome, whatever raises, dies or is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from engine_work import Square

from carlreg.cohort.engine import run
from carlreg.cohort.threads import COUNTS
from carlreg.cohort.work import Outcome, Slot, Stages, Workers
from carlreg.errors import InputError

SOURCE, TESTS = Path(__file__).parents[1] / "src", Path(__file__).parent
WORKERS = [1, 3]


def outcomes(work: Square, tasks: range, count: int) -> dict[int, Outcome[int, tuple[int, int, str | None]]]:
    found = list(run(work, tasks, Workers(count=count)))
    assert sorted(one.task for one in found) == list(tasks), "not every task has one outcome"
    return {one.task: one for one in found}


def calls(folder: Path, name: str) -> int:
    return len(list(folder.glob(f"{name}.*")))


@pytest.mark.parametrize("count", WORKERS)
def test_every_task_is_done_once_by_workers_that_open_once(tmp_path: Path, count: int) -> None:
    found = outcomes(Square(tmp_path), range(20), count)
    assert [found[n].result[0] for n in range(20) if found[n].result] == [n * n for n in range(20)]
    assert all(calls(tmp_path, f"call-{n}") == 1 and found[n].tries == 1 for n in range(20))
    assert len(list(tmp_path.glob("open-*"))) == count
    processes = {one.result[1] for one in found.values() if one.result}
    assert (processes == {os.getpid()}) if count == 1 else (os.getpid() not in processes and len(processes) <= count)


@pytest.mark.parametrize("count", WORKERS)
def test_what_raises_is_tried_once_more_and_bad_input_is_not(tmp_path: Path, count: int) -> None:
    found = outcomes(Square(tmp_path, raises_once=2, raises_always=3, refuses=5), range(8), count)
    assert (found[2].tries, found[2].failure) == (2, None)
    assert found[3].tries == calls(tmp_path, "call-3") == 2
    assert found[3].failure is not None
    assert found[3].failure.message == "input/output error"
    assert found[5].tries == calls(tmp_path, "call-5") == 1
    assert found[5].failure is not None
    assert found[5].failure.message == "the file does not exist"
    assert sum(one.failure is None for one in found.values()) == 6


def test_a_worker_that_dies_is_replaced_and_its_task_tried_again(tmp_path: Path) -> None:
    found = outcomes(Square(tmp_path, kills_once=1, kills_always=4), range(8), 2)
    assert (found[1].tries, found[1].failure) == (2, None)
    assert found[4].tries == 2
    assert found[4].failure is not None
    assert "its worker died (killed by SIGKILL" in found[4].failure.message
    assert sum(one.failure is None for one in found.values()) == 7
    assert len(list(tmp_path.glob("open-*"))) in (4, 5)  # two, and one for each that died but perhaps the last


@pytest.mark.parametrize("count", WORKERS)
def test_an_error_while_opening_is_raised(tmp_path: Path, count: int) -> None:
    with pytest.raises(InputError, match="no model 'x'"):
        list(run(Square(tmp_path, cannot_open=True), range(3), Workers(count=count)))


def test_threads_are_divided_among_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COUNTS:
        monkeypatch.setenv(name, "6")
    found = outcomes(Square(tmp_path), range(6), 3)
    assert {one.result[2] for one in found.values() if one.result} == {"2"}


def test_tasks_are_taken_only_when_a_worker_is_free(tmp_path: Path) -> None:
    taken = []
    tasks = (taken.append(n) or n for n in range(1000))  # type: ignore[func-returns-value]
    stream = run(Square(tmp_path), tasks, Workers(count=2))
    next(stream)
    assert len(taken) <= 4
    stream.close()


def test_workers_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    """Otherwise they would go on writing into the folder that the next run resumes."""
    script = (
        f"import sys; sys.path[:0] = [{str(SOURCE)!r}, {str(TESTS)!r}]\n"
        "from pathlib import Path; from engine_work import Square\n"
        "from carlreg.cohort.engine import run; from carlreg.cohort.work import Workers\n"
        f"list(run(Square(Path({str(tmp_path)!r}), seconds=30), range(4), Workers(count=2)))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 60
    while len(opened := list(tmp_path.glob("open-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    workers = [int(path.name.split(".")[1]) for path in opened]
    while any(Path(f"/proc/{pid}").exists() and not zombie(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker goes on without its parent"
        time.sleep(0.05)


def zombie(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


@pytest.mark.parametrize("options", [{"count": 0}, {"cpus_per_worker": 0}, {"gpus_per_worker": -1.0}])
def test_impossible_workers_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="expected"):
        Workers(**options)  # type: ignore[arg-type]


def test_ray_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"Ray is not installed; .* pip install 'carlreg\[cluster\]'"):
        list(run(Square(tmp_path), range(3), Workers(ray="auto")))


# ---- reading, computing and writing at the same time ----------------------------------------------------------------


class Parts:
    """Squares numbers in three parts, each of which can wait for an event, raise, and leaves a mark."""

    def __init__(self) -> None:
        self.events: defaultdict[tuple[str, int], threading.Event] = defaultdict(threading.Event)
        self.waits: dict[tuple[str, int], tuple[str, int]] = {}
        self.raises: dict[tuple[str, int], Exception] = {}
        self.marks: list[tuple[str, int]] = []
        self.threads: dict[str, set[int]] = defaultdict(set)

    def open(self, slot: Slot) -> Stages:
        return Stages(
            lambda task: self.part("read", task, task),
            lambda task: self.part("compute", task, task * task),
            lambda square: self.part("write", round(square**0.5), square),
        )

    def part(self, name: str, task: int, result: int) -> int:
        self.marks.append((name, task))
        self.threads[name].add(threading.get_ident())
        self.events[name, task].set()
        if (name, task) in self.waits:
            assert self.events[self.waits[name, task]].wait(60), f"{name} {task} waited in vain"
        if (name, task) in self.raises:
            raise self.raises[name, task]
        self.marks.append((f"{name} done", task))
        return result


def parted(parts: Parts, tasks: Iterable[int]) -> list[Outcome[int, int]]:
    return list(run(parts, tasks, Workers(count=1)))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set how many CPU threads there are."""
    return lambda count: monkeypatch.setenv("OMP_NUM_THREADS", str(count))


def test_the_next_task_is_read_and_the_last_one_written_while_one_is_computed(threads: Callable[[int], None]) -> None:
    threads(2)
    parts = Parts()
    parts.waits = {("compute", n): ("read", n + 1) for n in range(4)} | {
        ("write", n): ("compute", n + 1) for n in range(4)
    }
    found = parted(parts, range(5))
    assert [(one.task, one.result, one.failure, one.tries) for one in found] == [(n, n * n, None, 1) for n in range(5)]
    assert parts.threads["compute"] == {threading.get_ident()}
    assert len(parts.threads["read"] | parts.threads["write"] | parts.threads["compute"]) == 3


def test_results_are_written_side_by_side_if_there_are_cores(threads: Callable[[int], None]) -> None:
    threads(16)
    parts = Parts()
    parts.waits = {("write", n): ("write", n + 2 - n % 3) for n in range(9) if n % 3 < 2}  # each three at a time
    found = parted(parts, range(9))
    assert [(one.task, one.result) for one in found] == [(n, n * n) for n in range(9)]
    assert len(parts.threads["write"]) == 3


@pytest.mark.parametrize(("cores", "writers"), [(2, 1), (8, 2), (64, 3)])
def test_few_tasks_are_in_memory(cores: int, writers: int, threads: Callable[[int], None]) -> None:
    threads(cores)
    parts = Parts()
    for number, _ in enumerate(run(parts, range(12), Workers(count=1))):
        assert ("write done", number) in parts.marks, "an outcome came before its task was written"
    held = most = 0
    for name, _ in parts.marks:
        held += (name == "read") - (name == "write done")
        most = max(most, held)
    assert most <= 2 + writers


@pytest.mark.parametrize("part", ["read", "compute", "write"])
def test_an_exception_in_a_part_fails_its_task_alone(part: str) -> None:
    parts = Parts()
    parts.raises = {(part, 1): InputError("no such file"), (part, 3): OSError(5, "Input/output error")}
    found = {one.task: one for one in parted(parts, range(6))}
    assert {n: one.result for n, one in found.items()} == {n: None if n in (1, 3) else n * n for n in range(6)}
    assert found[1].failure is not None
    assert (found[1].failure.message, found[1].tries) == ("no such file", 1)
    assert found[3].failure is not None
    assert (found[3].failure.message, found[3].tries) == ("input/output error", 2)
    later = {"read": ["compute", "write"], "compute": ["write"], "write": []}[part]
    assert not [mark for mark in parts.marks if mark[0] in later and mark[1] in (1, 3)]


def test_what_is_written_is_finished_when_a_run_is_stopped() -> None:
    """As by Ctrl-C, which is raised where the run computes."""
    parts = Parts()
    parts.waits = {("write", 0): ("compute", 1)}
    parts.raises = {("compute", 1): KeyboardInterrupt()}  # type: ignore[dict-item]
    with pytest.raises(KeyboardInterrupt):
        parted(parts, range(9))
    assert ("write done", 0) in parts.marks
    assert ("write", 1) not in parts.marks
