"""Random calls of workers and clients, compared with a model that computes each answer from the complete history."""

import asyncio
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parameter_server.consistency.brute_force import KINDS, BruteForce, Event, Kind, Verdict, after_add, after_move
from parameter_server.consistency.client_run import CLIENT_STEPS, ClientRun, ClientStep, Stir, play, random_client_steps
from support.examples import random_examples

from streamiter.errors import OutOfTurn, ParameterServerError, UnknownWorker
from streamiter.parameter_server import consistency
from streamiter.parameter_server.consistency import (
    ASP,
    BSP,
    SSP,
    Consistency,
    ConsistencyModel,
    PendingAdds,
    ProgressTracker,
    Released,
)
from streamiter.parameter_server.matrix_shard import MatrixShard
from streamiter.parameter_server.server import ParameterServer
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
    yield "minimum clock", tracker.get_min_clock(), expected.min_clock()
    yield "gets that wait", run.model.waiting_gets, len(expected.waiting_gets())
    yield "adds that wait", sorted(run.pending_adds()), sorted(expected.pending_adds())
    for worker in clocks:
        yield f"adds of {worker}", sorted(run.pending_adds(worker)), sorted(expected.pending_adds(worker))


class Bug(NamedTuple):
    """A change in the code of a method or function, under a consistency that it breaks."""

    name: str
    consistency: Consistency
    method: Callable[..., Any]
    right: str
    wrong: str

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the method by one with this bug."""
        source = textwrap.dedent(inspect.getsource(self.method))
        assert source.count(self.right) == 1, f"{self.name}: the code has changed"
        module, made = sys.modules[self.method.__module__], dict[str, Any]()
        exec(source.replace(self.right, self.wrong), vars(module), made)
        owner, _, name = self.method.__qualname__.rpartition(".")
        patch.setattr(getattr(module, owner) if owner else module, name, made[name])


MODEL, TRACKER = ConsistencyModel, ProgressTracker

MINIMUM = "self.tracker.get_min_clock()"
OBSERVED = f"max({MINIMUM}, observed)"
LEAVES = "self._released(before, self.tracker.leave(worker))"
JOINS = "self._progress[worker] = "
SORTED, AHEAD = "by_worker.items()", "max(self._progress.values(), default=self._min_clock)"
RAISED, RELEASED = "self.tracker.raise_to(worker, clock))", "self._release(released)"
STATE, OF_ADDS = "self._declared_state()", "{'by clock'} & set(self._declared_state())"
STALENESS = "self._staleness"
BEFORE = "before = self.tracker.get_min_clock()"
CLOCKS = "self._released(before, self.tracker.advance_and_get_changed_min_clock(worker))"
TURN_TO_CLOCK = 'self._check_turn(worker, observed, "a clock", ahead=0)'

PLANTED = (
    Bug("gets wait at the bound of staleness", SSP(1), MODEL.get, STALENESS, f"{STALENESS} + 1"),
    Bug("gets go one past the bound of staleness", SSP(1), MODEL.get, STALENESS, f"{STALENESS} - 1"),
    Bug("gets are parked under the worker's own clock", SSP(1), MODEL.get, "] = wanted", "] = wanted + 1"),
    Bug("a clock of another shard ends the wait here", SSP(0), MODEL.get, MINIMUM, OBSERVED),
    Bug(
        "gets are answered before the adds",
        BSP(),
        MODEL._released,
        "Released(clock, self._adds.take(clock - 1), self._take_gets(clock))\n"
        "        for clock in range(before + 1, moved_to + 1)",
        "Released(clock, *parts)\n"
        "        for clock in range(before + 1, moved_to + 1)\n"
        "        for parts in (([], self._take_gets(clock)), (self._adds.take(clock - 1), []))",
    ),
    Bug("a worker that leaves releases no get", BSP(), MODEL.leave, LEAVES, f"{LEAVES}[:0]"),
    Bug("a worker that leaves releases no get", SSP(0), MODEL.leave, LEAVES, f"{LEAVES}[:0]"),
    Bug("a worker that leaves releases its last clock only", SSP(2), MODEL.leave, LEAVES, f"{LEAVES}[-1:]"),
    Bug(
        "a worker that leaves takes its adds with it",
        BSP(),
        MODEL.leave,
        f"return {LEAVES}",
        f"[adds.pop(worker, None) for adds in self._adds._by_clock.values()]\n    return {LEAVES}",
    ),
    Bug("a worker that leaves holds the others back", ASP(), TRACKER.leave, "self._uncount_at(", "("),
    Bug("gets are answered last come first", BSP(), MODEL._take_gets, "return taken", "return taken[::-1]"),
    Bug("gets are answered last come first", SSP(0), MODEL._take_gets, "return taken", "return taken[::-1]"),
    Bug("adds are applied in order of arrival", BSP(), consistency._in_order, f"sorted({SORTED})", SORTED),
    Bug("workers join at the start", ASP(), TRACKER.join, f"{JOINS}clock", f"{JOINS}self._min_clock = clock = 0"),
    Bug("workers join ahead of the minimum", SSP(3), TRACKER.join, "self._min_clock if at is None else at", AHEAD),
    Bug("a raised worker releases no get", BSP(), MODEL.raise_worker, RAISED, f"{RAISED}[:0]"),
    Bug(
        "a call out of turn is dropped in silence",
        BSP(),
        MODEL.add,
        'self._check_turn(worker, observed, "an add", ahead=0)',
        f"self.tracker.get_progress(worker)\n    if clock > {OBSERVED}: return False",
    ),
    Bug(
        "a clock counts even if it is refused",
        BSP(),
        MODEL.clock,
        f"{TURN_TO_CLOCK}\n    {BEFORE}\n    return {CLOCKS}",
        f"{BEFORE}\n        moves = {CLOCKS}\n        {TURN_TO_CLOCK.replace('0', '1')}\n        return moves",
    ),
    Bug("a clock of another shard is ignored", BSP(), MODEL._check_turn, OBSERVED, MINIMUM),
    Bug("early adds go with the next release", BSP(), MODEL.add, "keep(clock", f"keep({MINIMUM}"),
    Bug("early gets are answered at once", BSP(), MODEL.get, MINIMUM, OBSERVED),
    Bug("gets are never forgotten", SSP(1), MODEL.forget, "self._gets.pop(id(request), None)", "pass"),
    Bug("a reset loses the gets", SSP(0), MODEL.reset, "self._adds.clear(), waiting", "self._adds.clear(), []"),
    Bug("a snapshot has no pending adds", BSP(), PendingAdds.state, STATE, f"{STATE} | dict.fromkeys({OF_ADDS}, ())"),
    Bug(
        "every clock of a slowest worker moves the minimum",
        ASP(),
        TRACKER.advance_and_get_changed_min_clock,
        "return self._moved_min_clock()",
        "if clock > self._min_clock:\n        return -1\n    self._min_clock += 1\n    return self._min_clock",
    ),
    Bug("any worker may add", ASP(), TRACKER.check_worker_valid, "worker not in self._progress", "False"),
    Bug("any worker may add", SSP(0), TRACKER.check_worker_valid, "worker not in self._progress", "False"),
)

PLANTED_IN_THE_SHARD = (
    Bug(
        "the shard answers before it adds",
        BSP(),
        MatrixShard._release,
        "move in released",
        "move in [of for move in released for of in (replace(move, adds=[]), replace(move, gets=[]))]",
    ),
    Bug("the shard forgets to finish the iteration", ASP(), MatrixShard._release, "and self._clock_parts", "and False"),
    Bug("the shard releases no get at a leave", BSP(), MatrixShard._remove_worker, RELEASED, "pass"),
    Bug("the shard releases no get at a leave", SSP(0), MatrixShard._remove_worker, RELEASED, "pass"),
    Bug("the gets of a worker that has left hang", SSP(0), MatrixShard.leave, "self.fail_gets(worker, error)", "pass"),
    Bug("gets hang across a reset", BSP(), MatrixShard.fail_waiting, "one.fail(error)", "pass"),
    Bug(
        "the shard ignores calls out of turn",
        BSP(),
        MatrixShard.add,
        "self._buffer(request)",
        "with contextlib.suppress(OutOfTurn):\n            self._buffer(request)",
    ),
    Bug(
        "buffered adds are applied at once",
        BSP(),
        MatrixShard.add,
        "self._buffer(request)",
        "self._check_worker(request.worker) or self._apply_parts(request.parts)",
    ),
)


Calls = tuple[Consistency, int, list[Step]]


def calls(random: Random) -> Calls:
    """Return a short sequence of calls; the brute force takes time with the square of its length."""
    steps = [
        Step(
            random.choice(RARE) if random.random() < 0.05 else random.choice(STEPS),
            random.choice((0, 1, 0, 1, 2, 3, 4)),
            random.choice((-1, 0, 1, 2)),
        )
        for _ in range(random.randrange(11))
    ]
    return random.choice(KINDS), random.randint(1, 4), steps


@random_examples(calls)
def test_any_sequence_of_calls_follows_the_table(example: Calls) -> None:
    """A model gave a wrong verdict, released calls in a wrong order or read wrong values for a rare sequence.

    A worker that joined late was out of turn, or the others did not wait for it. The sum of an iteration lacked the
    adds of a worker that had left before its end; the last gradients of a training were lost when its last worker left;
    the shard with these adds ended the iteration, and the other shards did not. A get for a clock that the minimum
    skipped waited forever. A shard that received a clock late refused a call in turn, or put its add into the iteration
    before. Adds of two iterations were summed up together. A restored shard lost the adds that waited. A cancelled get
    was answered.
    """
    assert difference(*example) is None


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
def test_long_runs_follow_the_table(consistency: Consistency) -> None:
    """Bugs that need workers far apart, or many joins and leaves, did not occur in short random sequences."""
    for seed in range(8):
        workers = 1 + seed % 4
        assert difference(consistency, workers, random_steps(Random(seed), workers)) is None, f"seed {seed}"


BLOCKS = [None, (1, 3), (2, 2), (2, 7)]

steps = st.lists(st.builds(ClientStep, st.sampled_from(CLIENT_STEPS), st.integers(0, 3)), max_size=40)


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from(BLOCKS), st.booleans(), steps)
def test_any_sequence_of_calls_by_clients_follows_the_table(
    consistency: Consistency,
    workers: int,
    shards: int,
    block: tuple[int, int] | None,
    read_my_writes: bool,
    steps: list[ClientStep],
) -> None:
    """With some ways to cut the matrix into blocks, a call waited too long, returned too early or read wrong values."""
    asyncio.run(play(ClientRun(consistency, workers, shards, block, read_my_writes=read_my_writes), steps))


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
def test_long_runs_of_clients_follow_the_table(consistency: Consistency) -> None:
    """Bugs that need workers far apart, or restores while calls wait, did not occur in short random sequences."""
    for seed in range(6):
        run = ClientRun(consistency, 3, 1 + seed % 3, BLOCKS[seed // 2], read_my_writes=seed % 2 == 1)
        asyncio.run(play(run, random_client_steps(Random(seed), 3)))


@pytest.mark.parametrize("restores", [False, True], ids=["leaves", "is left out of a restore"])
def test_all_shards_agree_when_the_last_worker_leaves_with_adds_on_one_of_them(restores: bool) -> None:
    """The shard with the adds ended an iteration, and ran its on_clock; the others did not: minimum clocks [1, 0]."""

    async def main() -> None:
        async with ParameterServer(shards=2) as server, ParameterServer(shards=2) as other:
            for each in (server, other):
                await each.create_matrix("w", rows=1, columns=2, consistency=BSP(), block=(1, 1), on_clock=Stir("w"))
            client = server.client(worker=0)
            await client.add("w", row=0, columns=[0], values=5.0)
            if restores:
                await other.restore(await server.snapshot())
            else:
                await client.leave()
            left = other if restores else server
            assert [shard.matrices[0].minimum_clock for shard in left.statistics().shards] == [0, 0]
            later = left.client(worker=1)
            assert (await later.get("w", row=0)).tolist() == [5.0, 0.0]
            assert await later.clock("w") == 1
            assert (await later.get("w", row=0)).tolist() == [5 * 37 + 1, 1]

    asyncio.run(main())


# ---- what the model does not tell: the order of a worker's own adds, restored clocks, clocks that are held


def model_at(consistency: Consistency, clocks: dict[int, int]) -> ConsistencyModel[str, Any]:
    """Return a model whose workers have finished this many iterations."""
    model: ConsistencyModel[str, Any] = ConsistencyModel(consistency, clocks, name="matrix 'w'")
    for worker, clock in clocks.items():
        model.tracker.raise_to(worker, clock)
    return model


def test_bsp_returns_the_adds_of_a_worker_in_order_of_its_clocks() -> None:
    """A worker's own adds were summed in another order than they were later applied in, so the last digits differed."""
    model = model_at(BSP(), {0: 1, 1: 0, 2: 0})
    model.add(0, ["of another worker, a clock ahead"], 1)
    model.add(1, ["of clock 0"])
    model.clock(1)
    model.add(1, ["of clock 1"], 1)
    assert list(model.pending_adds(1)) == ["of clock 0", "of clock 1"]


def test_bsp_applies_adds_of_an_already_passed_clock_with_the_next_move() -> None:
    """A shard that restored the clocks of another shard lost adds of a clock that its minimum had passed."""
    model = model_at(BSP(), {})
    model.restore(
        {
            "tracker": {"progress": {1: 5}, "min clock": 5, "highest": 5},
            "adds": {"by clock": [(3, 0, ["late"]), (5, 1, ["a"])]},
        }
    )
    assert model.clock(1) == [Released(6, ["late", "a"], [])]


@pytest.mark.parametrize("held_clocks", range(5))
@pytest.mark.parametrize("clock", range(4))
def test_clocks_that_a_checkpoint_holds_back_count_for_the_staleness_of_a_get(clock: int, held_clocks: int) -> None:
    """A worker after its barrier read ahead of the others by more than the staleness bound."""
    model = model_at(SSP(2), {0: clock, 1: 1})
    is_within_bound = clock + held_clocks <= min(clock, 1) + 2
    assert model.get(0, "g", held_clocks=held_clocks) is is_within_bound


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: f"{bug.name}, {bug.consistency}")
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison passed a broken model, so its result for the real models proved nothing."""
    bug.plant(monkeypatch)
    assert any(_differs(bug.consistency, seed) for seed in range(100))


@pytest.mark.parametrize("bug", PLANTED_IN_THE_SHARD, ids=lambda bug: f"{bug.name}, {bug.consistency}")
def test_a_bug_planted_in_the_shard_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison passed a broken shard, so its result for the real shards proved nothing."""
    bug.plant(monkeypatch)
    assert any(_fails(bug.consistency, seed) for seed in range(20))


def _differs(consistency: Consistency, seed: int) -> bool:
    return difference(consistency, 3, random_steps(Random(seed), 3)) is not None


def _fails(consistency: Consistency, seed: int) -> bool:
    run = ClientRun(consistency, 3, 1 + seed % 2, None, read_my_writes=False)
    try:
        asyncio.run(play(run, random_client_steps(Random(seed), 3)))
    except (AssertionError, asyncio.InvalidStateError):  # a call that should have ended has not
        return True
    return False
