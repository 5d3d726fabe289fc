"""How far learning has come, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Final, Protocol

__all__ = ["RoundsDisplay", "displayed_rounds"]

# Often enough to look alive; reading a job's figures takes a tenth of a millisecond.
_BAR_REFRESH_S: Final = 0.1

# A log of an hour is then some 700 lines; short trainings are told of by their last line.
_LINE_EVERY_S: Final = 5.0


class RoundsDisplay(Protocol):
    """Where rounds are shown."""

    refresh_s: float
    """How long to wait between two."""

    def show(self, rounds_done: int, note: str) -> None:
        """What there is to see now."""


@contextlib.contextmanager
def displayed_rounds(
    title: str, rounds: int | None, *, wanted: bool | None = None, noun: str = "round"
) -> Iterator[RoundsDisplay | None]:
    """Where to show rounds: None where nothing is ``wanted``, which is the default without a terminal.

    ``rounds`` is how many there are at most, None where nobody knows; ``noun`` is what they are called.
    """
    is_terminal = sys.stderr.isatty()
    if not (is_terminal if wanted is None else wanted):
        yield None
    elif is_terminal:
        with _bar(title, rounds, noun) as bar:
            yield bar
    else:
        yield _Lines(title, rounds, noun)


class _Lines:
    """A line for each state that differs from the one before."""

    refresh_s = _LINE_EVERY_S

    def __init__(self, title: str, rounds: int | None, noun: str) -> None:
        self._title = title
        self._noun = noun
        self._of_rounds = "" if rounds is None else f" of {rounds}"
        self._last = ""

    def show(self, rounds_done: int, note: str) -> None:
        line = f"{self._title}: {self._noun} {rounds_done}{self._of_rounds}" + (f", {note}" if note else "")
        if line != self._last:
            self._last = line
            print(line, file=sys.stderr, flush=True)  # noqa: T201 (what it is for)


class _Bar:
    """A bar that grows, or moves where nobody knows how many rounds there will be."""

    refresh_s = _BAR_REFRESH_S

    def __init__(self, progress: Any, bar: Any) -> None:
        self._progress = progress
        self._bar = bar

    def show(self, rounds_done: int, note: str) -> None:
        self._progress.update(self._bar, completed=rounds_done, note=note)
        self._progress.refresh()


@contextlib.contextmanager
def _bar(title: str, rounds: int | None, noun: str) -> Iterator[_Bar]:
    # rich takes longer to import than all learners together, and only those who look at a terminal need it.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    of_rounds = "" if rounds is None else f" of {rounds}"
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn(f"{noun} {{task.completed}}{of_rounds}"),
        TimeElapsedColumn() if rounds is None else TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}", markup=False),
    ]
    progress = Progress(
        *columns,
        console=Console(stderr=True),
        auto_refresh=False,
        # What is printed meanwhile appears above the bar; where stdout is a file or a pipe, it goes there.
        redirect_stdout=sys.stdout.isatty(),
    )
    with progress:
        yield _Bar(progress, progress.add_task(title, total=rounds, note=""))
