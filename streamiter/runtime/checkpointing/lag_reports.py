"""Telling tools that show lag how far the committed checkpoints have come; nothing depends on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import final

from streamiter.errors import StreamiterError
from streamiter.operators.source import Positions
from streamiter.runtime.task import Task

__all__ = ["LagReports"]

_log = logging.getLogger("streamiter.job")


@final
class LagReports:
    """Reports what was committed last, beside the job: neither records nor checkpoints wait for it."""

    def __init__(self, flow: str, tasks: Sequence[Task]) -> None:
        self._flow = flow
        self._tasks = [task for task in tasks if task.feeder is not None]
        self._due: list[Positions] = []
        self._is_due = asyncio.Event()
        self._has_failed = False

    def positions(self) -> list[Positions]:
        """Where the sources stood at the last barrier."""
        return [dict(task.positions_at_barrier) for task in self._tasks]

    def committed(self, positions: list[Positions]) -> None:
        """These are committed now; what was not reported yet is out of date."""
        self._due = positions
        self._is_due.set()

    async def run(self) -> None:
        """Report, until cancelled."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            for task, positions in zip(self._tasks, self._due, strict=True):
                await self._report(task, positions)

    async def _report(self, task: Task, positions: Positions) -> None:
        if task.feeder is None or task.ended or not positions:
            return
        try:
            await task.feeder.report_positions(f"streamiter-{self._flow}", positions)
        except Exception as error:  # Of anybody's own source: no reason to end a job that works.
            if not self._has_failed:
                what = error if isinstance(error, StreamiterError) else f"{type(error).__name__}: {error}"
                step = task.head.step.name
                _log.warning("flow %r, step %r: its lag cannot be reported: %s", self._flow, step, what)
            self._has_failed = True
