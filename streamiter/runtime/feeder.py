"""The feeder: brings what a source reads to the gate of its task, ahead of need."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, final

from streamiter.channels import Channel, Intake
from streamiter.errors import ConfigurationError
from streamiter.operators.operator import Context
from streamiter.operators.output import rows_if_table
from streamiter.operators.rejection import RecordFailure, shortened
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.records import Control, EndOfInput
from streamiter.runtime.failure import call_unless_cancelled

__all__ = ["Feeder"]


@final
class Feeder:
    """Reads a source into a channel of its own; ``run`` is an asyncio task beside that of the operators.

    All that was read is handled: whoever stops it says what comes behind in the channel.
    """

    def __init__(self, source: Source, channel: Channel, step: str) -> None:
        self.channel = channel
        self.intake = Intake()
        """Shut by channels further down that have no room for what it would read."""
        self._source = source
        self._step = step
        self.is_idle = False
        """Whether nothing is to be expected for now, known once it is open."""
        self._opened = False
        self._is_reading = False
        self._stopped = False
        self._then: Control = EndOfInput()
        self._running: asyncio.Task[None] | None = None
        self._last_lag: Mapping[int, int] = {}
        self._carriers: set[type[Any]] = {list}
        """Types of records that the source has brought and that are no tables."""

    async def open(self, context: Context, positions: Positions | None) -> Positions:
        """Open the source; gives where it begins."""
        self._opened = True
        try:
            result = self._source.open(context, positions)
            if inspect.isawaitable(result):
                await result
            self.is_idle = self._source.is_idle()
            return self._source.positions()
        except Exception as error:
            raise RecordFailure(self._step) from error

    def start(self, group: asyncio.TaskGroup) -> None:
        """Begin to read, as a task of ``group``."""
        reading = call_unless_cancelled(self._run, self._step)
        self._running = group.create_task(reading, name=f"feed {self.channel.name}")

    def stop(self, then: Control) -> None:
        """Read no more; ``then`` comes behind what was read. Asked again, it goes on as it was asked first.

        All sources of a job are asked in the same order. Were a later ``then`` to take the place of the first, it would
        do so only where that has not come through yet: some sources would end, and others go on after a restart.
        """
        if self._stopped:
            return
        self._stopped = True
        self._then = then
        if self._is_reading:
            assert self._running is not None
            self._running.cancel()

    async def _run(self) -> None:
        while not self._stopped and (batch := await self._read()) is not None:
            # A channel looks at the records only, whatever carries them.
            while not self.channel.try_put(batch):  # type: ignore[arg-type]
                await self.channel.wait_for_room()
            # A source that always has something must leave others their turn.
            await asyncio.sleep(0)
        self.channel.put_control(self._then)

    async def _read(self) -> SourceBatch | None:
        """The next batch; None at the end, or where it was stopped while it waited."""
        self._is_reading = True
        try:
            await self.intake.wait()
            batch = self._source.read()
            return self._checked((await batch) if inspect.isawaitable(batch) else batch)
        except asyncio.CancelledError:
            if self._stopped and self._running is not None and self._running.uncancel() == 0:
                return None
            raise
        except Exception as error:
            raise RecordFailure(self._step) from error
        finally:
            self._is_reading = False

    def _checked(self, batch: Any) -> SourceBatch | None:
        if batch is None:
            return None
        if isinstance(batch, SourceBatch):
            if type(batch.records) not in self._carriers:
                batch.records = rows_if_table(f"{type(self._source).__name__}.read", batch.records)
                self._carriers.add(type(batch.records))
            return batch
        raise ConfigurationError(
            f"{type(self._source).__name__}.read: expected a SourceBatch, or None at the end, given "
            f"{shortened(batch)}; return SourceBatch(records, positions)"
        )

    async def close(self) -> None:
        """Close the source, if it was opened."""
        if not self._opened:
            return
        self._last_lag = self.lag()
        self._opened = False
        try:
            result = self._source.close()
            if inspect.isawaitable(result):
                await result
        except Exception as error:
            raise RecordFailure(self._step) from error

    async def report_positions(self, group: str, positions: Positions) -> None:
        """Have the source tell tools that show lag how far a checkpoint has come."""
        result = self._source.report_positions(group, positions)
        if inspect.isawaitable(result):
            await result

    def redistribute(self, positions: Sequence[Positions], parallelism: int) -> Sequence[Positions] | None:
        """What another number of subtasks goes on from; None if the source does not say."""
        redistribute = getattr(self._source, "redistribute", None)
        return None if redistribute is None else redistribute(positions, parallelism)

    def lag(self) -> Mapping[int, int]:
        """What the source says, or said last before it was closed."""
        return dict(self._source.lag()) if self._opened else self._last_lag
