"""The family of exceptions that a user can do something about.

The command line prints one of these as a single line. Every other exception is a bug and keeps its traceback.
"""

import errno

FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "your quota on this disk is used up"}
OVERWRITE = "give --overwrite (overwrite=True in Python)"
"""What to do about a target that exists already."""


class CarlError(Exception):
    """Base of all errors that this package raises on purpose."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())  # one line, whatever a file or a library put into it


class InputError(CarlError, ValueError):
    """An argument, file or table that cannot be used. One line: what was given, what was expected, what to do."""


class OutputError(CarlError, OSError):
    """A result that cannot be written: the target exists, or the disk refused it."""


class ExistsError(OutputError, FileExistsError):
    """A target that exists already and must not be overwritten."""


class DependencyError(CarlError, ImportError):
    """An optional package that is not installed. The message says how to install it."""


class NotFiniteError(CarlError, FloatingPointError):
    """A loss or a result that became infinite or NaN."""


def user_message(error: BaseException) -> str | None:
    """One line for an error that a user can act on, or None for a bug.

    >>> user_message(InputError("scan.nii does not exist; check the path"))
    'scan.nii does not exist; check the path'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.errno in FULL:
        where = "" if error.filename is None else f"{error.filename} cannot be written: "
        return f"{where}{FULL[error.errno]}; free some space, then run the same command again"
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror[0].lower() + error.strerror[1:]
        return reason if error.filename is None else f"{reason}: {error.filename}"
    if isinstance(error, (CarlError, OSError)):
        return text
    if isinstance(error, ImportError) and (package := (error.name or "carlreg").partition(".")[0]) != "carlreg":
        name = {"PIL": "pillow"}.get(package, package)
        return f"{name} is missing or damaged: {text}; install it again: pip install --force-reinstall {name}"
    return f"out of memory: {text}" if _is_out_of_memory(error, text) else None


def _is_out_of_memory(error: BaseException, text: str) -> bool:
    """Recognise torch's and ITK's errors without importing either."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in text or "Failed to allocate memory" in text)
