"""The flow under test and its runs: step by step, one read of one source at a time, or freely.

``run_in_steps`` and ``run_freely`` run a ``BuiltFlow``: the user's flow with a gate at each source, which opens for one
read, and a tap behind each output, which collects the records. A ``JobDriver`` starts the job, takes snapshots
(*cuts*), and lets time pass on a virtual clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import msgspec

from streamiter.engine.graph.graph import Step
from streamiter.engine.job.job import Job
from streamiter.engine.tasks.task import Task
from streamiter.errors import ConfigurationError, StreamiterError, shortened
from streamiter.flow.flow import Flow
from streamiter.flow.stream import Stream
from streamiter.models.update import ModelSnapshot
from streamiter.operators.operator import Context, Operator
from streamiter.operators.output import Output
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.testing.restore.differences import Watch, first_difference
from streamiter.testing.simulated_time import VirtualClock
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Batch

FlowOutputs: TypeAlias = Stream | Sequence[Stream] | Mapping[str, Stream | Callable[[], Any]]
"""Streams whose records are compared, and callables whose results are compared after the run."""


Build: TypeAlias = Callable[[Flow], FlowOutputs]


SourceKey: TypeAlias = tuple[str, int]
"""A source: its step and its subtask."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a run, the same for all runs of a check."""

    seed: int = 0
    """Decides the order in which sources read."""
    interval_s: float = 1.0
    """Seconds of virtual time after each batch."""
    start_ms: int = 1_700_000_000_000
    """The first date of the clock."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A snapshot during a run, from which another run is restored."""

    after: int
    """The count of steps, or of turns of the event loop, before it."""
    place: str
    """The place in words."""
    snapshot: bytes
    """The encoded snapshot of the job."""
    now_ms: int
    """The time of the cut."""
    came_out: dict[str, int]
    """The count of records of each output before it."""


@dataclass(slots=True)
class JobOutcome:
    """The results of a run."""

    outputs: dict[str, list[bytes]] = field(default_factory=dict)
    """The encoded records of each output."""
    results: dict[str, list[bytes]] = field(default_factory=dict)
    """The encoded results of the callables among the outputs."""
    plan: list[SourceKey] = field(default_factory=list)
    """The sources in the order of their reads."""
    turns: int = 0
    """The count of turns of the event loop."""
    cuts: list[Cut] = field(default_factory=list)
    """All cuts, in order."""
    last_state: bytes | None = None
    """The snapshot before the last step."""
    final_states: dict[str, bytes] = field(default_factory=dict)
    """The states of the operators at the end."""
    violations: list[str] = field(default_factory=list)
    """What the watch found wrong, as sentences."""
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    """The attributes of the operators after the last step."""


async def run_in_steps(
    built: BuiltFlow,
    options: RunSettings,
    *,
    plan: Sequence[SourceKey] | None = None,
    snapshot: bytes | None = None,
    cuts: bool = False,
    only: int | None = None,
) -> JobOutcome:
    """Run with one read at a time, in the order of the plan, or in an order that the seed decides.

    With ``cuts``, take two snapshots after each step but the last; without, one before the last step. With ``only``,
    run this many steps; ``attributes`` are those of the operators at that point.
    """

    async def drive(driver: JobDriver, run: JobOutcome) -> None:
        order = random.Random(options.seed)  # noqa: S311 (a schedule, no secret)
        await driver.settle()
        while not driver.is_over:
            done = len(run.plan)
            waiting = [key for key, gate in sorted(built.gates.items()) if not gate.has_ended]
            if cuts and waiting:
                await _cut_twice(driver, run)
            if only is not None and done >= only:
                run.attributes = built.watch.attributes()
                return
            if not waiting:
                break
            if not cuts and plan is not None and done == len(plan) - 1:
                run.last_state = await driver.snapshot()
            planned = plan[done] if plan is not None and done < len(plan) else None
            source = planned if planned in waiting else order.choice(waiting)
            run.plan.append(source)
            await driver.read_once(source)
        await driver.end()
        run.results = built.results()

    return await _driven(built, options, snapshot, drive)


async def _cut_twice(driver: JobDriver, run: JobOutcome) -> None:
    """Take a cut after all records are handled, and a second snapshot, which must be the same."""
    watch, last = driver.built.watch, run.plan[-1:]
    place = "".join([f"after record {watch.records}", *(f" ({driver.built.gates[key].brought})" for key in last)])
    await _cut(driver, run, place, len(run.plan))
    if run.cuts:
        run.last_state = run.cuts[-1].snapshot
        again = await driver.snapshot()
        is_other = watch.compare_snapshots and again not in (None, run.last_state)
        if is_other and not watch.violations:
            plain = driver.built.plain_data
            difference = first_difference(plain.decode(run.last_state), plain.decode(again or b""), "snapshot")
            watch.report(f"two snapshots in a row {place} differ: {difference}")


async def _cut(driver: JobDriver, run: JobOutcome, place: str, after: int) -> None:
    taken = await driver.snapshot()
    if taken is not None:
        came_out = {tap.name: tap.at_snapshot for tap in driver.built.taps}
        run.cuts.append(Cut(after, place, taken, driver.clock.now_ms(), came_out))


# Turns between two pauses for threads and for time.
_TURNS_IN_A_ROW: Final = 256


async def run_freely(
    built: BuiltFlow, options: RunSettings, *, snapshot: bytes | None = None, cut_after: int | None = None
) -> JobOutcome:
    """Run with all sources reading freely; with ``cut_after``, take a snapshot after this many turns, and stop."""

    async def drive(driver: JobDriver, run: JobOutcome) -> None:
        patience = RealTimeLimit()
        while not driver.is_over and (cut_after is None or run.turns < cut_after):
            await asyncio.sleep(0)
            run.turns += 1
            if run.turns % _TURNS_IN_A_ROW == 0:
                await driver.wait_for_others()
            patience.check("the flow does not end")
        if cut_after is not None:
            await _cut(driver, run, f"after {run.turns} turns of the event loop", run.turns)
            return
        await driver.job.wait()
        run.results = built.results()
        run.final_states = await built.watch.final_states()

    return await _driven(built, options, snapshot, drive)


async def _driven(
    built: BuiltFlow,
    options: RunSettings,
    snapshot: bytes | None,
    drive: Callable[[JobDriver, JobOutcome], Awaitable[None]],
) -> JobOutcome:
    """Start a job, drive it to its end, and return the results."""
    driver, run = JobDriver(built, options), JobOutcome()
    await driver.start(snapshot)
    try:
        await drive(driver, run)
    except (StreamiterError, TimeoutError):
        if not built.watch.violations:
            raise
    finally:
        with contextlib.suppress(StreamiterError):  # Its error is being raised already.
            await driver.job.stop("abort")
    built.watch.check_unchanged()
    run.outputs = {tap.name: tap.records for tap in built.taps}
    run.violations = built.watch.violations
    return run


PATIENCE_S: Final = 30.0
"""Longer than any step of these small flows takes on a busy machine: after it a run counts as stuck."""
# Turns of the event loop without progress after which all is handled: one hop takes up to eight turns.
_QUIET_TURNS: Final = 24
# A step that waits longer than this for a server or the disk counts as waiting for time to pass.
_OTHER_WORK_S: Final = 0.02
_SNAPSHOT_S: Final = 0.1
_POLL_S: Final = 0.0005


class JobDriver:
    """A running job of a flow under test: it lets one source read, and lets time pass."""

    def __init__(self, built: BuiltFlow, options: RunSettings) -> None:
        self.built = built
        self.clock = _SteppedClock(start_ms=options.start_ms)
        self.interval_s = options.interval_s
        self.job: Job

    async def start(self, snapshot: bytes | None) -> None:
        given = None if snapshot is None else self.built.plain_data.decode(snapshot)
        self.job = await self.built.flow.start(clock=self.clock, snapshot=given)

    @property
    def is_over(self) -> bool:
        # As _tasks, a private attribute: asked in each turn, all statistics took a fifth of the time of a check.
        return self.job._state != "running"

    async def snapshot(self) -> bytes | None:
        """Return the encoded state of the job; None if the job has ended."""
        patience = RealTimeLimit()
        taking = asyncio.create_task(self.job.snapshot(), name="snapshot")
        try:
            # Most snapshots take a few turns; a loop through a topic also waits for the time of its next read.
            while not (await asyncio.wait({taking}, timeout=_SNAPSHOT_S))[0]:
                await self._quiet()
                if taking.done():  # It was only late, on a busy machine.
                    break
                await self.clock.pass_by(self.interval_s, self._quiet)
                patience.check("a snapshot is not complete, however much time passes")
            taken = await taking
        except ConfigurationError:
            if self.is_over:
                return None
            raise
        finally:
            taking.cancel()
        return self.built.plain_data.encode(taken, name="snapshot")

    async def read_once(self, source: SourceKey) -> None:
        """Let a source read a batch, wait until the flow has handled it, and let some time pass."""
        gate = self.built.gates[source]
        gate.open()
        await self.settle()
        self.built.watch.next_records(gate.records)
        await self.pass_time()

    async def pass_time(self) -> None:
        """Let time pass until no step waits for it."""
        patience = RealTimeLimit()
        while True:
            await self.clock.pass_by(self.interval_s, self.settle)
            if self.is_over or not any(task.is_handling for task in self._tasks):
                return
            await self.settle()
            patience.check("a step does not return, however much time passes")

    async def settle(self) -> None:
        """Wait until all records are handled, as far as this is possible without time passing."""
        patience = RealTimeLimit()
        other_work_until_s = time.monotonic() + _OTHER_WORK_S
        while True:
            await self._quiet()
            if self.is_over:
                return
            waits_for = self._in_threads() or self._reading()
            if not waits_for:
                handling = any(task.is_handling for task in self._tasks)
                if not handling or time.monotonic() > other_work_until_s:
                    return
            patience.check(waits_for)
            await asyncio.sleep(_POLL_S)

    async def end(self) -> None:
        """Wait until the job ends by itself."""
        patience = RealTimeLimit()
        await self.settle()
        while not self.is_over:
            await self.pass_time()
            await asyncio.sleep(_POLL_S)  # Threads end and files are closed meanwhile.
            patience.check("the job does not end, though its inputs have")
        await self.job.wait()

    async def wait_for_others(self) -> None:
        """Let time pass, and give threads a moment."""
        await asyncio.sleep(_POLL_S)
        await self.clock.advance(self.interval_s)

    @property
    def _tasks(self) -> Sequence[Task]:
        # A private attribute: only this check needs to know whether a step is running.
        return self.job._tasks

    async def _quiet(self) -> None:
        seen: int | None = None
        still = 0
        while still < _QUIET_TURNS:
            await asyncio.sleep(0)
            handled = sum(task.progress.handled for task in self._tasks)
            still = still + 1 if handled == seen else 0
            seen = handled

    def _in_threads(self) -> str:
        return next(
            (
                f"step {task.first.step.name!r} does not return from its thread"
                for task in self._tasks
                if task.is_handling and task.first.operator.runs_in_thread
            ),
            "",
        )

    def _reading(self) -> str:
        return next(
            (
                f"source {step!r} gives nothing, nor its end; check a bounded one (a topic with stop='latest')"
                for (step, _), gate in self.built.gates.items()
                if gate.is_reading
            ),
            "",
        )


class _SteppedClock(VirtualClock):
    """A virtual clock that waits after each timer until its effects are handled, not for some turns only."""

    async def pass_by(self, seconds: float, settle: Callable[[], Awaitable[None]]) -> None:
        """Let time pass, and await ``settle`` after each timer."""
        for timer in self.due_timers(self.now_s + seconds):
            timer.fire()
            await settle()


class RealTimeLimit:
    """The limit of real time for one wait."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + PATIENCE_S

    def check(self, what: str) -> None:
        """Raise ConfigurationError if the limit is reached."""
        if time.monotonic() > self._until_s:
            raise ConfigurationError(f"check_restore: {what} (waited for {PATIENCE_S:.0f} s)")


class BuiltFlow:
    """A flow that is built for one run, with gates at its sources, taps at its outputs, and watched operators."""

    def __init__(
        self, build: Build, structs: Iterable[type[msgspec.Struct]], *, gated: bool, compare_snapshots: bool = True
    ) -> None:
        self.flow = Flow("check_restore")
        self.flow.register(ModelSnapshot)
        for struct in structs:
            self.flow.register(struct)
        self.plain_data = self.flow.plain_data
        self.watch = Watch(self.plain_data, compare_snapshots=compare_snapshots)
        self.gates: dict[SourceKey, SourceGate] = {}
        self.taps: list[Tap] = []
        self._results: dict[str, Callable[[], Any]] = {}
        with self.flow.graph.adapting(self._gated_step if gated else self.watch.watched_step):
            outputs = _by_name(build(self.flow))
        for name, output in outputs.items():
            self._tap(name, output)

    def _gated_step(self, step: Step) -> Step:
        make = step.source
        gated = step if make is None else replace(step, source=lambda: _GatedSource(make(), self.gates))
        return self.watch.watched_step(gated)

    def _tap(self, name: str, output: Stream | Callable[[], Any]) -> None:
        if not isinstance(output, Stream):
            self._results[name] = output
            return
        tap = Tap(name, self.plain_data)
        self.taps.append(tap)
        output.process(lambda: _TapOperator(tap), name=f"tap of {name}", parallelism=1)

    def results(self) -> dict[str, list[bytes]]:
        """Return the encoded results of the callables among the outputs."""
        return {
            name: [self.plain_data.encode(_plain_form(result()), name=f"output {name!r}")]
            for name, result in self._results.items()
        }


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
    """Return a record as plain data: a dataclass, which is allowed within a process, as its fields."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        fields = {field.name: _plain_form(getattr(record, field.name)) for field in dataclasses.fields(record)}
        return (type(record).__qualname__, fields)
    if type(record) in (list, tuple):
        return type(record)(map(_plain_form, record))
    return record


class SourceGate:
    """The gate of one instance of a source: each ``open`` lets the source read once."""

    def __init__(self) -> None:
        self._permits = asyncio.Semaphore(0)
        self.is_reading = False
        self.has_ended = False
        self.brought = ""
        """The records of the last read, in words."""
        self.records = 0

    def open(self) -> None:
        self.is_reading = True
        self._permits.release()

    async def read(self, source: Source) -> SourceBatch | None:
        """Wait for ``open``, then read."""
        await self._permits.acquire()
        batch = source.read()
        if inspect.isawaitable(batch):
            batch = await batch
        self.has_ended = batch is None
        self.brought, self.records = "its end", 0
        if isinstance(batch, SourceBatch):
            self.brought, self.records = shortened(batch.records), len(batch.records)
        self.is_reading = False
        checked: SourceBatch | None = batch  # The feeder raises an error for any other type.
        return checked


class _GatedSource(Source):
    """A source that reads through its gate."""

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
    """The records of one output, each encoded."""

    def __init__(self, name: str, plain_data: PlainData) -> None:
        self.name = name
        self.records: list[bytes] = []
        self.at_snapshot = 0
        """The count of records before the last barrier."""
        self._plain = plain_data

    def take(self, batch: Batch) -> None:
        self.records += [self._plain.encode(_plain_form(record)) for record in batch]


class _TapOperator(Operator):
    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    def process_batch(self, batch: Batch, out: Output) -> None:
        self._tap.take(batch)

    def snapshot(self) -> None:
        self._tap.at_snapshot = len(self._tap.records)
