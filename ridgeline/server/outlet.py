"""How does what is written to standard error never make a process wait?

A pipe that nobody reads takes 64 KiB and then blocks whoever writes to it. So lines go to a bounded
queue, and one thread writes them; what does not fit is counted, and told in one line when there is
room again. (To ask for room first and write then would not do: between the two another process may
take the room. To make the descriptor non-blocking would change it for everybody who shares it.)

Only the HTTP process writes to its standard error. What the engine writes, its libraries' last
words among it, comes through a pipe that is always read, so no line is torn by another's.
"""

from __future__ import annotations

import asyncio
import atexit
import io
import logging
import os
import select
import sys
import threading
from collections import deque

from ridgeline.log import Values

QUEUE_BYTES = 1 << 20  # of lines that wait: some thousands
DRAIN_S = 1.0  # for the last lines of a process; writing to a disk or a terminal takes less
LINE_BYTES = 64 << 10  # of a relayed line; a longer one is cut into several


class Outlet(io.TextIOBase):
    """A text stream to `fd`, for any thread. `write` takes whole lines or parts of them."""

    def __init__(self, fd: int, queue_bytes: int) -> None:
        self._fd = fd
        self._queue_bytes = queue_bytes
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the thread stays with the parent

    def _reset(self) -> None:
        self._changed = threading.Condition()  # reentrant: a collected object may warn in `write`
        self._lines: deque[bytes] = deque()
        self._part = ""
        self._size = 0  # of the lines that wait
        self._num_lost = 0
        self._is_full = False  # from the first line that did not fit until this has been told
        self._is_well = True  # the last write succeeded
        self._is_writing = False
        self._is_torn = False  # a line was begun and could not be ended
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, text: str) -> int:
        with self._changed:
            whole, end, self._part = (self._part + text).rpartition("\n")
            if end:
                self._take((whole + end).encode("utf-8", "backslashreplace"))
        return len(text)

    def drain(self, patience_s: float = DRAIN_S) -> None:
        """Wait until all is written, for so long at most. For the end of a process."""
        with self._changed:
            if self._part:
                self.write("\n")
            self._changed.wait_for(self._is_drained, patience_s)

    def _take(self, lines: bytes) -> None:
        if self._is_full or self._size + len(lines) > self._queue_bytes:
            self._is_full = True
            self._num_lost += lines.count(b"\n")
            return
        self._size += len(lines)
        self._lines.append(lines)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _has_lines(self) -> bool:
        return bool(self._lines) or (self._num_lost > 0 and self._is_well)

    def _is_drained(self) -> bool:
        return not self._is_writing and not self._has_lines()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_lines)
                self._is_writing = True
                num_told = 0
                if self._lines:
                    lines = self._lines.popleft()
                    self._size -= len(lines)
                else:
                    num_told, self._num_lost, self._is_full = self._num_lost, 0, False
                    lines = _loss(num_told)
            is_written = self._put(lines)
            with self._changed:
                self._is_well, self._is_writing = is_written, False
                if not is_written:
                    self._num_lost += num_told or lines.count(b"\n")
                self._changed.notify_all()

    def _put(self, lines: bytes) -> bool:
        """Whether all of it could be written: a pipe may be closed and a disk full."""
        view = memoryview(b"\n" + lines if self._is_torn else lines)
        size = len(view)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # somebody has made it so
                room = select.poll()
                room.register(self._fd, select.POLLOUT)
                room.poll()
            except OSError:
                self._is_torn |= len(view) < size
                return False
        self._is_torn = False
        return True


class Relay:
    """A pipe for what another process writes, which goes on to our standard error line by line."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._rest = b""

    def pass_on(self) -> bool:
        """Some of what has come; does not wait. False: nothing more will come."""
        return self._read() != b""

    def follow(self) -> None:
        """Pass on whatever comes, in the running loop; the other process has its end by now."""
        os.close(self.writer)
        loop = asyncio.get_running_loop()
        loop.add_reader(self.reader, lambda: self.pass_on() or loop.remove_reader(self.reader))

    def end(self) -> None:
        """`close` after `follow`."""
        asyncio.get_running_loop().remove_reader(self.reader)
        self.close()

    def close(self) -> None:
        """With all that has come by now."""
        while self._read():
            pass
        if self._rest:
            sys.stderr.write(self._rest.decode("utf-8", "backslashreplace") + "\n")
        os.close(self.reader)

    def _read(self) -> bytes | None:
        """None: there is nothing just now."""
        try:
            data = os.read(self.reader, LINE_BYTES)
        except BlockingIOError:
            return None
        lines, end, rest = (self._rest + data).rpartition(b"\n")
        if len(rest) > LINE_BYTES:
            lines, end, rest = lines + end + rest, b"\n", b""
        self._rest = rest
        if end:
            sys.stderr.write((lines + end).decode("utf-8", "backslashreplace"))
        return data


def never_block() -> None:
    """From here on nothing that Python code of this process says on standard error waits for a
    reader: the log, warnings, the last words of threads. It is written at the end of the process,
    or by `drain`."""
    before = sys.stderr
    try:
        outlet = Outlet(before.fileno(), QUEUE_BYTES)
    except (OSError, AttributeError):  # a test's own, which blocks nobody
        return
    before.flush()
    sys.stderr = outlet
    for handler in logging.getLogger("ridgeline").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(outlet)
    atexit.register(outlet.drain)


def drain() -> None:
    """Before `os._exit`, which runs nothing that was left for the end."""
    if isinstance(sys.stderr, Outlet):
        sys.stderr.drain()


def _loss(num_lines: int) -> bytes:
    """A line of the log about those that are not there."""
    sentence = "lines of the log are lost: standard error could not take them"
    values = Values(lost=num_lines)
    record = logging.LogRecord(
        "ridgeline.log", logging.WARNING, __file__, 0, "%s%s", (sentence, values), None
    )
    handler = next(iter(logging.getLogger("ridgeline").handlers), None)
    return (logging.Handler() if handler is None else handler).format(record).encode() + b"\n"
