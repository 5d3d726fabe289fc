"""A flow under test: built anew for each run, with gates at its sources, taps at its outputs, watched operators."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import ConfigurationError
from streamiter.flow.flow import Flow
from streamiter.flow.stream import Stream
from streamiter.models.update import ModelSnapshot
from streamiter.operators.context import Context
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import shortened
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.records import Batch
from streamiter.runtime.graph import Step
from streamiter.testing.restore.watch import Watch

__all__ = ["Build", "BuiltFlow", "Gate", "Outputs", "SourceKey", "Tap"]

Outputs: TypeAlias = Stream | Sequence[Stream] | Mapping[str, Stream | Callable[[], Any]]
"""Streams whose records are compared, and callables that give a result when the flow has run."""

Build: TypeAlias = Callable[[Flow], Outputs]
SourceKey: TypeAlias = tuple[str, int]
"""A source: its step and subtask."""


class Gate:
    """Lets one instance of a source read when it is told to."""

    def __init__(self) -> None:
        self._permits = asyncio.Semaphore(0)
        self.is_reading = False
        self.has_ended = False
        self.brought = ""
        """What it read last, for people."""
        self.records = 0

    def open(self) -> None:
        """Let it read once."""
        self.is_reading = True
        self._permits.release()

    async def read(self, source: Source) -> SourceBatch | None:
        """Read when it is open."""
        await self._permits.acquire()
        batch = source.read()
        if inspect.isawaitable(batch):
            batch = await batch
        self.has_ended = batch is None
        self.brought, self.records = "its end", 0
        if isinstance(batch, SourceBatch):
            self.brought, self.records = shortened(batch.records), len(batch.records)
        self.is_reading = False
        checked: SourceBatch | None = batch  # The feeder says what is wrong with anything else.
        return checked


class _GatedSource(Source):
    """A source behind its gate."""

    def __init__(self, source: Source, gates: dict[SourceKey, Gate]) -> None:
        self._source = source
        self._gates = gates

    def open(self, context: Context, positions: Positions | None) -> Any:
        self._gate = self._gates[context.name, context.subtask_index] = Gate()
        return self._source.open(context, positions)

    async def read(self) -> SourceBatch | None:
        return await self._gate.read(self._source)

    def positions(self) -> Positions:
        return self._source.positions()

    def is_idle(self) -> bool:
        return self._source.is_idle()

    def lag(self) -> Mapping[int, int]:
        return self._source.lag()

    def close(self) -> Any:
        return self._source.close()


class Tap:
    """What comes out of one output, encoded record by record."""

    def __init__(self, name: str, plain_data: PlainData) -> None:
        self.name = name
        self.records: list[bytes] = []
        self.at_snapshot = 0
        """Records that had come when the last barrier passed."""
        self._plain = plain_data

    def take(self, batch: Batch) -> None:
        """Take note of a batch."""
        self.records += [self._plain.encode(_plain_form(record)) for record in batch]

    def decoded(self, content: bytes) -> Any:
        """A record again."""
        return self._plain.decode(content)


class _TapOperator(Operator):
    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    def process_batch(self, batch: Batch, out: Output) -> None:
        self._tap.take(batch)

    def snapshot(self) -> None:
        self._tap.at_snapshot = len(self._tap.records)


class BuiltFlow:
    """One flow, for one run."""

    def __init__(self, build: Build, structs: Iterable[type[msgspec.Struct]], *, gated: bool) -> None:
        self.flow = Flow("check_restore")
        self.flow.register(ModelSnapshot)
        for struct in structs:
            self.flow.register(struct)
        self.plain_data = self.flow.plain_data
        self.watch = Watch(self.plain_data)
        self.gates: dict[SourceKey, Gate] = {}
        self.taps: list[Tap] = []
        self._results: dict[str, Callable[[], Any]] = {}
        outputs = _by_name(build(self.flow))
        for step in self.flow.steps:
            self.watch.step(step)
            if gated and step.source is not None:
                _put_gate(step, self.gates)
        for name, output in outputs.items():
            self._tap(name, output)

    def _tap(self, name: str, output: Stream | Callable[[], Any]) -> None:
        if not isinstance(output, Stream):
            self._results[name] = output
            return
        tap = Tap(name, self.plain_data)
        self.taps.append(tap)
        output.process(lambda: _TapOperator(tap), name=f"tap of {name}", parallelism=1)

    def results(self) -> dict[str, list[bytes]]:
        """What the callables among the outputs give."""
        return {
            name: [self.plain_data.encode(_plain_form(result()), name=f"output {name!r}")]
            for name, result in self._results.items()
        }


def _put_gate(step: Step, gates: dict[SourceKey, Gate]) -> None:
    make = step.source
    assert make is not None
    step.source = lambda: _GatedSource(make(), gates)


def _by_name(outputs: Any) -> dict[str, Any]:
    if isinstance(outputs, Stream):
        return {"output": outputs}
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if isinstance(outputs, Sequence) and not isinstance(outputs, str):
        return {f"output {number}": output for number, output in enumerate(outputs)}
    raise ConfigurationError(
        f"check_flow_restore: expected build(flow) to return a stream, or several by name, given {shortened(outputs)}"
    )


def _plain_form(record: Any) -> Any:
    """Dataclasses, which may travel within a process, by their fields."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        fields = {
            field.name: _plain_form(getattr(record, field.name)) for field in dataclasses.fields(record)
        }
        return (type(record).__qualname__, fields)
    if type(record) in (list, tuple):
        return type(record)(map(_plain_form, record))
    return record
