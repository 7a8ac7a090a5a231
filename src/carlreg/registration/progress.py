"""What a registration is doing, how long each part takes, and what it warns of."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Progress:
    """Reports the part of the work that begins, and keeps the seconds of each part and all warnings."""

    def __init__(
        self,
        report: Callable[[str], None] | None = None,
        advance: Callable[[float], None] | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        self.report = report
        self.quiet = quiet
        """Whether warnings are only kept, since it is not known yet whether they will concern the result."""
        self.advance = advance
        """Takes the share of the current part that is done, from 0 to 1, where that is known."""
        self._began: dict[str, float] = {}
        self.warnings: list[str] = []

    def begin(self, part: str, text: str | None = None, *, earlier: float = 0.0) -> None:
        """Begin a part, described as `text` or by its name; it may have begun some seconds `earlier`."""
        self._began[part] = time.perf_counter() - earlier
        description = text or part.replace("_", " ")
        logger.info("%s", description)
        if self.report is not None:
            self.report(description)

    def warn(self, *texts: str) -> None:
        for text in texts:
            logger.log(logging.INFO if self.quiet else logging.WARNING, "%s", text)
        self.warnings.extend(texts)

    def seconds(self) -> dict[str, float]:
        """The seconds of each part, in order, and in all."""
        now = time.perf_counter()
        starts = [*self._began.values(), now]
        spent = {part: end - start for part, start, end in zip(self._began, starts, starts[1:], strict=False)}
        return {part: round(s, 2) for part, s in (spent | {"total": now - starts[0]}).items()}
