"""Live figures of a job, and the summary at its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from streamiter.runtime.job import Job
from streamiter.runtime.statistics import JobStatistics

__all__ = ["print_statistics", "statistics_table", "watched"]

# Often enough to look alive, seldom enough to cost nothing beside the job.
_REFRESH_S = 0.25


@contextlib.asynccontextmanager
async def watched(job: Job, render: Callable[[JobStatistics], RenderableType] | None = None) -> AsyncIterator[None]:
    """Show the job's figures on the terminal (stderr) while it runs; nothing where there is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    show = render or statistics_table
    with Live(show(job.statistics()), console=console, auto_refresh=False, transient=True) as live:

        async def refresh() -> None:
            while True:
                await asyncio.sleep(_REFRESH_S)
                live.update(show(job.statistics()), refresh=True)

        refreshing = asyncio.create_task(refresh())
        try:
            yield
        finally:
            refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await refreshing


def statistics_table(statistics: JobStatistics) -> Table:
    """A row for each step, all its subtasks together."""
    seconds = max(statistics.elapsed_s, 1e-9)
    table = Table(title=f"{statistics.flow}: {statistics.state}, {statistics.elapsed_s:.1f} s", title_justify="left")
    table.add_column("step")
    for column in ("in", "out", "in/s", "rejected", "waiting", "lag"):
        table.add_column(column, justify="right")
    for name in dict.fromkeys(step.step for task in statistics.tasks for step in task.steps):
        counts = statistics.step(name)
        heads = [task for task in statistics.tasks if task.steps[0].step == name]
        waiting = sum(channel.records for task in heads for channel in task.inputs)
        lag = sum(sum(task.lag.values()) for task in heads)
        table.add_row(
            name,
            f"{counts.records_in:,}",
            f"{counts.records_out:,}",
            f"{counts.records_in / seconds:,.0f}",
            f"{counts.rejected:,}" if counts.rejected else "",
            f"{waiting:,}" if waiting else "",
            f"{lag:,}" if lag else "",
        )
    return table


def print_statistics(statistics: JobStatistics, *, as_json: bool) -> None:
    """The end of a run: a table, or with ``as_json`` all there is."""
    if as_json:
        document: dict[str, Any] = dataclasses.asdict(statistics)
        print(orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS).decode())  # noqa: T201
    else:
        Console().print(statistics_table(statistics))
