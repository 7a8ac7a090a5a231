"""Killed processes, full disks and failing writes: what was there is whole, and the next run finishes the work."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from carlreg.cohort.folder import RESERVED
from torture.bench import Outcome, carl, contents, expected, fingerprint, in_child, register, scene, workplace
from torture.families import Family, generator

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "shutil.rmtree")
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
static long left = -1; static int reason = 0;
void torture_arm(long bytes, int error) { left = bytes; reason = error; }
static int spent(int fd, size_t count) {
    struct stat about;
    if (left < 0 || fstat(fd, &about) || !S_ISREG(about.st_mode)) return 0;
    if ((long) count <= left) { left -= (long) count; return 0; }
    left = 0; errno = reason; return 1;
}
ssize_t write(int fd, const void *data, size_t count) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    return spent(fd, count) ? -1 : real(fd, data, count);
}
ssize_t pwrite64(int fd, const void *data, size_t count, off_t at) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
    return spent(fd, count) ? -1 : real(fd, data, count, at);
}
ssize_t pwrite(int fd, const void *data, size_t count, off_t at) { return pwrite64(fd, data, count, at); }
ssize_t writev(int fd, const struct iovec *parts, int count) {
    static ssize_t (*real)(int, const struct iovec *, int);
    size_t total = 0;
    for (int i = 0; i < count; i++) total += parts[i].iov_len;
    if (!real) real = dlsym(RTLD_NEXT, "writev");
    return spent(fd, total) ? -1 : real(fd, parts, count);
}
size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
    static size_t (*real)(const void *, size_t, size_t, FILE *);
    if (!real) real = dlsym(RTLD_NEXT, "fwrite");
    return spent(fileno(file), size * count) ? 0 : real(data, size, count, file);
}
"""


@dataclass(frozen=True)
class Command:
    """A command, the state it starts from, and what must hold of its folder afterwards."""

    name: str
    prepare: Callable[[Path], None]
    """Set up a folder with an older result."""
    run: Callable[[Path], int]
    wrong: Callable[[Path, bool], str | None]
    """What is wrong with the folder; `finished` if the command has run to its end."""


# ---- the commands ---------------------------------------------------------------------------------------------------


def old_result(folder: Path) -> None:
    """An older registration, of other images, in the folder that is about to be overwritten."""
    source = finished_result("other")
    shutil.copytree(source, folder / "out")


@functools.cache
def finished_result(moving: str) -> Path:
    folder = scene() / f"result-{moving}"
    outcome = in_child(lambda: carl(*register(folder, moving)))
    assert outcome.code == 0, outcome.stderr
    return folder


def wrong_result(folder: Path, finished: bool) -> str | None:
    out = folder / "out"
    if finished:
        leftovers = sorted(set(os.listdir(folder)) - {"out"})
        if leftovers:
            return f"leftover files: {leftovers}"
        hidden = [name for name in os.listdir(out) if name.startswith(".") and not name.endswith(".lock")]
        if hidden:
            return f"leftover files in the result: {hidden}"
    if not (out / "report.json").is_file():
        return "no result after the command has finished" if finished else None  # unfinished, and free to use
    found = contents(out)
    wanted = [expected("moving")] if finished else [expected("moving"), expected("other")]
    return None if found in wanted else "old and new files are mixed, or a file is damaged"


def warp_words(folder: Path) -> list[object]:
    moving, result = scene() / "moving.nii.gz", finished_result("moving")
    return ["warp", "-i", moving, "-t", result, "-o", folder / "w.nii.gz", "--overwrite"]


@functools.cache
def warped() -> str:
    with workplace() as folder:
        outcome = in_child(lambda: carl(*warp_words(folder)))
        assert outcome.code == 0, outcome.stderr
        return fingerprint(folder / "w.nii.gz")


def wrong_warp(folder: Path, finished: bool) -> str | None:
    if finished and os.listdir(folder) != ["w.nii.gz"]:
        return f"leftover files: {sorted(os.listdir(folder))}"
    found = fingerprint(folder / "w.nii.gz")
    wanted = [warped()] if finished else [warped(), fingerprint(scene() / "other.nii.gz")]
    return None if found in wanted else "the file is neither the old nor the new one"


def write_table(folder: Path) -> None:
    base = scene()
    rows = [f"{name},{base / 'fixed.nii.gz'},{base / name}.nii.gz" for name in ("moving", "other")]
    (folder / "pairs.csv").write_text("\n".join(["name,fixed,moving", *rows]) + "\n")


def cohort(folder: Path) -> int:
    words = register(folder / "out")
    rest = words[words.index("--model") :]
    return carl("register", "--pairs", folder / "pairs.csv", "-o", folder / "out", *rest)


def wrong_cohort(folder: Path, finished: bool) -> str | None:
    for name in ("moving", "other"):
        out = folder / "out" / name
        if (out / "report.json").is_file():
            if contents(out) != expected(name):
                return f"the result of {name} is damaged"
        elif finished:
            return f"no result of {name} after the command has finished"
    summary = folder / "out" / "summary.csv"
    if finished and len(summary.read_text().splitlines()) != 3:
        return "summary.csv does not list both pairs"
    if finished and (more := set(os.listdir(folder / "out")) - {"moving", "other", *RESERVED}):
        return f"leftover files: {sorted(name for name in more)}"
    return None


def training(folder: Path) -> int:
    words = ["train", scene() / "images", "-o", folder / "run", "--size", "tiny", "--grid", "16", "--batch", "1"]
    words += ["--diffusion-steps", "1", "--steps", "2", "--save-every", "1", "--log-every", "1", "--device", "cpu"]
    return carl(*words, "--val-fraction", "0", "--cache", scene() / "cache", "--no-tensorboard", "--quiet")


@functools.cache
def trained() -> str:
    with workplace() as folder:
        outcome = in_child(lambda: training(folder))
        assert outcome.code == 0, outcome.stderr
        return fingerprint(folder / "run" / "last.safetensors")


def wrong_training(folder: Path, finished: bool) -> str | None:
    model = folder / "run" / "last.safetensors"
    if not model.is_file():
        return "no model after the command has finished" if finished else None
    from carlreg import load

    load(model)
    if finished and fingerprint(model) != trained():
        return "the model differs from that of an unbroken run"
    return None


def old_image(folder: Path) -> None:
    shutil.copy(scene() / "other.nii.gz", folder / "w.nii.gz")


def nothing(folder: Path) -> None:
    """No older result."""


COMMANDS = (
    Command("register", nothing, lambda f: carl(*register(f / "out")), wrong_result),
    Command(
        "register --overwrite", old_result, lambda f: carl(*register(f / "out", "moving", "--overwrite")), wrong_result
    ),
    Command(
        "warp --overwrite",
        old_image,
        lambda f: carl(*warp_words(f)),
        wrong_warp,
    ),
    Command("register --pairs", write_table, cohort, wrong_cohort),
    Command("train", nothing, training, wrong_training),
)


# ---- killed at a file event -----------------------------------------------------------------------------------------


def count_events(folder: Path, stop_at: int | None, report: Path | None = None) -> None:
    """Count file events below a folder in this process; kill it before one of them happens."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event not in EVENTS or not arguments or not str(arguments[0]).startswith(str(folder)):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if seen == stop_at:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1
        if report is not None:
            os.write(descriptor, b".")

    descriptor = -1 if report is None else os.open(report, os.O_WRONLY | os.O_CREAT)
    sys.addaudithook(hook)


def events_of(command: Command) -> int:
    with workplace() as folder, tempfile.TemporaryDirectory() as other:
        command.prepare(folder)
        report = Path(other) / "events"

        def action() -> int:
            count_events(folder, None, report)
            return command.run(folder)

        outcome = in_child(action)
        assert outcome.code == 0, outcome.stderr
        return report.stat().st_size


def killed(command: Command, case: int) -> str | None:
    with workplace() as folder:
        command.prepare(folder)

        def action() -> int:
            count_events(folder, case)
            return command.run(folder)

        outcome = in_child(action)
        if not outcome.killed:
            return f"was not killed at event {case}: {outcome}"
        return command.wrong(folder, False) or again(command, folder)


def again(command: Command, folder: Path) -> str | None:
    """Run the command once more, undisturbed: it must finish the work, or find it finished."""
    outcome = in_child(lambda: command.run(folder))
    if outcome.code != 0 and command.wrong(folder, True) is not None:
        return f"the next run failed: {outcome.stderr.strip()[-300:]}"
    return command.wrong(folder, True)


# ---- full disks and failing writes ----------------------------------------------------------------------------------


def one_line(outcome: Outcome) -> str | None:
    """What is wrong with how a failure was reported."""
    lines = [line for line in outcome.stderr.splitlines() if line.strip()]
    if "Traceback" in outcome.stderr:
        return f"a traceback: {lines[-1]}"
    return None if lines else "no message"


@functools.cache
def needs(command: Command) -> tuple[int, int]:
    """Kilobytes of the older result, and of everything once the command has finished."""
    with workplace() as folder:
        command.prepare(folder)
        sizes = [usage(folder)]
        outcome = in_child(lambda: command.run(folder))
        assert outcome.code == 0, outcome.stderr
        return sizes[0], usage(folder)


def usage(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4 + 4 for path in folder.rglob("*")) + 16


def full_disk(command: Command, case: int) -> str | None:
    """Run a command on a disk that is full at one of 100 sizes, from the older result alone to more than enough."""
    before, after = needs(command)
    kilobytes = before + round((after + before) * 1.1 * case / 99)
    with workplace() as place:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)], check=True)
        try:
            folder = place / "work"
            folder.mkdir()
            command.prepare(folder)
            outcome = in_child(lambda: command.run(folder))
            if outcome.code == 0:
                return command.wrong(folder, True)
            if outcome.code != 1:
                return f"exit code {outcome.code}: {outcome.stderr.strip()[-300:]}"
            return one_line(outcome) or command.wrong(folder, False)
        finally:
            subprocess.run(["umount", str(place)], check=True)


def failing_write(command: Command, allowed: int, error: int) -> str | None:
    """Run a command whose writes fail after so many bytes."""
    with workplace() as folder:
        command.prepare(folder)

        def action() -> int:
            ctypes.CDLL(None).torture_arm(ctypes.c_long(allowed), ctypes.c_int(error))
            return command.run(folder)

        outcome = in_child(action)
        if outcome.code == 0:
            return command.wrong(folder, True)
        return one_line(outcome) or command.wrong(folder, False) or again(command, folder)


def build_shim(folder: Path) -> Path | None:
    """A library that makes writes fail, to be preloaded; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def two_writers(case: int) -> str | None:
    """Two registrations into one folder at once: the folder holds one of them, whole."""
    with workplace() as folder:
        if case % 2:
            old_result(folder)
        pids = []
        for moving in ("moving", "other"):
            pid = os.fork()
            if pid == 0:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 2)
                os._exit(carl(*register(folder / "out", moving, "--overwrite")))
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if 0 not in codes or not set(codes) <= {0, 1}:
            return f"exit codes {codes}"
        found = contents(folder / "out")
        if found not in (expected("moving"), expected("other")):
            return "files of two registrations are mixed"
        return None


def families() -> list[Family]:
    def kills(command: Command) -> Family:
        return Family(f"killed: {command.name}", events_of(command), lambda case: killed(command, case))

    def disks(command: Command) -> Family:
        return Family(f"full disk: {command.name}", 100, lambda case: full_disk(command, case))

    def errors(command: Command) -> Family:
        def run(case: int) -> str | None:
            rng = generator(command.name, case)
            return failing_write(command, rng.randrange(2_000_000), rng.choice((errno.EIO, errno.ENOSPC, errno.EDQUOT)))

        return Family(f"failing writes: {command.name}", 50, run)

    for moving in ("moving", "other"):  # made before any fork, so that children find them
        finished_result(moving)
        expected(moving)
    warped()
    trained()
    found = [kills(command) for command in COMMANDS]
    found.append(Family("two writers, one folder", 60, two_writers))
    if os.geteuid() == 0 and shutil.which("mount"):
        found += [disks(command) for command in COMMANDS[:4]]
    if hasattr(ctypes.CDLL(None), "torture_arm"):
        found += [errors(command) for command in COMMANDS[:4]]
    return found
