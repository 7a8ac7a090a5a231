"""Reports of a run in progress. Imports neither torch nor numpy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carlreg.training.loop import Progress

logger = logging.getLogger(__name__)


class Monitor:
    """Base class of whatever shows a run to the user; this one shows nothing."""

    def report(self, text: str) -> None:
        logger.info(text)

    def preparing(self, done: int, total: int) -> None:
        """Called for each prepared image."""

    def begin(self, done: int, total: int) -> None:
        """Called before training, with the number of steps of earlier calls."""

    def progress(self, progress: Progress, step: int) -> None:
        """Called for each line of the log; `step` counts over all stages."""
