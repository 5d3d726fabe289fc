"""Runs a flow under test: step by step, a read of one source at a time, or freely for some turns of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from streamiter.errors import ConfigurationError, StreamiterError
from streamiter.runtime.job import Job
from streamiter.testing.clock import VirtualClock
from streamiter.testing.restore.differences import first_difference
from streamiter.testing.restore.trial import BuiltFlow, SourceKey

__all__ = [
    "Cut",
    "JobOutcome",
    "RunOptions",
    "run_freely",
    "run_in_steps",
]


# Turns between two looks at whether somebody waits for time, or for a thread.
_TURNS_IN_A_ROW: Final = 256


@dataclass(frozen=True, slots=True)
class Cut:
    """A snapshot on the way."""

    after: int
    """Steps, or turns of the event loop."""
    place: str
    """For people."""
    snapshot: bytes
    now_ms: int
    came_out: dict[str, int]
    """Records of each output that came before it."""


@dataclass(slots=True)
class JobOutcome:
    """What came of a run."""

    outputs: dict[str, list[bytes]] = field(default_factory=dict)
    results: dict[str, list[bytes]] = field(default_factory=dict)
    plan: list[SourceKey] = field(default_factory=list)
    """Which source read when."""
    turns: int = 0
    cuts: list[Cut] = field(default_factory=list)
    last_state: bytes | None = None
    """The snapshot before the last step."""
    final_states: dict[str, bytes] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    """Those of the operators after the last step that was asked for."""


async def _driven(
    built: BuiltFlow,
    options: RunOptions,
    snapshot: bytes | None,
    drive: Callable[[JobDriver, JobOutcome], Awaitable[None]],
) -> JobOutcome:
    """Start, drive to the end, gather what came of it."""
    driver, run = JobDriver(built, options), JobOutcome()
    await driver.start(snapshot)
    try:
        await drive(driver, run)
    except (StreamiterError, TimeoutError):
        if not built.watch.violations:
            raise
    finally:
        with contextlib.suppress(StreamiterError):  # What it failed with is on its way already.
            await driver.job.stop("abort")
    built.watch.check_unchanged()
    run.outputs = {tap.name: tap.records for tap in built.taps}
    run.violations = built.watch.violations
    return run


async def run_in_steps(
    built: BuiltFlow,
    options: RunOptions,
    *,
    plan: Sequence[SourceKey] | None = None,
    snapshot: bytes | None = None,
    cuts: bool = False,
    only: int | None = None,
) -> JobOutcome:
    """One read after the other, by the plan, or in an order that the seed decides.

    With ``cuts`` two snapshots are taken after each step but the last; without, one before the last step.
    ``only`` so many steps are run: then ``attributes`` are those of the operators at that point.
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
    """A cut where all is handled; a second snapshot there must be the same."""
    watch, last = driver.built.watch, run.plan[-1:]
    place = "".join(
        [f"after record {watch.records}", *(f" ({driver.built.gates[key].brought})" for key in last)]
    )
    await _cut(driver, run, place, len(run.plan))
    if run.cuts:
        run.last_state = run.cuts[-1].snapshot
        again = await driver.snapshot()
        if again not in (None, run.last_state) and not watch.violations:
            plain = driver.built.plain_data
            difference = first_difference(
                plain.decode(run.last_state), plain.decode(again or b""), "snapshot"
            )
            watch.violations.append(f"two snapshots in a row {place} differ: {difference}")


async def _cut(driver: JobDriver, run: JobOutcome, place: str, after: int) -> None:
    taken = await driver.snapshot()
    if taken is not None:
        came_out = {tap.name: tap.at_snapshot for tap in driver.built.taps}
        run.cuts.append(Cut(after, place, taken, driver.clock.now_ms(), came_out))


async def run_freely(
    built: BuiltFlow, options: RunOptions, *, snapshot: bytes | None = None, cut_after: int | None = None
) -> JobOutcome:
    """All sources read as they can; with ``cut_after`` a snapshot after so many turns, and no further."""

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


PATIENCE_S: Final = 30.0
"""Longer than any step of these small flows takes, even beside other work: after it a run counts as stuck."""

# Turns of the event loop without any progress after which nothing more is to come: a hop takes up to eight.
_QUIET_TURNS: Final = 24
# What waits for a server or the disk gets this long before it counts as waiting for time to pass.
_OTHER_WORK_S: Final = 0.02
_SNAPSHOT_S: Final = 0.1
_POLL_S: Final = 0.0005


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run goes, the same for all runs of a check."""

    seed: int = 0
    interval_s: float = 1.0
    start_ms: int = 1_700_000_000_000


class RealTimeLimit:
    """Real time, which is not endless."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + PATIENCE_S

    def check(self, what: str) -> None:
        """Raise ConfigurationError when it is over."""
        if time.monotonic() > self._until_s:
            raise ConfigurationError(f"check_restore: {what} (waited for {PATIENCE_S:.0f} s)")


class _SteppedClock(VirtualClock):
    """Lets time pass as ``advance`` does, but waits after each timer until all is handled, not some turns."""

    async def pass_by(self, seconds: float, settle: Callable[[], Awaitable[None]]) -> None:
        """Fire what becomes due."""
        until_s = self._now_s + seconds
        while self._timers and self._timers[0][0] <= until_s:
            due_s, _, timer = heapq.heappop(self._timers)
            if not timer.is_cancelled:
                self._now_s = due_s
                timer.fire()
                await settle()
        self._now_s = until_s


class JobDriver:
    """A job at work in the running event loop, with its clock.

    A job of a flow under test at work: sources read when told to, time passes when told to.
    """

    def __init__(self, built: BuiltFlow, options: RunOptions) -> None:
        self.built = built
        self.clock = _SteppedClock(start_ms=options.start_ms)
        self.interval_s = options.interval_s
        self.job: Job

    async def start(self, snapshot: bytes | None) -> None:
        given = None if snapshot is None else self.built.plain_data.decode(snapshot)
        self.job = await self.built.flow.start(clock=self.clock, snapshot=given)

    @property
    def is_over(self) -> bool:
        return self.job.statistics().state != "running"

    async def snapshot(self) -> bytes | None:
        """The state of the whole job, as it would be stored; None where the job has ended."""
        patience = RealTimeLimit()
        taking = asyncio.create_task(self.job.snapshot(), name="snapshot")
        try:
            # Most take a few turns; a loop through a topic also waits for time to pass, to look there again.
            while not (await asyncio.wait({taking}, timeout=_SNAPSHOT_S))[0]:
                await self._quiet()
                if taking.done():  # It had only been late, on a busy machine.
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
        """Let a source read a batch, let the flow handle it, let some time pass."""
        gate = self.built.gates[source]
        gate.open()
        await self.settle()
        self.built.watch.next_records(gate.records)
        await self.pass_time()

    async def pass_time(self) -> None:
        """Let time pass until nothing waits for it within a step."""
        patience = RealTimeLimit()
        while True:
            await self.clock.pass_by(self.interval_s, self.settle)
            if self.is_over or not any(task.is_handling for task in self._tasks):
                return
            await self.settle()
            patience.check("a step does not return, however much time passes")

    async def settle(self) -> None:
        """Wait until all that was read has been handled, as far as it can be without time passing."""
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
        """Wait until the job has ended by itself."""
        patience = RealTimeLimit()
        await self.settle()
        while not self.is_over:
            await self.pass_time()
            await asyncio.sleep(_POLL_S)  # Threads end, files are closed.
            patience.check("the job does not end, though its inputs have")
        await self.job.wait()

    async def wait_for_others(self) -> None:
        """Give whoever waits for time, or for a thread, what it waits for."""
        await asyncio.sleep(_POLL_S)
        await self.clock.advance(self.interval_s)

    @property
    def _tasks(self) -> Sequence[Any]:
        # Whether a step is under way is nobody's business but that of tests.
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
