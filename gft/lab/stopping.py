"""SIGTERM, SIGINT and SIGHUP: a command that trains saves a checkpoint, says so in one line and ends.

`stoppable()` around a command catches the three. Outside a training loop they end the command at once, by `Stopped`; inside
(`deferred()`) a first one is only noted, and the loop asks after each step whether it should save and stop. A second one,
after a second, ends it at once. A signal that is ignored, as nohup ignores SIGHUP, stays ignored.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CAUGHT = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))

SECONDS_OF_ONE = 1.0  # a terminal that closes sends several


class Stopped(BaseException):
    """Raised by a signal. Not an Exception, nor a KeyboardInterrupt: nothing on the way up should take it for its own."""

    def __init__(self, number: int, done: str = "") -> None:
        super().__init__(number, done)
        self.number, self.done = number, done

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}" + (f"; {self.done}" if self.done else "")

    @property
    def exit_code(self) -> int:
        """What a shell reports of a process that the signal has ended."""
        return 128 + self.number


class _Noted:
    loops = 0  # training loops that are under way
    number: int | None = None  # of a signal that came meanwhile
    when = 0.0


def _come(number: int, _: FrameType | None) -> None:
    now = time.monotonic()
    if _Noted.loops and _Noted.number is None:
        _Noted.number, _Noted.when = number, now
    elif not _Noted.loops or now - _Noted.when > SECONDS_OF_ONE:
        raise Stopped(number)


@contextmanager
def stoppable() -> Iterator[None]:
    """Have the signals caught in this block; as they were after it."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may
        yield
        return
    before = {number: signal.getsignal(number) for number in CAUGHT}
    _Noted.number = None
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _come)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        _Noted.number = None


@contextmanager
def deferred() -> Iterator[None]:
    """A training loop, which asks `asked_to_stop` itself. One that has come before the loop began ends it here."""
    if _Noted.number is not None:
        raise Stopped(_Noted.number)
    _Noted.loops += 1
    try:
        yield
    finally:
        _Noted.loops -= 1


@contextmanager
def held() -> Iterator[None]:
    """A few lines that a signal may not break off. One that comes meanwhile ends the command after them."""
    with deferred():
        yield
    if _Noted.number is not None and not _Noted.loops:
        raise Stopped(_Noted.number)


def asked_to_stop() -> int | None:
    """The number of the signal that has come, if one has."""
    return _Noted.number
