"""Steps with a separate instance in each round of a bounded iteration."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from iteration.iteration_support import SMALL, Dawdle, cut_items, ended, run, run_shuffled, with_coroutines
from support.waiting import PATIENCE_S, until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    OperatorLifeCycle,
    OutputTag,
    Stream,
    connect,
    for_each_round,
    iterate_bounded_streams_until_termination,
    replayed,
)
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import JobFailed, RejectRecords
from streamiter.operators.source import Collected
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker

SUMS = OutputTag("sums")
SubBody = Callable[[list[Stream]], Sequence[Stream]]


class Lives(list[list[Any]]):
    """The calls of each instance, in the order in which the instances were opened."""


class OneLife(Operator, IterationListener):
    """Records its calls."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives

    def open(self, context: Any) -> Any:
        self.context = context
        self.life: list[Any] = ["open"]
        self._lives.append(self.life)

    def process(self, record: Any, out: Any) -> Any:
        self.life.append((record, self.context.epoch))
        out.emit(record)

    process_build = process_probe = process

    def input_ended(self, name: str, out: Any) -> Any:
        self.life.append(f"{name} ended")

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> Any:
        assert context.epoch == epoch_watermark
        self.life.append(("callback", epoch_watermark))

    def on_iteration_terminated(self, context: Any, out: Any) -> Any:
        self.life.append(("terminated", context.epoch, context.is_ending))

    def finish(self, out: Any) -> Any:
        self.life.append("finish")

    def close(self) -> Any:
        self.life.append("close")


def rounds_of(
    sub_body: SubBody,
    *,
    rounds: int = 3,
    data: Sequence[Any] = (),
    flow: Flow | None = None,
    parallelism: int = 1,
    **config: Any,
) -> tuple[Flow, list[Collected]]:
    """Send a token 0, 1, … through the rounds; ``sub_body`` receives the token and the replayed data in each round."""
    flow = flow or Flow("loop")

    def body(variables: list[Stream], entered: list[Stream]) -> IterationBodyResult:
        given = for_each_round([variables[0], *entered], sub_body)
        token = variables[0].map(lambda x: x + 1).filter(lambda x: x < rounds)
        return IterationBodyResult([token], given)

    streams = [replayed(cut_items(flow, items, parallelism=parallelism)) for items in data]
    outputs = iterate_bounded_streams_until_termination(
        [flow.from_items([0])], streams, body, IterationConfig(**config)
    )
    return flow, [output.collect() for output in outputs]


AsyncLife = with_coroutines(OneLife)


class ThreadLife(OneLife):
    """Handles its records in a thread."""

    runs_in_thread = True


@pytest.mark.parametrize(("kind", "seed"), [*((OneLife, seed) for seed in range(4)), (AsyncLife, 0), (ThreadLife, 0)])
def test_each_round_has_a_separate_instance_from_open_to_close(kind: type[OneLife], seed: int) -> None:
    """A count from the round before made every later round wrong; a call that began in one round ended in the next."""
    lives = Lives()
    flow, [seen] = rounds_of(lambda streams: [streams[0].process(lambda: kind(lives), name="step")])
    run(flow, seed=seed, limits=SMALL)
    assert lives == [
        ["open", (epoch, epoch), "input ended", ("callback", epoch), "finish", "close"] for epoch in range(3)
    ]
    assert seen.items == [0, 1, 2]


def test_the_instance_of_the_ending_epoch_receives_the_end_instead_of_a_callback() -> None:
    """A result of the last value, which is handled once more after the last callback, was lost."""
    lives = Lives()
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [seen] = for_each_round(variables, lambda streams: [streams[0].process(lambda: OneLife(lives))])
        criteria = seen.map(lambda x: x).filter(lambda x: x < 1)
        return IterationBodyResult([seen.map(lambda x: x + 1)], [seen], criteria)

    [output] = iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    collected = output.collect()
    run(flow, limits=SMALL)
    assert lives == [
        ["open", (0, 0), "input ended", ("callback", 0), "finish", "close"],
        ["open", (1, 1), "input ended", ("callback", 1), "finish", "close"],
        ["open", (2, 2), "input ended", ("terminated", 2, True), "finish", "close"],
    ]
    assert collected.items == [0, 1, 2]


@pytest.mark.parametrize("seed", range(6))
def test_epochs_beyond_the_end_have_separate_instances(seed: int) -> None:
    """Records ahead of the end were added to the sum of the ending epoch."""
    flow = Flow("loop")

    class Sum(OneLife):
        def open(self, context: Any) -> Any:
            super().open(context)
            self._sum = 0

        def process(self, record: Any, out: Any) -> Any:
            self._sum += record

        def finish(self, out: Any) -> Any:
            super().finish(out)
            out.emit((self.context.epoch, self._sum))

    lives = Lives()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [sums] = for_each_round(variables[:1], lambda streams: [streams[0].process(lambda: Sum(lives))])
        slow = variables[1].process(lambda: Dawdle(seed)).process(lambda: Dawdle(seed + 1))
        token = variables[0].map(lambda x: x + 1)
        return IterationBodyResult([token, slow.map(lambda x: x + 1)], [sums], slow.filter(lambda x: x < 1))

    config = IterationConfig(max_epochs_ahead=4)
    [sums] = iterate_bounded_streams_until_termination([flow.from_items([0]), flow.from_items([0])], [], body, config)
    collected = sums.collect()
    run(flow, seed=seed, limits=SMALL)
    assert collected.items == [(epoch, epoch) for epoch in range(len(lives))]
    assert len(lives) > 3
    assert [life[-3] for life in lives[:2]] == [("callback", 0), ("callback", 1)]
    for epoch, life in enumerate(lives[2:], start=2):
        assert life[-3:] == [("terminated", epoch, True), "finish", "close"]


def test_an_epoch_without_records_has_no_instance() -> None:
    """Listeners in a round received callbacks for epochs without records."""
    lives = Lives()

    def sub_body(streams: list[Stream]) -> list[Stream]:
        return [streams[0].filter(lambda x: x % 2 == 0).process(lambda: OneLife(lives))]

    flow, _ = rounds_of(sub_body, rounds=6)
    run(flow, limits=SMALL)
    assert [life[1] for life in lives] == [(0, 0), (2, 2), (4, 4)]
    assert [life[3] for life in lives] == [("callback", 0), ("callback", 2), ("callback", 4)]


def test_plain_data_arrives_in_epoch_0_only() -> None:
    """Plain data, which is read once, was expected in later rounds, too."""
    flow, lives = Flow("loop"), Lives()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        for_each_round(data, lambda streams: [streams[0].process(lambda: OneLife(lives))])
        return IterationBodyResult([variables[0].map(lambda x: x + 1).filter(lambda x: x < 3)], [])

    iterate_bounded_streams_until_termination([flow.from_items([0])], [flow.from_items([7, 8])], body)
    run(flow)
    assert lives == [["open", (7, 0), (8, 0), "input ended", ("callback", 0), "finish", "close"]]


@pytest.mark.parametrize("seed", range(3))
def test_a_count_of_replayed_data_ends_with_the_rest_of_the_ending_epoch(seed: int) -> None:
    """The step could not see that its round is the ending epoch, which has a variable but no replayed data."""

    class Count(Operator):
        def open(self, context: Any) -> Any:
            self._context, self._rows = context, 0

        def process_variable(self, record: int, out: Any) -> None:
            out.emit(record + 1)

        def process_data(self, record: int, out: Any) -> None:
            self._rows += 1

        def finish(self, out: Any) -> Any:
            out.emit((self._context.epoch, self._rows, self._context.is_ending), tag=SUMS)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        counted = connect(variable=variables[0], data=data[0]).process(Count, parallelism=1)
        return IterationBodyResult([counted], [counted.side_output(SUMS)], variables[0].filter(lambda x: x < 1))

    flow = Flow("loop")
    data = replayed(cut_items(flow, range(20), seed=seed, parallelism=2))
    config = IterationConfig(operator_life_cycle=OperatorLifeCycle.PER_ROUND)
    [counts] = iterate_bounded_streams_until_termination([flow.from_items([0])], [data], body, config)
    collected = counts.collect()
    run(flow, seed=seed, limits=SMALL)
    assert collected.items == [(0, 20, False), (1, 20, False), (2, 0, True)]


# -- operators for bounded input ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_reduce_sort_and_join_work_in_each_round(seed: int) -> None:
    """These steps emit at the end of their input, and had one result for all rounds, because a loop has one end."""

    def sub_body(streams: list[Stream]) -> list[Stream]:
        token, rows = streams
        return [
            rows.reduce_all(lambda a, b: a + b),
            rows.sort(lambda x: -x),
            rows.join(token, on=(lambda row: row % 3, lambda number: number)),
        ]

    flow, [sums, ordered, pairs] = rounds_of(sub_body, data=[range(7)], parallelism=2)
    run(flow, seed=seed, limits=SMALL)
    assert sums.items == 3 * [21]
    assert ordered.items == 3 * [6, 5, 4, 3, 2, 1, 0]
    expected = [(row, number) for number in range(3) for row in range(7) if row % 3 == number]
    assert sorted(pairs.items) == sorted(expected)


class HashJoin(OneLife):
    """Reads all of one input before the first record of the other input."""

    def open(self, context: Any) -> None:
        super().open(context)
        self._built = set[int]()
        self._is_built = False

    def wanted_inputs(self) -> tuple[str, ...] | None:
        return None if self._is_built else ("build",)

    def process_build(self, record: int, out: Any) -> None:
        assert not self._is_built
        self._built.add(record)

    def process_probe(self, record: int, out: Any) -> None:
        assert self._is_built, "a record came before all that it is to be compared with"
        if record in self._built:
            out.emit((self.context.epoch, record))

    def input_ended(self, name: str, out: Any) -> None:
        self._is_built |= name == "build"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limit", [1, 3, 20])
def test_a_hash_join_that_waits_for_the_end_of_one_input_never_holds_up_the_loop(seed: int, limit: int) -> None:
    """The other input filled its channel, so neither the data ended nor the epoch that the join waited for."""
    lives = Lives()

    def sub_body(streams: list[Stream]) -> list[Stream]:
        token, rows = streams
        slow = token.flat_map(lambda x: [x, x + 10]).process(lambda: Dawdle(seed)).broadcast()
        return [connect(build=slow, probe=rows).process(lambda: HashJoin(lives), parallelism=2)]

    flow, [found] = rounds_of(sub_body, data=[range(100)], parallelism=2)
    run(flow, seed=seed, limits=ChannelLimits(records=limit))
    assert sorted(found.items) == [(epoch, row) for epoch in range(3) for row in (epoch, epoch + 10)]


@pytest.mark.parametrize("seed", range(6))
def test_the_end_of_an_input_comes_before_records_that_wait_for_it(seed: int) -> None:
    """When the last record of an input and its end arrived together, records of the other input came between them."""
    lives = Lives()

    def sub_body(streams: list[Stream]) -> list[Stream]:
        token, rows = streams
        slow = rows.process(lambda: Dawdle(seed)).process(lambda: Dawdle(seed + 1))
        return [connect(build=token, probe=slow).process(lambda: HashJoin(lives), parallelism=1)]

    flow, [found] = rounds_of(sub_body, rounds=8, data=[range(8)])
    run(flow, seed=seed, limits=ChannelLimits(records=3))
    assert found.items == [(epoch, epoch) for epoch in range(8)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ahead", [4, None])
def test_records_beyond_the_end_arrive_in_the_wanted_order(seed: int, ahead: int | None) -> None:
    """Epochs after the end have no watermark: a join received their records in any order, without ends of inputs."""
    flow, lives = Flow("loop"), Lives()

    def join(streams: list[Stream]) -> list[Stream]:
        [token] = streams
        build = token.process(lambda: Dawdle(seed))
        return [connect(probe=token, build=build).process(lambda: HashJoin(lives), parallelism=1)]

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [found] = for_each_round(variables[:1], join)
        slow = variables[1]
        for number in range(4):
            slow = slow.process(lambda number=number: Dawdle(seed + number))  # type: ignore[misc]
        token = variables[0].map(lambda x: x + 1).filter(lambda x: x < 30)
        return IterationBodyResult([token, slow.map(lambda x: x + 1)], [found], slow.filter(lambda x: x < 2))

    config = IterationConfig(max_epochs_ahead=ahead)
    initial = [flow.from_items([0]), flow.from_items([0])]
    [found] = iterate_bounded_streams_until_termination(initial, [], body, config)
    collected = found.collect()
    run(flow, seed=seed, limits=SMALL)
    assert collected.items == [(epoch, epoch) for epoch in range(len(lives))]
    assert len(lives) > 4


@pytest.mark.parametrize("seed", range(6))
def test_both_inputs_of_a_join_may_come_from_one_stream(seed: int) -> None:
    """The end of the wanted input's epoch was queued after records of the other input, which the step did not read."""
    lives = Lives()

    def sub_body(streams: list[Stream]) -> list[Stream]:
        rows = streams[1]
        build = rows.filter(lambda x: x % 2 == 0)
        return [connect(build=build, probe=rows).process(lambda: HashJoin(lives), parallelism=1)]

    flow, [found] = rounds_of(sub_body, data=[range(60)])
    run(flow, seed=seed, limits=ChannelLimits(records=2))
    assert found.items == [(epoch, row) for epoch in range(3) for row in range(0, 60, 2)]


def test_a_waiting_probe_side_goes_to_disk_above_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that were read before their turn filled the memory."""
    import tempfile

    from streamiter.engine.graph.feedback import FeedbackLimits

    opened: list[str] = []
    make = tempfile.TemporaryFile

    def counted(*arguments: Any, **options: Any) -> Any:
        opened.append("file")
        return make(*arguments, **options)

    monkeypatch.setattr(tempfile, "TemporaryFile", counted)
    lives = Lives()

    def sub_body(streams: list[Stream]) -> list[Stream]:
        rows = streams[1]
        build = rows.filter(lambda x: x < 2)
        return [connect(build=build, probe=rows).process(lambda: HashJoin(lives), parallelism=1)]

    flow, [found] = rounds_of(sub_body, data=[range(3_000)], feedback_limits=FeedbackLimits(memory_bytes=1_000))
    run(flow, limits=ChannelLimits(records=10))
    assert opened
    assert found.items == [(epoch, row) for epoch in range(3) for row in range(2)]


# -- state, timers and dead letters ------------------------------------------------------------------------


@pytest.mark.parametrize("parallelism", [1, 3])
def test_keyed_state_is_empty_in_the_next_round(parallelism: int) -> None:
    """Counts of a key continued from the last round."""

    class CountKey(Operator):
        def open(self, context: Any) -> None:
            self._context = context

        def process(self, record: int, out: Any) -> None:
            state = self._context.state
            state["seen"] = state.get("seen", 0) + 1
            out.emit((self._context.epoch, self._context.key, state["seen"]))

    def sub_body(streams: list[Stream]) -> list[Stream]:
        return [streams[1].key_by(lambda x: x % 2).process(CountKey, parallelism=parallelism)]

    flow, [counts] = rounds_of(sub_body, data=[[0, 1, 2]])
    run(flow, limits=SMALL)
    assert sorted(counts.items) == [(epoch, key, seen) for epoch in range(3) for key, seen in ((0, 1), (0, 2), (1, 1))]


async def test_a_timer_of_a_round_fires_in_it_and_never_in_the_next() -> None:
    """A timer that outlived its operator called the operator of the next round."""
    clock, fired, lives = VirtualClock(), list[Any](), Lives()
    may_continue = asyncio.Event()

    class Alarm(OneLife):
        async def process(self, record: int, out: Any) -> None:
            self.context.set_timer(1.0, payload=("soon", record))
            self.context.set_timer(100.0, payload=("late", record))
            out.emit(record)

        def on_timer(self, payload: Any, out: Any) -> None:
            fired.append((payload, self.context.epoch))
            out.emit(("timer", payload[1]))

    class Hold(Operator):
        """Keeps the round open until its timer has fired."""

        async def process_batch(self, batch: Any, out: Any) -> None:
            await may_continue.wait()
            may_continue.clear()
            out.emit_batch(batch)

    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        held = variables[0].process(Hold)
        [seen] = for_each_round(
            [variables[0].union(held)], lambda streams: [streams[0].process(lambda: Alarm(lives), name="alarm")]
        )
        return IterationBodyResult([held.map(lambda x: x + 1).filter(lambda x: x < 2)], [seen])

    [output] = iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    collected = output.collect()
    job = await flow.start(clock=clock)
    for number in range(2):
        await until(lambda number=number: len(lives) == number + 1)  # type: ignore[misc]
        await clock.advance(1.5)
        await until(lambda number=number: len(fired) == number + 1)  # type: ignore[misc]
        may_continue.set()
    await ended(job)
    assert fired == [(("soon", 0), 0), (("soon", 1), 1)]
    assert collected.items == [0, ("timer", 0), 0, 1, ("timer", 1), 1]
    assert [life[-2:] for life in lives] == [["finish", "close"], ["finish", "close"]]


class Picky(Operator):
    """Rejects zeros, and has no state."""

    def process_batch(self, batch: Any, out: Any) -> None:
        bad = [index for index, record in enumerate(batch) if record == 0]
        if bad:
            raise RejectRecords(bad, "zero")
        out.emit_batch(batch)


@pytest.mark.parametrize("seed", range(3))
def test_rejected_records_go_to_the_dead_letters_in_every_round(seed: int) -> None:
    """Rejected records, which leave the loop from inside the part and not by its outputs, were lost."""
    flow, dead = Flow("loop"), MemoryBroker().topic("dead")

    def sub_body(streams: list[Stream]) -> list[Stream]:
        halves = streams[1].map(lambda x: 6 // x, name="halve", dead_letter=dead)
        picky = streams[1].process(Picky, name="picky", dead_letter=dead)
        return [halves.reduce_all(lambda a, b: a + b), picky]

    async def main() -> None:
        await dead.create(partitions=1)
        _, [sums, passed] = rounds_of(sub_body, data=[[1, 0, 2]], flow=flow)
        statistics = await ended(await flow.start(channel_limits=SMALL))
        assert sums.items == [9, 9, 9]
        assert sorted(passed.items) == [1, 1, 1, 2, 2, 2]
        assert statistics.step("halve").rejected == statistics.step("picky").rejected == 3
        [(_, end)] = (await dead.describe()).offsets.values()
        assert end == 6

    run_shuffled(main(), seed)


def test_a_part_may_return_its_arguments() -> None:
    """A part that returns its arguments, and so has no steps, was refused."""
    flow, [token, rows] = rounds_of(lambda streams: list(streams), data=[[7]])
    run(flow)
    assert (token.items, rows.items) == ([0, 1, 2], [7, 7, 7])


# -- failures and the end of the job -----------------------------------------------------------------------

PLACES = ["open", "process", "input_ended", "on_epoch_watermark_incremented", "finish", "close"]


class Failing(OneLife):
    """Fails in one of its methods in the second round."""

    def __init__(self, lives: Lives, place: str) -> None:
        super().__init__(lives)
        for name in PLACES:
            setattr(self, name, self._watched(name, getattr(self, name), fails=name == place))

    def _watched(self, name: str, method: Callable[..., Any], *, fails: bool) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            result = method(*arguments)
            if fails and len(self._lives) == 2:
                raise ValueError(f"cannot {name}")
            return result

        return watched


@pytest.mark.parametrize("place", PLACES)
def test_a_failure_in_a_round_names_the_step_and_closes_it_once(place: str) -> None:
    """An operator of a round is closed only by its round: after an error, a file that it held stayed open."""
    lives = Lives()
    flow, _ = rounds_of(lambda streams: [streams[0].process(lambda: Failing(lives, place), name="step")])
    with pytest.raises(JobFailed, match=rf"^flow 'loop', step 'step' \(test_for_each_round.py:\d+\).*cannot {place}"):
        run(flow)
    assert [life.count("close") for life in lives] == [1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_an_aborted_job_closes_the_operator_of_the_round_once_and_to_its_end(seed: int) -> None:
    """An operator whose job was aborted during its ``close`` was left half closed."""
    closed: list[str] = []
    lives = Lives()

    class SlowToClose(OneLife):
        async def close(self) -> None:
            closed.append("begun")
            for _ in range(5):
                await asyncio.sleep(0)
            closed.append("done")

    async def main() -> None:
        flow, _ = rounds_of(lambda streams: [streams[0].process(lambda: SlowToClose(lives))], rounds=1_000_000)
        job = await flow.start(channel_limits=SMALL)
        await until(lambda: len(lives) == 3 + seed)
        for _ in range(seed):
            await asyncio.sleep(0)
        await asyncio.wait_for(job.stop("abort"), PATIENCE_S)

    run_shuffled(main(), seed)
    assert closed == ["begun", "done"] * len(lives)
