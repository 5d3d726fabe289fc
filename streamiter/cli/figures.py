"""The output of commands: live figures of a job, final statistics, tables, sentences, and errors with their exit codes.

Here is also reading lines from a file or standard input, and ``Commands``, which turns each error into a message and
keeps secrets out of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import sys
import textwrap
import threading
import traceback
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, Final

import orjson
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from streamiter.engine.graph.statistics import STEP_COLUMNS, JobStatistics, LoopStatistics
from streamiter.engine.job.job import StopMode
from streamiter.engine.job.running import Watched
from streamiter.errors import ConfigurationError, InternalError, StreamiterError, TopicNotFound
from streamiter.topics.urls import hide, secrets_in, shown_url

# Often enough to look live, and seldom enough to cost almost nothing compared with the job.
_REFRESH_S: Final = 0.25

# As in the log of a service: an hour of a run is 120 lines.
_LINE_EVERY_S: Final = 30.0

# Rates are those of the last 3 seconds: they follow changes, and stay readable.
_REFRESHES_FOR_A_RATE: Final = 12

_STOPPING: Final[dict[StopMode, str]] = {
    "suspend": "Suspending: what has been read is still handled. Ctrl-C again aborts.",
    "drain": "Draining: inputs end here, and loops finish. Ctrl-C again aborts.",
    "abort": "Aborting.",
}


@contextlib.asynccontextmanager
async def watched(
    job: Watched, render: Callable[[JobStatistics], RenderableType] | None = None, *, stops: Sequence[StopMode] = ()
) -> AsyncIterator[None]:
    """Show the figures of a job on the terminal (stderr) while it runs; without a terminal, log them every 30 s.

    ``stops`` are the stops that signals have asked for so far; the last one is shown at once.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        async with _meanwhile(_log_figures(job)):
            yield
        return
    show = render or _Recently().figures

    def picture() -> RenderableType:
        shown = show(job.statistics())
        return Group(shown, Text(_STOPPING[stops[-1]], style="bold")) if stops else shown

    # The output of steps goes to a file if stdout is one, else above the figures.
    is_seen = sys.stdout.isatty()
    with Live(picture(), console=console, auto_refresh=False, transient=True, redirect_stdout=is_seen) as live:
        async with _meanwhile(_refresh(live, picture)):
            with _log_above(console):
                yield


@contextlib.asynccontextmanager
async def _meanwhile(showing: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Show figures during this block; a group of tasks would put the error of the job into an ``ExceptionGroup``."""
    task = asyncio.create_task(showing)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _log_figures(job: Watched) -> None:
    """Write a line with the figures every half minute, as a service does."""
    from streamiter.service.observing.logs import LogLines  # After the start, which it would make slower.

    handler, before = logging.StreamHandler(), job.statistics()
    handler.setFormatter(LogLines((), as_json=True))
    while True:
        await asyncio.sleep(_LINE_EVERY_S)
        now = job.statistics()
        seconds = now.elapsed_s - before.elapsed_s
        figures = {
            "elapsed_s": round(now.elapsed_s, 1),
            "records_per_s": round((_records_read(now) - _records_read(before)) / max(seconds, 1e-9), 1),
            "lag_records": sum(sum(task.lag.values()) for task in now.tasks),
        }
        message = "{}, {records_per_s:,} records/s, lag {lag_records:,} records".format(_in_a_line(now), **figures)
        record = {"name": "streamiter.job", "levelno": logging.INFO, "levelname": "INFO", "msg": message}
        handler.handle(logging.makeLogRecord(record | {"figures": figures}))
        before = now


class _AboveFigures(logging.Handler):
    """Prints log lines above the live figures."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(Text(record.getMessage()))


@contextlib.contextmanager
def _log_above(console: Console) -> Iterator[None]:
    """Print that code is compiled, and what learners log, unless the program has a log of its own."""
    logs = [log for log in map(logging.getLogger, ("streamiter.compiled", "streamiter.learn")) if not log.hasHandlers()]
    handler, levels = _AboveFigures(console), [log.level for log in logs]
    for log in logs:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.removeHandler(handler)
            log.setLevel(level)


async def _refresh(live: Live, render: Callable[[], RenderableType]) -> None:
    while True:
        await asyncio.sleep(_REFRESH_S)
        live.update(render(), refresh=True)


class _Recently:
    """The table of steps with the rates of the last few seconds, so that it shows what is slow now."""

    def __init__(self) -> None:
        self._before: deque[JobStatistics] = deque(maxlen=_REFRESHES_FOR_A_RATE)

    def figures(self, statistics: JobStatistics) -> RenderableType:
        """Return the table of the statistics, with rates compared with earlier statistics."""
        since = self._before[0] if self._before else None
        if statistics.tasks:  # Several processes have none before they run.
            self._before.append(statistics)
        return _figures(statistics, since)


def _figures(statistics: JobStatistics, since: JobStatistics | None = None) -> RenderableType:
    """Return the table of the steps, and lines about loops and checkpoints."""
    lines = [*loop_lines(statistics), *checkpoint_lines(statistics)]
    return Group(statistics_table(statistics, since), *map(Text, lines))


def statistics_table(statistics: JobStatistics, since: JobStatistics | None = None) -> Table:
    """Return a table with a row for each step, with all its subtasks; empty columns are left out.

    Rates start at ``since``; without it they are those of the whole run.
    """
    rows = statistics.step_rows(since)
    there = [column for column in range(1, len(STEP_COLUMNS)) if column <= 2 or any(row[column] for row in rows)]
    table = Table(title=statistics.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("step", overflow="fold")
    for column in there:
        # On a narrow terminal names are cut, numbers never.
        width = max(len(row[column]) for row in (STEP_COLUMNS, *rows))
        table.add_column(STEP_COLUMNS[column], justify="right", no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(row[0], *(row[column] for column in there))
    return table


def loop_lines(statistics: JobStatistics) -> list[str]:
    """Return a line for each iteration: its progress, or where and why it ended."""
    return [
        f"iteration {number} ({', '.join(loop.heads)}): {_progress(loop)}"
        for number, loop in enumerate(statistics.loops, 1)
    ]


def _progress(loop: LoopStatistics) -> str:
    fed_back = f"{loop.fed_back_records:,} {'record' if loop.fed_back_records == 1 else 'records'} fed back"
    return ", ".join(filter(None, (loop.progress, loop.end_reason, fed_back)))


def checkpoint_lines(statistics: JobStatistics) -> list[str]:
    """Return a line about the committed checkpoint, or positions, and their cost; none for a job without both."""
    checkpoints = statistics.checkpoints
    if checkpoints is None:
        return []
    begun = "" if checkpoints.restored is None else f", resumed from {checkpoints.restored}"
    if not checkpoints.taken:
        return [f"checkpoints: none committed yet{begun}"]
    if not checkpoints.last_size_bytes:  # start="committed": there is no snapshot
        return [f"positions: {checkpoints.taken} committed, the last in {checkpoints.last_duration_s:.2f} s"]
    cost = f"{checkpoints.last_size_bytes:,} bytes in {checkpoints.last_duration_s:.2f} s"
    given_up = f", {checkpoints.given_up} given up" if checkpoints.given_up else ""
    return [
        f"checkpoints: number {checkpoints.committed} committed ({cost}), {checkpoints.taken} taken{given_up}{begun}"
    ]


def print_statistics(statistics: JobStatistics, *, as_json: bool) -> None:
    """Print the final statistics of a run: a table on a terminal, a line elsewhere, or all as JSON.

    Lines for each iteration and the checkpoints follow, except with ``as_json``.
    """
    if as_json:
        print_json(statistics)
    elif sys.stdout.isatty():
        Console().print(_figures(statistics))
    else:
        for line in (_in_a_line(statistics), *loop_lines(statistics), *checkpoint_lines(statistics)):
            typer.echo(line, err=True)


def _in_a_line(statistics: JobStatistics) -> str:
    """Return a line for a log: the state, the records read, and the rejected records."""
    read = _records_read(statistics)
    rejected = sum(step.counts.rejected for task in statistics.tasks for step in task.steps)
    return f"{statistics.title}, {read:,} records read" + (f", {rejected:,} rejected" if rejected else "")


def _records_read(statistics: JobStatistics) -> int:
    return sum(task.steps[0].counts.records_in for task in statistics.tasks if task.source is not None)


_READ_BYTES: Final = 1 << 20
_STANDARD_INPUT: Final = 0

# The number of chunks that are read ahead: one is written while the next is read.
_CHUNKS_AHEAD: Final = 2


def open_lines(file: str) -> int:
    """Open ``file`` and return its descriptor; ``-`` is standard input."""
    if file == "-":
        return _STANDARD_INPUT
    if os.path.isdir(file):
        raise ConfigurationError(f"cannot read {file!r}: {os.strerror(errno.EISDIR)}")
    try:
        return os.open(file, os.O_RDONLY)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file!r}: {error.strerror}") from error


async def lines_of(descriptor: int) -> AsyncGenerator[list[bytes], None]:
    """Yield the lines without their ends, as many at a time as are available; close the descriptor.

    A thread reads them, so that a slow pipe or terminal blocks nothing else. The thread is a daemon: a read that never
    returns does not keep the program running.
    """
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue(_CHUNKS_AHEAD)
    reading = (descriptor, chunks, asyncio.get_running_loop())
    threading.Thread(target=_read, args=reading, daemon=True, name="read lines").start()
    rest = b""
    while chunk := await chunks.get():
        if isinstance(chunk, OSError):
            raise ConfigurationError(f"cannot read on: {chunk.strerror}") from chunk
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
    if rest:
        yield [rest.removesuffix(b"\r")]


def _read(descriptor: int, chunks: asyncio.Queue[bytes | OSError], loop: asyncio.AbstractEventLoop) -> None:
    """Put chunks into the queue, and at the end an empty chunk or the error."""
    with contextlib.suppress(RuntimeError, CancelledError):  # the loop is closed: no more lines are needed
        try:
            while chunk := os.read(descriptor, _READ_BYTES):
                asyncio.run_coroutine_threadsafe(chunks.put(chunk), loop).result()
            asyncio.run_coroutine_threadsafe(chunks.put(b""), loop).result()
        except OSError as error:
            asyncio.run_coroutine_threadsafe(chunks.put(error), loop).result()
    if descriptor != _STANDARD_INPUT:
        os.close(descriptor)


def print_json(document: object) -> None:
    typer.echo(orjson.dumps(document).decode())


@contextlib.contextmanager
def errors_of_output(option: str, file: Path) -> Iterator[None]:
    """Convert errors of the system to ``ConfigurationError``, while the file of an option is written."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{option} {file}: cannot write it: {error.strerror}") from error


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    title: str | None = None,
    caption: str | None = None,
) -> None:
    """Print a table on the terminal; the columns in ``numbers`` are aligned on the right."""
    table = Table(title=title, caption=caption, box=None, pad_edge=False, title_justify="left", caption_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in numbers else "left")
    for row in rows:
        table.add_row(*row)
    _print(table)


def print_rows(headings: Sequence[str], rows: Iterable[Sequence[str | int]], *, numbers: Collection[str] = ()) -> None:
    """Print rows: on a terminal a table, with separators in ints; elsewhere a line for each row, with tabs."""
    if sys.stdout.isatty():
        cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
        print_table(headings, cells, numbers=numbers)
        return
    for row in rows:
        typer.echo("\t".join(map(str, row)))


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair a line: on a terminal a table, elsewhere with a tab between them."""
    if not sys.stdout.isatty():
        for pair in fields:
            typer.echo("\t".join(pair))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in fields:
        table.add_row(name, value)
    _print(table)


def _print(table: Table) -> None:
    """Print a table; the text of cells is not interpreted as markup."""
    Console(markup=False, emoji=False, highlight=False).print(table)


# A terminal of unknown width reports 0; 80 columns are the traditional width.
_UNKNOWN_WIDTH: Final = 80


def say(line: str, *, err: bool = False, hanging: int = 0) -> None:
    """Print a line: on a terminal broken between words, with further lines indented; elsewhere whole.

    Not for text that users copy, such as a command; the terminal breaks it better.
    """
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        line = textwrap.fill(
            line,
            os.get_terminal_size(stream.fileno()).columns or _UNKNOWN_WIDTH,
            subsequent_indent=" " * hanging,
            break_long_words=False,
            break_on_hyphens=False,
        )
    typer.echo(line, err=err)


# The exit code of a program that Ctrl-C ended: 128 plus the number of the signal.
INTERRUPTED = 130

# The exit code of a program that was called without a command, or with wrong arguments.
USAGE = 2


class Commands(TyperGroup):
    """The commands of the program. Exit code 1: an error; 2: wrong arguments; 130: Ctrl-C or SIGTERM."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an error becomes a message, with ``--debug`` also a traceback."""
        debug = bool(ctx.params.get("debug"))
        try:
            with _usage_without_secrets():
                result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_output()
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if _is_of_typer(error):
                raise
            while isinstance(
                error, ExceptionGroup
            ):  # The tasks of a command, such as a job and its page, end together.
                error = error.exceptions[0]
            _report(error, debug=debug or isinstance(error, InternalError))
            raise typer.Exit(1) from None
        return result

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Read the arguments before the command."""
        with _usage_without_secrets():
            return super().make_context(*arguments, **options)


@contextlib.contextmanager
def _usage_without_secrets() -> Iterator[None]:
    """Remove secrets from usage errors, which repeat wrong arguments, such as a URL with a password."""
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str) and _is_of_typer(error):
            error.message = _without_secrets(message)  # type: ignore[attr-defined]
        raise


def _without_secrets(text: str) -> str:
    """Return the text without secrets of the program's arguments, and of URLs that the text quotes."""
    urls = [argument for argument in sys.argv[1:] if ":" in argument]
    for url in sorted(urls, key=len, reverse=True):
        if (shown := shown_url(url)) != url:
            text = text.replace(url, shown)
    text = hide(text, {secret for url in urls for secret in secrets_in(url)})
    return _QUOTED_URL.sub(lambda quoted: quoted[1] + shown_url(quoted[2]), text)


# A URL in a line of the user's program, as in a traceback.
_QUOTED_URL: Final = re.compile(r"""(["'])(kafka://[^"'\s]*)""")


def _is_of_typer(error: Exception) -> bool:
    """Whether typer shows the error itself: wrong arguments, or an exit."""
    return isinstance(error, (typer.Exit, typer.Abort)) or hasattr(error, "exit_code")


def _report(error: Exception, *, debug: bool) -> None:
    if debug:
        sys.stderr.write(_without_secrets("".join(traceback.format_exception(error))))
    if isinstance(error, TopicNotFound):
        print_error(f"{error}\nFrom the command line: streamiter topics create URL")
    elif isinstance(error, (StreamiterError, OSError)):
        print_error(str(error))
    else:
        print_error(f"unexpected {type(error).__name__}: {error}\nPlease report it, with the output of --debug.")


def print_error(message: str) -> None:
    """Print an error on stderr in unbroken lines, which can be searched and copied."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"[bold red]error:[/] {escape(_without_secrets(message))}"
    )


def _discard_output() -> None:
    """Discard buffered output, because the reader has ended, as in ``… | head``."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
