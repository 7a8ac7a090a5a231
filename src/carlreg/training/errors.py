"""Errors of training that a user can act on."""

from __future__ import annotations

from carlreg.errors import CarlError, InputError


class DatasetError(InputError):
    """Images, labels or tables that cannot be used for training."""


class TrainingError(CarlError, RuntimeError):
    """A run that cannot continue. Its last good checkpoint is on disk."""
