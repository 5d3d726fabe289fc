"""Live figures of a job, and the summary at its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import orjson
import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from streamiter.runtime.job import Job
from streamiter.runtime.statistics import JobStatistics

__all__ = ["print_statistics", "statistics_table", "watched"]

# Often enough to look alive, seldom enough to cost nothing beside the job.
_REFRESH_S: Final = 0.25


@contextlib.asynccontextmanager
async def watched(
    job: Job, render: Callable[[JobStatistics], RenderableType] | None = None
) -> AsyncIterator[None]:
    """Show the job's figures on the terminal (stderr) while it runs; nothing where there is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    show = render or statistics_table
    with Live(show(job.statistics()), console=console, auto_refresh=False, transient=True) as live:
        refreshing = asyncio.create_task(_refresh(live, lambda: show(job.statistics())))
        try:
            yield
        finally:
            refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await refreshing


async def _refresh(live: Live, render: Callable[[], RenderableType]) -> None:
    while True:
        await asyncio.sleep(_REFRESH_S)
        live.update(render(), refresh=True)


def statistics_table(statistics: JobStatistics) -> Table:
    """A row for each step, all its subtasks together. Columns where there is nothing to tell are left out."""
    rows = _rows(statistics)
    there = [column for column in range(1, len(_COLUMNS)) if column <= 2 or any(row[column] for row in rows)]
    table = Table(
        title=_title(statistics), title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    table.add_column("step", overflow="fold")
    for column in there:
        # On a narrow terminal names are cut, numbers never.
        width = max(len(row[column]) for row in (_COLUMNS, *rows))
        table.add_column(_COLUMNS[column], justify="right", no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(row[0], *(row[column] for column in there))
    return table


_COLUMNS: Final = ("step", "in", "out", "in/s", "rejected", "waiting", "lag")


def _rows(statistics: JobStatistics) -> list[tuple[str, ...]]:
    seconds = max(statistics.elapsed_s, 1e-9)
    rows = []
    for name in dict.fromkeys(step.step for task in statistics.tasks for step in task.steps):
        counts = statistics.step(name)
        heads = [task for task in statistics.tasks if task.steps[0].step == name]
        waiting = sum(channel.records for task in heads for channel in task.inputs)
        lag = sum(sum(task.lag.values()) for task in heads)
        rate = _count(round(counts.records_in / seconds))
        numbers = (counts.rejected, waiting, lag)
        rows.append((name, _count(counts.records_in), f"{counts.records_out:,}", rate, *map(_count, numbers)))
    return rows


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


def _title(statistics: JobStatistics) -> str:
    return f"{statistics.flow}: {statistics.state}, {statistics.elapsed_s:.1f} s"


def print_statistics(statistics: JobStatistics, *, as_json: bool) -> None:
    """The end of a run: a table on a terminal, a line elsewhere, or with ``as_json`` all there is."""
    if as_json:
        document: dict[str, Any] = dataclasses.asdict(statistics)
        typer.echo(orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS).decode())
    elif sys.stdout.isatty():
        Console().print(statistics_table(statistics))
    else:
        typer.echo(_title(statistics), err=True)
