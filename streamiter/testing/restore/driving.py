"""Runs a flow under test: step by step, a read of one source at a time, or freely for some turns of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from streamiter.errors import StreamiterError
from streamiter.testing.restore.differences import first_difference
from streamiter.testing.restore.driver import Driver, Patience, RunOptions
from streamiter.testing.restore.trial import BuiltFlow, SourceKey

__all__ = ["Cut", "Run", "run_freely", "run_in_steps"]

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
class Run:
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
    drive: Callable[[Driver, Run], Awaitable[None]],
) -> Run:
    """Start, drive to the end, gather what came of it."""
    driver, run = Driver(built, options), Run()
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
) -> Run:
    """One read after the other, by the plan, or in an order that the seed decides.

    With ``cuts`` two snapshots are taken after each step but the last; without, one before the last step.
    ``only`` so many steps are run: then ``attributes`` are those of the operators at that point.
    """

    async def drive(driver: Driver, run: Run) -> None:
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


async def _cut_twice(driver: Driver, run: Run) -> None:
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


async def _cut(driver: Driver, run: Run, place: str, after: int) -> None:
    taken = await driver.snapshot()
    if taken is not None:
        came_out = {tap.name: tap.at_snapshot for tap in driver.built.taps}
        run.cuts.append(Cut(after, place, taken, driver.clock.now_ms(), came_out))


async def run_freely(
    built: BuiltFlow, options: RunOptions, *, snapshot: bytes | None = None, cut_after: int | None = None
) -> Run:
    """All sources read as they can; with ``cut_after`` a snapshot after so many turns, and no further."""

    async def drive(driver: Driver, run: Run) -> None:
        patience = Patience()
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
