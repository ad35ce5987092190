"""Has the person pressed Ctrl-C? Asked between tokens, so that the engine is never cut off in
the middle of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator
from types import FrameType, TracebackType
from typing import TypeVar

T = TypeVar("T")


class CtrlC:
    """While this is open, the first Ctrl-C only sets `pressed`; a second one interrupts at once."""

    def __init__(self) -> None:
        self.pressed = False
        self._before: signal._HANDLER = None

    def __enter__(self) -> CtrlC:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def watch(self, pieces: Iterator[T]) -> Iterator[T]:
        """`pieces` until Ctrl-C is pressed; then, or when the reader stops, `pieces` is closed.
        What was being made when it was pressed is left out: the terminal shows a ^C already."""
        try:
            for piece in pieces:
                if self.pressed:
                    return
                yield piece
                if self.pressed:
                    return
        finally:
            if isinstance(pieces, Generator):
                pieces.close()

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
