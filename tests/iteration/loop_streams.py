"""Cases of loops with all kinds of streams, and sums of rounds with results known from the reference."""

import asyncio
from collections.abc import Callable
from typing import Any

from iteration.iteration_support import CutItems, Dawdle, tagged
from iteration.loop_cases import (
    ANY,
    CRITERIA,
    INSTANCES,
    NUMBERS,
    OUTPUT,
    SUM,
    TOTAL,
    Check,
    case,
    check_listeners,
    lowered,
    records,
)
from iteration.loop_ways import Loop

from streamiter import (
    IterationBodyResult,
    IterationListener,
    Operator,
    OperatorLifeCycle,
    Stream,
    connect,
    epochs_every,
    for_each_round,
    replayed,
)

# -- all kinds of streams ----------------------------------------------------------------------------------


@case()
def several_variables_of_different_parallelism_are_aligned_together(loop: Loop) -> Check:
    """One variable without feedback delayed the others, or ended the loop."""
    starts = [[5, 1], [0, 2, 2], list[int]()]

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        steps = [loop.witness(stream, f"step {n}", on_record=lowered) for n, stream in enumerate(variables)]
        return IterationBodyResult(steps, [tagged(stream) for stream in variables])

    initial = [loop.items(items, parallelism) for items, parallelism in zip(starts, (2, 3, 1), strict=True)]
    outputs = loop.collect(initial, [], body)

    def check() -> None:
        for items, seen in zip(starts, outputs, strict=True):
            assert sorted(seen.items) == sorted((k - epoch, epoch) for k in items for epoch in range(k + 1))
        assert len(loop.log) == 6
        check_listeners(loop.log, epochs=6)

    return check


@case(*ANY)
def feedback_may_be_a_union_and_repartitioned(loop: Loop) -> Check:
    """A head did not align the channels of all steps that fed back to it, or records were lost on one of them."""
    starts = [(number, 1 + number % 5) for number in range(100)]

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        stepped = variables[0].rebalance().map(lambda x: (x[0], x[1] - 1), parallelism=3).filter(lambda x: x[1] > 0)
        even = stepped.filter(lambda x: x[0] % 2 == 0).process(lambda: Dawdle(loop.seed)).partition_by(lambda x: x[1])
        odd = stepped.filter(lambda x: x[0] % 2 == 1).key_by(lambda x: x[0]).process(Pass, parallelism=1)
        return IterationBodyResult([even.union(odd.rebalance())], [tagged(stepped)])

    [seen] = loop.collect([loop.items(starts, parallelism=2)], [], body)

    def check() -> None:
        expected = [((number, left), start - 1 - left) for number, start in starts for left in range(1, start)]
        assert sorted(seen.items) == sorted(expected)

    return check


class Pass(Operator):
    """Passes each record on."""

    def process(self, record: Any, out: Any) -> None:
        out.emit(record)


@case(*ANY)
def empty_inputs_everywhere(loop: Loop) -> Check:
    """A loop with empty inputs did not end, or an instance received more than one callback."""
    is_bounded = loop.ahead != "unbounded"

    def looped(parallelism: int) -> Any:
        def nothing() -> Stream:
            return loop.flow.from_items([], parallelism=parallelism)

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            step = loop.witness(connect(variable=variables[0], left=data[0], right=data[1]), f"step {parallelism}")
            return IterationBodyResult([step], [step], step.filter(lambda x: True) if is_bounded else None)

        return loop.collect([nothing()], [nothing(), replayed(nothing()) if is_bounded else nothing()], body)[0]

    outputs = [looped(1), looped(3)]

    def check() -> None:
        assert [seen.items for seen in outputs] == [[], []]
        assert len(loop.log) == 4
        check_listeners(loop.log, epochs=1)
        assert {entries[0] for entries in loop.log.values()} <= {("input ended", "left"), ("input ended", "right")}

    return check


@case(0)
def a_body_may_return_its_arguments_and_a_dict(loop: Loop) -> Check:
    """Arguments of the body were refused as feedback or output."""
    outputs = loop.iterate(
        [loop.flow.from_items([])],
        [loop.flow.from_items([1, 2]), replayed(loop.flow.from_items([3]))],
        lambda variables, data: IterationBodyResult(variables, {"plain": data[0], "again": data[1]}, data[0]),
    )
    seen = {name: stream.collect() for name, stream in outputs.items()}

    def check() -> None:
        assert {name: collected.items for name, collected in seen.items()} == {"plain": [1, 2], "again": [3]}

    return check


@case(0, "unbounded")
def outputs_are_read_downstream_and_by_a_following_iteration(loop: Loop) -> Check:
    """Outputs kept the epochs of the first iteration, or ended before it."""

    def first(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[dict[str, Stream]]:
        stepped = variables[0].map(lambda x: x + 1)
        return IterationBodyResult([stepped.filter(lambda x: x < 4)], {"numbers": stepped})

    def second(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        halved = loop.witness(variables[0], "second").map(lambda x: x // 2)
        return IterationBodyResult([halved.filter(lambda x: x > 0)], [tagged(variables[0]), tagged(data[0])])

    numbers = loop.iterate([loop.flow.from_items([0])], [], first, is_unbounded=False)["numbers"]
    assert numbers.is_bounded
    total = numbers.map(lambda x: x * 10).reduce_all(lambda a, b: a + b).collect()
    outside = tagged(numbers).collect()
    mixed = numbers.map(str).union(loop.flow.from_items(["other"]))
    seen, seen_data = loop.collect([numbers], [mixed], second)

    def check() -> None:
        assert total.items == [100]
        assert outside.items == [(number, None) for number in (1, 2, 3, 4)]
        assert sorted(seen.items) == sorted([(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (1, 1), (2, 1), (1, 2)])
        assert sorted(seen_data.items) == [("1", 0), ("2", 0), ("3", 0), ("4", 0), ("other", 0)]
        check_listeners(loop.log, epochs=3)

    return check


@case(*ANY)
def what_a_step_emits_in_a_call_has_the_epoch_of_the_call(loop: Loop) -> Check:
    """Records of a call, on a side output, behind an exchange, or by a coroutine or a thread, had the next epoch."""

    def emit(out: Any, *what: Any) -> None:
        out.emit(what)
        out.emit(what, tag=OUTPUT)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        step = loop.witness(
            variables[0],
            "step",
            on_record=lambda x, context, out: emit(out, "record", x),
            on_callback=lambda epoch, context, out: emit(out, "callback", epoch),
            on_terminated=lambda context, out: emit(out, "terminated", context.epoch),
            on_finish=lambda out: emit(out, "finish", 3),
        )
        numbers = step.filter(lambda x: x[0] == "record").map(lambda x: x[1] + 1).filter(lambda x: x < 3)
        return IterationBodyResult(
            [numbers], [tagged(step), tagged(step.side_output(OUTPUT).rebalance(), parallelism=2)]
        )

    outputs = loop.collect([loop.flow.from_items([0])], [], body)

    def check() -> None:
        expected = [((what, epoch), epoch) for epoch in range(3) for what in ("record", "callback")]
        for seen in outputs:
            assert sorted(seen.items) == sorted([*expected, (("terminated", 3), 3), (("finish", 3), 3)])
        check_listeners(loop.log, epochs=3)

    return check


@case("unbounded")
def each_batch_has_its_own_epoch_also_where_inputs_meet(loop: Loop) -> Check:
    """Records of several epochs that waited in one channel were joined to one batch."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        raised = variables[0].map(lambda x: (x[0], x[1] + 1))
        both = loop.witness(connect(left=raised, right=data[0].map(lambda x: (x, 0))), "both")
        return IterationBodyResult([raised.filter(lambda x: x[1] < 7)], [both])

    loop.collect([loop.items([(number, 0) for number in range(5)])], [loop.items(range(100, 140))], body)

    def check() -> None:
        rounds = [((number, times), times - 1) for number in range(5) for times in range(1, 8)]
        given = [(tuple(record), epoch) for record, epoch in records(loop.log["both", 0])]
        assert sorted(given) == sorted([*rounds, *(((number, 0), 0) for number in range(100, 140))])

    return check


@case(None, 0, 1)
def stamped_data_and_its_feedback_make_all_their_rounds(loop: Loop) -> Check:
    """Steps that ended while the barrier was in transit were restored as open, and their consumers waited forever.

    Through a topic, a restored job lost the snapshot's feedback, or read feedback from after the snapshot.
    """
    items, initial = [(n, n % 4) for n in range(9)], [(100 + n, n % 3) for n in range(5)]

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        every = variables[0].rebalance().union(data[0].rebalance())
        slow = every.rebalance().process(lambda: Dawdle(loop.seed), name="slow", parallelism=2)
        back = slow.filter(lambda x: x[1] > 0).map(lambda x: (x[0], x[1] - 1))
        return IterationBodyResult([back.rebalance()], [slow])

    data = epochs_every(loop.items(items, parallelism=2), records=2)
    [seen] = loop.collect([loop.items(initial, parallelism=2)], [data], body, is_unbounded=True)

    def check() -> None:
        assert sorted(seen.items) == sorted((n, left) for n, times in [*items, *initial] for left in range(times + 1))

    return check


@case("unbounded")
def data_on_a_side_output_stays_in_order(loop: Loop) -> Check:
    """A loop without variables did not end, or its side output came in another order."""

    class ToSide(Operator):
        def process(self, record: int, out: Any) -> None:
            out.emit(record, tag=OUTPUT)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult(variables, [data[0].process(ToSide).side_output(OUTPUT)])

    [outputs] = loop.iterate([loop.flow.from_items([])], [loop.flow.from_items([1, 2, 3])], body)
    seen = outputs.process(lambda: Dawdle(loop.seed)).collect()

    def check() -> None:
        assert seen.items == [1, 2, 3]

    return check


# -- sums of rounds, with results known from the reference implementation ----------------------------------


class Numbers(CutItems):
    """Gives 0..n−1 in each parallel instance, and then ends or waits forever."""

    def open(self, context: Any, positions: Any) -> None:
        super().open(context, positions)
        self._items = range(NUMBERS)
        self._random.seed(self._seed * 1_000 + context.subtask_index)


def sequence(loop: Loop, *, ends: bool = True) -> Stream:
    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    def make() -> Numbers:
        return Numbers([], loop.seed, at_end=None if ends else never)

    make.bounded = ends  # type: ignore[attr-defined]
    return loop.flow.from_source(make, parallelism=INSTANCES)


def nothing(loop: Loop) -> Stream:
    return loop.flow.from_items([], parallelism=INSTANCES)


class Count(Operator):
    """Counts the records of each key, and passes them on."""

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, value: int, out: Any) -> None:
        self._context.state["seen"] = self._context.state.get("seen", 0) + 1
        out.emit(value)


def feedback_path(stream: Stream) -> Stream:
    """Send the stream by value % 4 through a map and a keyed counter."""
    spread = stream.partition_by(lambda value: value % INSTANCES).map(lambda value: value, parallelism=INSTANCES)
    return spread.key_by(lambda value: value).process(Count, parallelism=INSTANCES)


class Reduce(Operator, IterationListener):
    """Emits the sum of the records of each round, and feeds the records of the rounds before the last back.

    A synchronous one does so in the callback, with the sum of the round; an asynchronous one at once, with each sum so
    far.
    """

    def __init__(self, max_round: int, *, synchronous: bool, rounds: int | None = None) -> None:
        self._max_round = max_round
        self._synchronous = synchronous
        self._rounds = rounds
        self._sums: dict[int, int] = {}
        self._cache: list[int] = []

    def open(self, context: Any) -> None:
        self._context = context

    def process_variable(self, value: int, out: Any) -> None:
        epoch = self._context.epoch
        self._sums[epoch] = self._sums.get(epoch, 0) + value
        if not self._synchronous:
            out.emit((epoch, self._sums[epoch]), tag=OUTPUT)
        if epoch < self._max_round:
            if self._synchronous:
                self._cache.append(value)
            else:
                out.emit(value)

    process_data = process_variable

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        if self._synchronous:
            out.emit((epoch_watermark, self._sums.get(epoch_watermark, 0)), tag=OUTPUT)
            out.emit_batch(self._cache)
            self._cache = []
        if self._rounds is not None and epoch_watermark + 1 < self._rounds:
            out.emit("goes on", tag=CRITERIA)

    def on_iteration_terminated(self, context: Any, out: Any) -> None:
        out.emit("terminated", tag=OUTPUT)

    def snapshot(self) -> Any:
        return {"sums": list(self._sums.items()), "cache": list(self._cache)}

    def restore(self, state: Any) -> None:
        self._sums, self._cache = dict(state["sums"]), list(state["cache"])


class SumOfRound(Operator, IterationListener):
    """Emits the sum of the data of one round; the variable, the number of the round, is fed back plus one."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._sum = 0
        self._number: int | None = None

    def process_variable(self, number: int, out: Any) -> None:
        self._number = number
        if number + 1 < self._rounds:
            out.emit(number + 1)

    def process_data(self, value: int, out: Any) -> None:
        self._sum += value

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        assert self._number == epoch_watermark
        out.emit((epoch_watermark, self._sum), tag=OUTPUT)

    def snapshot(self) -> Any:
        return [self._sum, self._number]

    def restore(self, state: Any) -> None:
        self._sum, self._number = state


def reducing(
    max_round: int,
    *,
    synchronous: bool = False,
    rounds: int | None = None,
    through: Callable[[Stream], Stream] = lambda stream: stream,
) -> Any:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        reduced = connect(variable=through(variables[0]), data=data[0]).process(
            lambda: Reduce(max_round, synchronous=synchronous, rounds=rounds), parallelism=1
        )
        criteria = None if rounds is None else reduced.side_output(CRITERIA)
        return IterationBodyResult([feedback_path(reduced)], [reduced.side_output(OUTPUT)], criteria)

    return body


def summing(rounds: int, given: list[Stream]) -> list[Stream]:
    """Sum data in new operators of each round; return the feedback and the sums."""
    rows = given[1].map(lambda value: value)
    summed = connect(variable=given[0], data=rows).process(lambda: SumOfRound(rounds), parallelism=1)
    return [summed, summed.side_output(OUTPUT)]


def each_round(rounds: int) -> list[Any]:
    return [(epoch, SUM) for epoch in range(rounds)]


def check_sums_so_far(outputs: list[Any], rounds: int) -> None:
    """Check each sum so far of asynchronous rounds, of which each record is in one."""
    assert outputs[-1] == "terminated"
    assert len(outputs) == rounds * TOTAL + 1
    assert sorted(dict(outputs[:-1]).items()) == each_round(rounds)
    assert [sum(entry[0] == epoch for entry in outputs[:-1]) for epoch in range(rounds)] == [TOTAL] * rounds


@case("unbounded", turns=3_000)
def variables_that_end_are_summed_in_two_rounds(loop: Loop) -> Check:
    """A record was counted twice in a round, or the loop ended with records in it."""
    [plain] = loop.collect([sequence(loop)], [nothing(loop)], reducing(1))
    [copied] = loop.collect([sequence(loop)], [nothing(loop)], reducing(1, through=lambda stream: stream.broadcast()))

    def check() -> None:
        check_sums_so_far(plain.items, 2)
        check_sums_so_far(copied.items, 2)

    return check


@case("unbounded", 0, 2, None, turns=3_000)
def data_is_summed_in_each_round_asynchronously(loop: Loop) -> Check:
    """Records that overtook records of earlier rounds were counted in another round; without initial variables,
    the loop did not end at the end of its data.
    """
    [outputs] = loop.collect([nothing(loop)], [sequence(loop)], reducing(4))
    return lambda: check_sums_so_far(outputs.items, 5)


@case(turns=3_000)
def data_is_summed_in_each_round_synchronously(loop: Loop) -> Check:
    """A callback came before the records of its round from four instances behind a keyed exchange, or a record that
    was on the feedback path when a barrier passed was lost or counted twice.
    """
    [outputs] = loop.collect([nothing(loop)], [sequence(loop)], reducing(4, synchronous=True))

    def check() -> None:
        assert outputs.items == [*each_round(5), "terminated"]

    return check


@case(0, 1, None, turns=3_000)
def criteria_stop_sums_after_four_rounds(loop: Loop) -> Check:
    """Criteria did not stop the loop, whose feedback would last forty rounds, after four callbacks."""
    [outputs] = loop.collect([nothing(loop)], [sequence(loop)], reducing(40, synchronous=True, rounds=4))

    def check() -> None:
        assert outputs.items == [*each_round(4), "terminated"]

    return check


@case(0, turns=3_000)
def replayed_data_is_summed_per_round(loop: Loop) -> Check:
    """A sum from the round before doubled the sum of the next round, or a restored replay started again from its first
    record, or continued with records that it had not kept.
    """

    def looped(memory_bytes: int) -> Any:
        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            feedback, sums = summing(5, [variables[0], data[0]])
            return IterationBodyResult([feedback], [sums])

        life_cycle = OperatorLifeCycle.PER_ROUND
        options: dict[str, Any] = {"operator_life_cycle": life_cycle, "replay_memory_bytes": memory_bytes}
        return loop.collect([loop.flow.from_items([0])], [replayed(sequence(loop))], body, **options)[0]

    on_disk, in_memory = looped(0), looped(1 << 20)

    def check() -> None:
        assert on_disk.items == in_memory.items == each_round(5)

    return check


@case(0, turns=3_000)
def per_round_and_all_round_steps_side_by_side(loop: Loop) -> Check:
    """With two variables and two data streams, one replayed, one part ended the other too early; after a failure,
    an unfinished round of the per-round part started again, while the all-round part continued.
    """

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        numbers, sums = for_each_round([variables[0], data[0]], lambda streams: summing(6, streams))
        all_round = reducing(5, synchronous=True)([variables[1]], [data[1]])
        return IterationBodyResult([numbers, *all_round.feedback_variable_streams], [sums, *all_round.output_streams])

    data = [replayed(sequence(loop)), sequence(loop)]
    sums, outputs = loop.collect([loop.flow.from_items([0]), nothing(loop)], data, body)

    def check() -> None:
        assert sums.items == each_round(6)
        assert outputs.items == [*each_round(6), "terminated"]

    return check
