"""The family of exceptions that a user can do something about.

The command line prints one of these as a single line. Every other exception is a bug and keeps its traceback.
"""


class CarlError(Exception):
    """Base of all errors that this package raises on purpose."""


class InputError(CarlError, ValueError):
    """An argument, file or table that cannot be used. One line: what was given, what was expected, what to do."""


class OutputError(CarlError, OSError):
    """A result that cannot be written: the target exists, or the disk refused it."""


class DependencyError(CarlError, ImportError):
    """An optional package that is not installed. The message says how to install it."""
