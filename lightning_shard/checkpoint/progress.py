"""A bar for what takes long, and nothing for what does not."""

from types import TracebackType
from typing import Self

from tqdm.auto import tqdm

_DELAY = 3.0
"""Seconds before a bar appears."""


class Progress:
    """Counts bytes, with a bar that appears after a few seconds.

    Args:
        what: What is done, in one word.
        total: Bytes in all.
        shown: Whether this process shows the bar.

    """

    def __init__(self, what: str, total: int, shown: bool) -> None:
        self._bar = tqdm(
            desc=what,
            total=total,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            delay=_DELAY,
            leave=False,
            disable=not shown,
        )

    def advance(self, count: int) -> None:
        """So many bytes are done."""
        self._bar.update(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
