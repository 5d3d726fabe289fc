"""Runs a consistency model and the brute force with the same calls and reports where they first differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from parameter_server.consistency.brute_force import BruteForce, Event, Kind, Verdict, after_add, after_move

from streamiter.errors import OutOfTurn, ParameterServerError, UnknownWorker
from streamiter.parameter_server.consistency import Consistency, ConsistencyModel, Released
from streamiter.values.plain_data import PlainData

STEPS: tuple[Kind, ...] = (*("get",) * 6, *("add",) * 5, *("clock",) * 8, *("leave", "join", "forget", "raise"))
"""The kinds of steps of a random run; common kinds are listed more than once."""

RARE: tuple[Kind, ...] = ("restore", "start")

WORKERS = (*range(6), 99)
"""All workers of these tests; worker 99 belongs to a model before its restore."""

MakeModel = Callable[[Consistency, Sequence[int]], ConsistencyModel[Any, Any]]


class Step(NamedTuple):
    """A call to make; ``ahead`` is how far the clock observed on other shards is ahead of this shard, or -1."""

    kind: Kind
    worker: int
    ahead: int = -1


@dataclass(eq=False)
class GetCall:
    """A get; two gets are never equal."""

    number: int


def random_steps(random: Random, workers: int, count: int = 60) -> list[Step]:
    """Return random steps of these workers and sometimes of an unknown worker."""
    return [
        Step(
            random.choice(RARE) if random.random() < 0.01 else random.choice(STEPS),
            random.randrange(workers + (random.random() < 0.1)),
            random.choice((-1, -1, 0, 1, 2)),
        )
        for _ in range(count)
    ]


class Run:
    """One model with a storage of one number, as a shard has them."""

    def __init__(self, make: MakeModel, consistency: Consistency, workers: Sequence[int]) -> None:
        self.make = make
        self.consistency = consistency
        self.model = make(consistency, workers)
        self.value = 0
        self.calls: dict[int, GetCall] = {}
        self.orphaned: list[int] = []
        """The adds that the last call applied because the last worker had left."""

    def happen(self, number: int, event: Event) -> tuple[Verdict, list[Released[Any, Any]], dict[int, int]]:
        """Make the call and return the verdict, the released moves, and the values read by number of the get."""
        values: dict[int, int] = {}
        released: list[Released[Any, Any]] = []
        verdict: Verdict = "now"
        try:
            match event.kind:
                case "add":
                    if self.model.add(event.worker, [number], event.observed):
                        self.value = after_add(self.value, number)
                    else:
                        verdict = "later"
                case "get":
                    self.calls[number] = GetCall(number)
                    if self.model.get(event.worker, self.calls[number], event.observed):
                        values[number] = self.value
                    else:
                        verdict = "later"
                case "clock":
                    released = self.model.clock(event.worker, event.observed)
                case "join":
                    self.model.join(event.worker)
                case "raise":
                    released = self.model.raise_worker(event.worker, event.to)
                case "leave":
                    released = self.model.leave(event.worker)
                case "forget":
                    self.model.forget(self.calls.get(event.to, GetCall(-1)))
                case "restore":
                    self._restore()
        except UnknownWorker:
            verdict = "unknown"
        except OutOfTurn:
            verdict = "out of turn"
        except ParameterServerError:
            verdict = "known"
        for move in released:
            for add in move.adds:
                self.value = after_add(self.value, add)
            self.value = after_move(self.value, move.clock)
            values |= {call.number: self.value for call in move.gets}
        self.orphaned = self.model.take_orphaned_adds() if event.kind == "leave" else []
        for add in self.orphaned:
            self.value = after_add(self.value, add)
        return verdict, released, values

    def _restore(self) -> None:
        """Continue with a new model that restores the encoded snapshot; waiting gets are not part of it."""
        plain = PlainData()
        state = plain.decode(plain.encode(self.model.state()))
        self.model = self.make(self.consistency, [99])
        self.model.get(99, GetCall(-1))
        self.model.restore(state)

    def pending_adds(self, worker: int | None = None) -> list[int]:
        return list(self.model.pending_adds(worker))


def difference(
    consistency: Consistency, workers: int, steps: Sequence[Step], make: MakeModel = ConsistencyModel
) -> str | None:
    """Return the first difference between model and brute force over these steps, or None if they agree."""
    everybody = range(workers)
    expected, run = BruteForce(consistency, everybody), Run(make, consistency, everybody)
    for step in steps:
        event = _event(step, expected)
        number = len(expected.history)
        if event.kind == "start":
            for what, given, wanted in _after_reset(run, expected, event):
                if given != wanted:
                    return f"{event}: {what}: given {given}, expected {wanted}"
            continue
        if event.kind == "leave":  # the caller fails the gets of the worker itself
            waiting = [n for n in expected.waiting_gets() if expected.history[n].worker == event.worker]
            for get in waiting:
                number += 1
                expected.happen(Event("forget", to=get))
                run.model.forget(run.calls[get])
        wanted_outcome = expected.happen(event)
        verdict, released, values = run.happen(number, event)
        for what, given, wanted in (
            ("verdict", verdict, wanted_outcome.verdict),
            ("moves", list(_plain(released)), [(m.clock, m.adds, m.gets) for m in wanted_outcome.moves]),
            ("adds orphaned", run.orphaned, wanted_outcome.orphaned),
            ("values read", list(values.items()), list(wanted_outcome.values.items())),
            *_state(run, expected),
        ):
            if given != wanted:
                return f"event {number}, {event}: {what}: given {given}, expected {wanted}"
    return None


def _event(step: Step, expected: BruteForce) -> Event:
    here = expected.min_clock()
    match step.kind:
        case "forget":
            waiting = expected.waiting_gets()
            return Event("forget", to=waiting[step.worker % len(waiting)] if waiting else 0)
        case "raise":
            return Event("raise", step.worker, to=here + max(step.ahead, 0))
        case "start":
            return Event("start", workers=tuple(range(step.worker + 1)))
    return Event(step.kind, step.worker, observed=here + step.ahead if step.ahead > 0 else step.ahead)


def _plain(released: Sequence[Released[Any, Any]]) -> Iterator[tuple[int, list[int], list[int]]]:
    for move in released:
        yield move.clock, move.adds, [call.number for call in move.gets]


def _after_reset(run: Run, expected: BruteForce, event: Event) -> Iterator[tuple[str, object, object]]:
    wanted_adds, wanted_gets = expected.pending_adds(), expected.waiting_gets()
    adds, gets = run.model.reset(event.workers)
    yield "adds given back", sorted(adds), sorted(wanted_adds)
    yield "gets given back", [call.number for call in gets], wanted_gets
    run.value = 0
    expected.happen(event)
    yield from _state(run, expected)


def _state(run: Run, expected: BruteForce) -> Iterator[tuple[str, object, object]]:
    tracker = run.model.tracker
    clocks = {w: clock for w in WORKERS if (clock := expected.progress(w)) is not None}
    yield "clocks", {w: tracker.get_progress(w) for w in sorted(tracker.workers)}, clocks
    here = expected.min_clock()
    yield "minimum clock", tracker.get_min_clock(), here
    yield (
        "unique minimum",
        [w for w in clocks if tracker.is_unique_min(w)],
        [w for w in clocks if clocks[w] == here and list(clocks.values()).count(here) == 1],
    )
    yield "gets that wait", run.model.waiting_gets, len(expected.waiting_gets())
    yield "adds that wait", sorted(run.pending_adds()), sorted(expected.pending_adds())
    for worker in clocks:
        yield f"adds of {worker}", sorted(run.pending_adds(worker)), sorted(expected.pending_adds(worker))
