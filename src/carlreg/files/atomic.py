"""The one writer: a file, or a set of files in a folder, appears whole or not at all.

Everything is written to a hidden staging folder beside the target, flushed to the disk and then renamed, with the
permissions that the umask leaves. A failure removes the staging folder and leaves the target as it was. A killed
process leaves its staging folder behind: the next writer of the same target restores what it has moved, and removes
it, unless its lock shows that another process still uses it.
"""

import glob
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from carlreg.errors import OVERWRITE, CarlError, ExistsError, OutputError

PathLike = str | os.PathLike[str]
SUFFIX = ".carl-tmp"  # ends every staging folder's name; nothing else is ever swept
FILES, NEW, OLD, GONE, LIST = "files", "new", "old", "gone", "names"
"""The name that `write_together` stages under; its folders: the new files, the old ones, and once all are there; and
the file that lists the new ones."""
STAGED = re.compile(r"[/\\]\.[^/\\]*\.[0-9a-f]{8}\.carl-tmp(?:[/\\](?:new|old))?(?=[/\\])")


def write_atomically(path: PathLike, content: bytes | Callable[[Path], object], *, overwrite: bool = True) -> None:
    """Write bytes, or what a function writes to the path that it is called with: the target's name in another folder.

    The function raises if the file is not whole. Libraries hide why; if the disk is full, the error says so.

    >>> write_atomically("scores.csv", b"dice\\n0.9\\n")
    """
    target = Path(os.path.realpath(path))
    write = content if callable(content) else lambda temporary: temporary.write_bytes(content)
    with _named(path):
        refuse_existing(path, overwrite)
        with _staging(target.parent, target.name) as staging:
            temporary = staging / target.name
            try:
                write(temporary)
            except Exception:
                with open(temporary, "ab") as file:  # raises the disk's own error if there is one
                    file.write(bytes(2**20))
                    file.flush()
                    os.fsync(file.fileno())
                raise
            _flush(temporary)
            refuse_existing(path, overwrite)
            os.replace(temporary, target)
            _flush_folder(target.parent)


def sweep(path: PathLike) -> None:
    """Remove what killed writers of a file left beside it. Every new writer does so itself."""
    target = Path(os.path.realpath(path))
    _sweep(target.parent, target.name)


def append_lines(path: PathLike, lines: Iterable[str]) -> None:
    """Append lines to a file and flush it to the disk. If the process is killed, no line but these is lost.

    Each file has one writer. Readers ignore what follows the last end of a line; the next writer removes it.
    """
    with _named(path), open(path, "ab+") as file:
        file.truncate(_whole_lines(file))
        file.write("".join(f"{line}\n" for line in lines).encode())
        file.flush()
        os.fsync(file.fileno())


def _whole_lines(file: BinaryIO) -> int:
    """The length of a file up to its last end of a line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 2**16)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


@contextmanager
def write_together(folder: PathLike, names: Collection[str], *, last: str, overwrite: bool = False) -> Iterator[Path]:
    """Give a staging folder, then put the files written there into `folder`.

    Without `overwrite`, raise if a file of the result is there, which are those called `names` and what is staged; with
    it, remove them. `last` is removed first and arrives last. Old and new files are never there at the same time. Files
    with other names stay. A second writer waits for the first. On failure, the folder is as it was; if the process is
    killed, the next one that looks at the folder restores what was there, unless all new files have arrived.

    >>> with write_together("out", ["scores.csv", "scores.json"], last="scores.json") as staging:
    ...     write_atomically(staging / "scores.csv", b"...")
    ...     write_atomically(staging / "scores.json", b"...")
    """
    target = Path(os.path.realpath(folder))
    with _named(folder), _locked(target):
        _sweep(target, FILES)
        refuse_result(folder, names, last=last, overwrite=overwrite)
        with _staging(target, FILES) as staging:
            new = staging / NEW
            new.mkdir()
            yield new
            staged = sorted((path.name for path in new.iterdir()), key=lambda name: name == last)
            for name in staged:
                _flush(new / name)
                refuse_existing(Path(folder) / name, overwrite)
            _exchange(staging, target, {*names, *staged}, staged)


def _exchange(staging: Path, target: Path, names: Collection[str], staged: Sequence[str]) -> None:
    """Move the files called `names` from the target to `staging / OLD`, then the staged ones to the target. The last of
    these is removed first and arrives last."""
    (staging / LIST).write_text(json.dumps(staged), encoding="utf-8")
    _flush(staging / LIST)
    (staging / OLD).mkdir()
    try:
        _move(target, staging / OLD, sorted(names, key=lambda name: name != staged[-1]))
        (staging / OLD).rename(staging / GONE)
        _move(staging / NEW, target, staged)
    except BaseException:
        _recover(staging, target)
        raise
    _flush_folder(target)


def _recover(staging: Path, target: Path) -> None:
    """Undo an exchange that was interrupted before all new files had arrived."""
    new, old, gone = staging / NEW, staging / OLD, staging / GONE
    if not (old.exists() or gone.exists()):
        return
    staged = _listed(staging / LIST)
    if gone.exists():
        if (target / staged[-1]).exists():
            return
        _move(target, new, [name for name in staged if not (new / name).exists()])
        gone.rename(old)
    _move(old, target, sorted(os.listdir(old), key=lambda name: name == staged[-1]))


def _listed(path: Path) -> list[str]:
    """The names in a list; a damaged one, or one that leads out of the folder, is refused."""
    with suppress(ValueError, OSError):
        names = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(names, list) and names and all(Path(str(one)).name == one != ".." for one in names):
            return names
    raise OutputError(f"{path} is damaged; move what you need out of {path.parent}, and remove that folder")


def refuse_existing(path: PathLike, overwrite: bool) -> None:
    """Raise if a file exists and must not be overwritten, or is a folder."""
    if Path(path).is_dir():
        raise OutputError(f"{path} is a folder; expected the name of a file")
    if Path(path).exists() and not overwrite:
        raise ExistsError(f"{path} exists already; choose another name, or {OVERWRITE}")


def refuse_inputs(outputs: Iterable[PathLike], inputs: Iterable[object]) -> None:
    """Raise if a file that is going to be written is one of the inputs: not even overwriting replaces these."""
    read = {os.path.realpath(one) for one in inputs if isinstance(one, (str, os.PathLike))}
    for path in outputs:
        if os.path.realpath(path) in read:
            raise OutputError(f"{path} is an input of this run, which cannot be overwritten; choose another output")


def refuse_result(folder: PathLike, names: Iterable[str], *, last: str, overwrite: bool) -> Path:
    """Raise if files cannot be written to a folder, or if it holds files called `names` that must not be overwritten;
    `last` is that of a finished result.

    Leftovers of a killed writer in the folder are cleaned up first.
    """
    target = Path(folder)
    with suppress(OSError), _lock(target) as locked:
        if locked:
            _sweep(target, FILES)
    if target.exists() and not target.is_dir():
        raise ExistsError(f"{target} is a file; expected a folder for the results: choose another name")
    if (target / last).exists() and not overwrite:
        raise ExistsError(f"{target} already holds {last}; choose another folder, or {OVERWRITE}")
    if not overwrite and (held := next((target / name for name in names if os.path.lexists(target / name)), None)):
        raise ExistsError(f"{held} exists already; choose another folder, or {OVERWRITE}")
    above = next(one for one in (target, *target.absolute().parents) if one.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise OutputError(f"{target} cannot be written: no permission in {above}; choose a writable folder")
    return target


@contextmanager
def only_writer(folder: PathLike, busy: Exception) -> Iterator[None]:
    """Make a folder and keep other processes from writing there; raise `busy` if one already does."""
    path = Path(os.path.realpath(folder))
    with _named(folder):
        path.mkdir(parents=True, exist_ok=True)
    with _lock(path, busy=busy):
        yield


@contextmanager
def in_turn(folder: PathLike) -> Iterator[None]:
    """Make a folder and wait until no other process is in such a block for it, where the file system has locks."""
    path = Path(os.path.realpath(folder))
    with _named(folder), _lock(path, make=partial(path.mkdir, parents=True, exist_ok=True)):
        yield


@contextmanager
def _staging(folder: Path, name: str) -> Iterator[Path]:
    """Make a hidden folder for one writer of `name`, locked while it is in use."""
    _sweep(folder, name)
    staging = folder / f"{_start(name)}{secrets.token_hex(4)}{SUFFIX}"
    with _lock(staging, make=staging.mkdir):
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _start(name: str) -> str:
    return f".{name[:50]}."  # file names have at most 255 bytes


def _sweep(folder: Path, name: str) -> None:
    """Remove the staging folders of killed writers of `name`, and complete or undo their exchanges."""
    for leftover in folder.glob(f"{glob.escape(_start(name))}*{SUFFIX}"):
        with suppress(OSError), _lock(leftover) as locked:
            if locked:
                _recover(leftover, folder)
                shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make a folder and wait for its lock; on failure, remove the folders that were made."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        with _lock(folder, make=partial(folder.mkdir, parents=True, exist_ok=True)):
            yield
    except BaseException:
        for one in missing:
            with suppress(OSError):  # another writer uses it by now
                one.rmdir()
        raise


@contextmanager
def _lock(folder: Path, *, make: Callable[[], None] | None = None, busy: Exception | None = None) -> Iterator[bool]:
    """Lock a folder until the end of the block or of this process; False if that is not possible.

    With `make`, the folder is made and its lock awaited, once more if another writer has removed it meanwhile, as a
    leftover, say. `busy` is raised if another process holds the lock.
    """
    with ExitStack() as stack:
        while True:
            if make is not None:
                make()
            try:
                locked = _flock(folder, stack, wait=make is not None, busy=busy)
                break
            except FileNotFoundError:
                if make is None:
                    raise
        yield locked


def _flock(folder: Path, stack: ExitStack, wait: bool, busy: Exception | None) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows: writers do not wait for each other, and leftovers stay
        return False
    handle = os.open(folder, os.O_RDONLY)
    stack.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        locked = True
    except OSError as error:  # another process holds it, or the file system has no locks
        if busy is not None and isinstance(error, BlockingIOError):
            raise busy from None
        locked = False
    if not os.path.samestat(os.fstat(handle), os.stat(folder)):
        raise FileNotFoundError(folder)
    return locked


def _move(source: Path, target: Path, names: Collection[str]) -> None:
    for name in names:
        if (source / name).is_symlink() or (source / name).is_file():
            os.rename(source / name, target / name)


def _flush(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Flush renames, if the system can flush folders. The file has its name already, so this is no reason to fail."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _named(path: PathLike) -> Iterator[None]:
    """Raise errors with the target's path instead of the staged one, those of the operating system as OutputError."""
    try:
        yield
    except Exception as error:
        error.args = tuple(STAGED.sub("", text) if isinstance(text, str) else text for text in error.args)
        if not isinstance(error, OSError) or (isinstance(error, CarlError) and error.errno is None):
            raise
        staged = isinstance(error.filename, str) and STAGED.search(error.filename)
        name = STAGED.sub("", error.filename) if staged else os.fspath(path)
        raise OutputError(error.errno, error.strerror or str(error), name) from error
