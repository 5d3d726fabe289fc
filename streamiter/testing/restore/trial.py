"""A flow under test: built anew for each run, with gates at its sources, taps at its outputs, watched operators."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from streamiter.checkpoints.plain_data import PlainData
from streamiter.deferred import Deferred
from streamiter.errors import ConfigurationError, PlainDataError, shortened
from streamiter.flow.flow import Flow
from streamiter.flow.stream import Stream
from streamiter.models.update import ModelSnapshot
from streamiter.operators.operator import Context, Operator
from streamiter.operators.output import Output
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.records import Batch
from streamiter.runtime.graph import Step
from streamiter.testing.restore.differences import attributes_of, first_difference

__all__ = [
    "Build",
    "BuiltFlow",
    "SourceKey",
]


Outputs: TypeAlias = Stream | Sequence[Stream] | Mapping[str, Stream | Callable[[], Any]]
"""Streams whose records are compared, and callables that give a result when the flow has run."""

Build: TypeAlias = Callable[[Flow], Outputs]
SourceKey: TypeAlias = tuple[str, int]
"""A source: its step and subtask."""


class SourceGate:
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

    def __init__(self, source: Source, gates: dict[SourceKey, SourceGate]) -> None:
        self._source = source
        self._gates = gates

    def open(self, context: Context, positions: Positions | None) -> Any:
        self._gate = self._gates[context.name, context.subtask_index] = SourceGate()
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
        self.gates: dict[SourceKey, SourceGate] = {}
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


def _put_gate(step: Step, gates: dict[SourceKey, SourceGate]) -> None:
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


@dataclass(frozen=True, slots=True)
class _Note:
    """A state as it was when it was given or taken."""

    kind: type[Operator]
    who: str
    state: Any
    content: bytes
    records: int


class Watch:
    """Stands between the engine and the operators of one run; they do not notice.

    Used in the event loop of that run only.

    What the operators of a flow are asked for and given, and whether it changes afterwards.
    """

    def __init__(self, plain_data: PlainData) -> None:
        self.violations: list[str] = []
        """What was found wrong so far, as sentences."""
        self.records = 0
        """Records that were read so far, for the sentences; written by whoever drives the run."""
        self.operators: dict[tuple[str, int], Operator] = {}
        """The operators at work by step and subtask, the last one where each round has its own."""
        self._plain = plain_data
        self._taken: list[_Note] = []
        self._given: list[_Note] = []
        self._deferring: set[type[Operator]] = set()
        """Those whose state is deferred: they may keep what they are given, which is decoded anew each time."""
        self._asked: dict[Operator, bytes] = {}
        """What an operator gave since the last record."""

    def step(self, step: Step) -> None:
        """Watch the operators of a step."""
        make = step.factory
        step.factory = lambda: self._watched(step.name, make())

    def next_records(self, records: int) -> None:
        """Records have been read since."""
        self.records += records
        self._asked.clear()

    def check_unchanged(self) -> None:
        """Look at all states that were given and taken: they must be as they were."""
        for note in self._taken:
            if changed := self._change_of(note):
                self.violations.append(
                    f"the state that snapshot() of {note.who} gave after record {note.records} changed afterwards: "
                    f"{changed}; give copies of what the operator goes on changing"
                )
        for note in self._given:
            if note.kind not in self._deferring and (changed := self._change_of(note)):
                self.violations.append(
                    f"the state that restore() of {note.who} was given changed afterwards: {changed}; the operator "
                    "keeps a reference to it and changes it: take copies"
                )
        self._taken.clear()
        self._given.clear()

    async def final_states(self) -> dict[str, bytes]:
        """What the operators give when all is over, by step and subtask."""
        states: dict[str, bytes] = {}
        for (step, subtask), operator in sorted(self.operators.items()):
            state = type(operator).snapshot(operator)
            state = (await state) if inspect.isawaitable(state) else state
            if _has_deferred(state):
                self._deferring.add(type(operator))
            content, deferred = self._plain.encode_state(state, name=f"state of step {step!r}")
            frames = [frame for piece in deferred for frame in _frames_of(piece)]
            states[f"{step}[{subtask}]"] = self._plain.encode((content, frames))
        return states

    def attributes(self) -> dict[str, dict[str, str]]:
        """The attributes of all operators now, by who they belong to."""
        return {
            f"{type(operator).__name__} of step {step!r}": attributes_of(operator, self._plain)
            for (step, _), operator in self.operators.items()
        }

    # -- between the engine and an operator ---------------------------------------------------------------

    def _watched(self, step: str, operator: Any) -> Any:
        if not isinstance(operator, Operator):
            return operator  # The engine says what is wrong with it.
        who = f"{type(operator).__name__} (step {step!r})"
        opened, snapshot, restore = operator.open, operator.snapshot, operator.restore

        def open_noted(context: Context) -> Any:
            self.operators[step, context.subtask_index] = operator
            return opened(context)

        def snapshot_noted() -> Any:
            state = snapshot()
            if inspect.isawaitable(state):
                return _then(state, lambda given: self._note_taken(who, operator, given))
            self._note_taken(who, operator, state)
            return state

        def restore_noted(state: Any) -> Any:
            with contextlib.suppress(
                PlainDataError
            ):  # What stands for deferred state can be gone through once.
                content = self._plain.encode(state)
                self._given.append(_Note(type(operator), who, state, content, self.records))
            return restore(state)

        # In the instance, whatever its class forbids: the engine looks there first.
        for name, method in (("open", open_noted), ("snapshot", snapshot_noted), ("restore", restore_noted)):
            object.__setattr__(operator, name, method)
        return operator

    def _note_taken(self, who: str, operator: Operator, state: Any) -> None:
        content = self._encoded(state, who)
        if content is None:
            self._deferring.add(type(operator))
            return
        before = self._asked.setdefault(operator, content)
        if before != content:
            difference = first_difference(self._plain.decode(before), self._plain.decode(content), "state")
            self.violations.append(
                f"snapshot() of {who}, called twice in a row after record {self.records}, gave different states: "
                f"{difference}; it must only look, and its result depend on nothing but the records"
            )
        self._taken.append(_Note(type(operator), who, state, content, self.records))

    def _encoded(self, state: Any, who: str) -> bytes | None:
        try:
            return self._plain.encode(state, name="state")
        except PlainDataError as error:
            if not _has_deferred(state):
                self.violations.append(f"snapshot() of {who} after record {self.records}: {error}")
            return None

    def _change_of(self, note: _Note) -> str | None:
        try:
            now = self._plain.encode(note.state)
        except PlainDataError as error:
            return str(error)
        if now == note.content:
            return None
        return str(first_difference(self._plain.decode(note.content), self._plain.decode(now), "state"))


async def _then(awaited: Any, note: Callable[[Any], None]) -> Any:
    state = await awaited
    note(state)
    return state


def _frames_of(deferred: Deferred) -> list[bytes]:
    try:
        return list(deferred.frames())
    finally:
        deferred.release()


def _has_deferred(state: Any) -> bool:
    if isinstance(state, dict):
        return any(map(_has_deferred, state.values()))
    if isinstance(state, (list, tuple)):
        return any(map(_has_deferred, state))
    return isinstance(state, Deferred)
