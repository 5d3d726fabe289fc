"""Bounded iterations: the epochs of records, the callbacks of listeners, and the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from iteration.bounded_support import AHEAD, CRITERIA, SEEDS, asks_for_rounds, iterate, nothing, raised, records
from iteration.iteration_support import (
    SMALL,
    CutItems,
    Dawdle,
    Log,
    Witness,
    callbacks,
    check_listener,
    cut_items,
    ended,
    kinds,
    run,
    run_shuffled,
    tagged,
)
from support.waiting import until

from streamiter import Flow, IterationBodyResult, Stream, connect, replayed

# -- the examples of the reference -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ahead", AHEAD)
def test_a_token_circulates_until_it_is_not_fed_back(seed: int, ahead: int | None) -> None:
    """The loop ended too early or too late: feedback exists in epochs 1 to 4, so it must end in epoch 5."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        mapped = variables[0].process(lambda: Witness(log, on_record=raised), name="map")
        return IterationBodyResult([mapped.filter(lambda x: x < 5)], [tagged(mapped)])

    [numbers] = iterate([flow.from_items([0])], [], body, ahead)
    seen = numbers.collect()
    run(flow, seed=seed, limits=SMALL)
    assert seen.items == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
    check_listener(log["map", 0])
    assert callbacks(log["map", 0]) == [0, 1, 2, 3, 4]
    assert log["map", 0][-4:] == [("input ended", "input"), ("terminated", 5), ("finish",), ("close",)]


def counted(flow: Flow, log: Log, rounds: int, ahead: int | None, data: Sequence[Any] = ()) -> Any:
    """Add a loop whose token would circulate forever; the criteria stream asks for this number of rounds."""

    def body(variables: list[Stream], entered: list[Stream]) -> IterationBodyResult:
        mapped = variables[0].process(
            lambda: Witness(log, on_record=raised, on_callback=asks_for_rounds(rounds)), name="map"
        )
        outputs = [tagged(mapped), *(tagged(stream) for stream in entered)]
        return IterationBodyResult([mapped], outputs, mapped.side_output(CRITERIA))

    outputs = iterate([flow.from_items([0])], data, body, ahead)
    return [output.collect() for output in outputs]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ahead", AHEAD)
def test_criteria_of_three_rounds_lead_to_three_callbacks_and_four_passes(seed: int, ahead: int | None) -> None:
    """The last update, which belongs to the ending epoch, was lost."""
    flow, log = Flow("loop"), Log()
    [seen] = counted(flow, log, 3, ahead)
    run(flow, seed=seed, limits=SMALL)
    assert seen.items[:4] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    # With limit s, the head has released the records of s epochs after the last complete epoch, which is 2.
    assert ahead is None or len(seen.items) <= max(4, 3 + ahead)
    check_listener(log["map", 0])
    assert callbacks(log["map", 0]) == [0, 1, 2]
    assert kinds(log["map", 0], "terminated") == [("terminated", 3)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_replayed_data_comes_in_every_round_and_not_in_the_ending_epoch(
    seed: int, ahead: int | None, rounds: int
) -> None:
    """Replayed rows were missing or came twice when the loop was far ahead of the replay."""
    flow, log = Flow("loop"), Log()
    _, seen = counted(flow, log, rounds, ahead, [replayed(cut_items(flow, [10, 20], seed=seed))])
    run(flow, seed=seed, limits=SMALL)
    assert seen.items == [(row, epoch) for epoch in range(rounds) for row in (10, 20)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("parallelism", [1, 3])
def test_replayed_data_comes_in_the_same_order_on_the_same_instance(seed: int, parallelism: int) -> None:
    """A sum of floating-point numbers differed from round to round."""
    flow, log, rows = Flow("loop"), Log(), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        data[0].process(lambda: Witness(rows), name="rows")
        mapped = variables[0].process(lambda: Witness(log, on_record=raised), name="map")
        return IterationBodyResult([mapped.filter(lambda x: x < 4)], [])

    data = cut_items(flow, range(50), seed=seed, parallelism=parallelism)
    iterate([flow.from_items([0])], [replayed(data)], body)
    run(flow, seed=seed, limits=SMALL)
    for subtask in range(parallelism):
        check_listener(rows["rows", subtask])
        assert callbacks(rows["rows", subtask]) == [0, 1, 2, 3]
        for epoch in range(4):
            came = [row for row, of_epoch in records(rows["rows", subtask]) if of_epoch == epoch]
            assert came == list(range(50))[subtask::parallelism]


# -- the end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ahead", AHEAD)
def test_a_body_that_feeds_nothing_back_runs_epoch_0_and_ends(seed: int, ahead: int | None) -> None:
    """A loop without feedback ended in epoch 0, which never ends an iteration."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        both = connect(left=variables[0], right=data[0]).process(lambda: Witness(log), name="both")
        return IterationBodyResult([both.filter(lambda x: False)], [both])

    [output] = iterate([cut_items(flow, [1, 2], seed=seed)], [cut_items(flow, [3], seed=seed)], body, ahead)
    seen = output.collect()
    run(flow, seed=seed, limits=SMALL)
    assert sorted(seen.items) == [1, 2, 3]
    check_listener(log["both", 0])
    assert callbacks(log["both", 0]) == [0]
    assert kinds(log["both", 0], "terminated") == [("terminated", 1)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ahead", AHEAD)
def test_criteria_that_still_emit_do_not_keep_an_empty_loop_alive(seed: int, ahead: int | None) -> None:
    """A loop without feedback ran on because its criteria still had records, although one condition ends a loop."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        mapped = variables[0].process(
            lambda: Witness(log, on_record=raised, on_callback=asks_for_rounds(1_000_000)), name="map"
        )
        return IterationBodyResult([mapped.filter(lambda x: x < 3)], [mapped], mapped.side_output(CRITERIA))

    [output] = iterate([flow.from_items([0])], [], body, ahead)
    seen = output.collect()
    run(flow, seed=seed, limits=SMALL)
    assert seen.items == [1, 2, 3]
    assert callbacks(log["map", 0]) == [0, 1, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_criteria_that_never_emit_end_the_loop_in_epoch_1(seed: int) -> None:
    """A loop without criteria records ran longer than to epoch 1, the first epoch in which it can end."""
    flow, log = Flow("loop"), Log()
    [seen] = counted(flow, log, 1, 0)
    run(flow, seed=seed, limits=SMALL)
    assert seen.items == [(1, 0), (2, 1)]
    assert callbacks(log["map", 0]) == [0]


@pytest.mark.parametrize("seed", SEEDS)
def test_criteria_from_plain_data_end_the_loop_after_the_data(seed: int) -> None:
    """A loop waited for criteria from a data stream that had ended."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        mapped = variables[0].process(lambda: Witness(log, on_record=raised), name="map")
        return IterationBodyResult([mapped], [mapped], data[0])

    [output] = iterate([flow.from_items([0])], [cut_items(flow, [7, 8], seed=seed)], body)
    seen = output.collect()
    run(flow, seed=seed, limits=SMALL)
    assert seen.items == [1, 2, 3]  # Epoch 1 has a record of the criteria, epoch 2 has none.
    assert callbacks(log["map", 0]) == [0, 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_may_be_feedback_and_criteria_and_output_at_once(seed: int) -> None:
    """A stream with three uses lost records in one of them: each reader needs its own channels."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        small = variables[0].map(lambda x: x + 1).filter(lambda x: x < 4)
        return IterationBodyResult([small], [small], small)

    [output] = iterate([flow.from_items([0])], [], body)
    seen = output.collect()
    run(flow, seed=seed, limits=SMALL)
    assert seen.items == [1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_records_of_the_ending_epoch_are_handled_once_without_callback_or_feedback(seed: int) -> None:
    """An additional callback in the ending epoch gave an algorithm one round too many."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        first = variables[0].rebalance().process(lambda: Witness(log), name="first", parallelism=2)
        last = first.process(lambda: Dawdle(seed)).process(lambda: Witness(log, on_record=raised), name="last")
        counts = variables[0].process(lambda: Witness(log, on_callback=asks_for_rounds(2)), name="rounds")
        return IterationBodyResult([last.rebalance()], [last], counts.side_output(CRITERIA))

    [output] = iterate([cut_items(flow, [0, 100, 200], seed=seed, parallelism=2)], [], body)
    seen = output.collect()
    run(flow, seed=seed, limits=SMALL)
    assert sorted(seen.items) == sorted(start + epoch + 1 for start in (0, 100, 200) for epoch in range(3))
    for name, subtask in log:
        check_listener(log[name, subtask])
        assert callbacks(log[name, subtask]) == [0, 1]
        assert kinds(log[name, subtask], "terminated") == [("terminated", 2)]
    for name in ("first", "last"):
        came = [record for subtask in range(2) for record in records(log[name, subtask])]
        assert sorted(came) == sorted((start + epoch, epoch) for start in (0, 100, 200) for epoch in range(3))


@pytest.mark.parametrize("seed", SEEDS)
def test_termination_runs_in_dataflow_order_and_has_the_ending_epoch(seed: int) -> None:
    """A step ended before it had handled the records that the step before it emitted at its end."""
    flow, log, order = Flow("loop"), Log(), list[str]()

    def step(stream: Stream, name: str, parallelism: int) -> Stream:
        def at_end(context: Any, out: Any) -> None:
            order.append(name)
            out.emit(f"end of {name}")

        return stream.rebalance().process(
            lambda: Witness(log, on_terminated=at_end, on_finish=lambda out: out.emit(f"{name} finished")),
            name=name,
            parallelism=parallelism,
        )

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        first = step(variables[0], "first", 2)
        second = step(first.union(step(data[0], "rows", 1)), "second", 3)
        numbers = second.filter(lambda x: isinstance(x, int)).map(lambda x: x - 1).filter(lambda x: x > 0)
        texts = second.filter(lambda x: isinstance(x, str))
        return IterationBodyResult([numbers.union(texts).rebalance()], [texts])

    [output] = iterate([flow.from_items([2])], [flow.from_items([1])], body)
    seen = output.collect()
    run(flow, seed=seed, limits=SMALL)
    assert Counter(order) == {"first": 2, "rows": 1, "second": 3}
    assert order[-3:] == 3 * ["second"]
    expected = 2 * ["end of first", "first finished"] + ["end of rows", "rows finished"]
    of_second = [record for subtask in range(3) for record in records(log["second", subtask])]
    assert sorted(entry for entry in of_second if isinstance(entry[0], str)) == sorted((text, 2) for text in expected)
    assert sorted(seen.items) == sorted(expected + 3 * ["end of second", "second finished"])
    for entries in log.values():
        check_listener(entries)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_held_feedback_of_epochs_after_the_end_is_dropped(seed: int, ahead: int) -> None:
    """Feedback that was held in memory at the end was sent as additional rounds."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        token = variables[0].process(lambda: Witness(log, on_record=raised), name="token")
        slow = (
            variables[1]
            .process(lambda: Dawdle(seed))
            .process(lambda: Witness(log, on_record=raised, on_callback=asks_for_rounds(3)), name="slow")
        )
        return IterationBodyResult([token, slow], [tagged(token)], slow.side_output(CRITERIA))

    [output] = iterate([flow.from_items([0]), flow.from_items([0])], [], body, ahead)
    seen = output.collect()
    run(flow, seed=seed, limits=SMALL)
    last = max(epoch for _, epoch in seen.items)
    assert seen.items == [(epoch + 1, epoch) for epoch in range(last + 1)]
    assert 3 <= last <= max(3, 2 + ahead)
    assert callbacks(log["slow", 0]) == callbacks(log["token", 0]) == [0, 1, 2]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_no_record_is_further_ahead_of_the_last_complete_epoch_than_the_limit(seed: int, ahead: int) -> None:
    """Feedback ran further ahead than the limit while data of epoch 0 was still arriving."""
    flow, log, too_far = Flow("loop"), Log(), list[tuple[int, int]]()

    async def main() -> None:
        data_may_end = asyncio.Event()

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            def on_record(record: int, context: Any, out: Any) -> None:
                complete = max((loop.epoch_complete for loop in job.statistics().loops), default=-1)
                if context.epoch > max(0, complete + ahead):
                    too_far.append((context.epoch, complete))
                out.emit(record + 1)

            token = variables[0].process(lambda: Witness(log, on_record=on_record), name="token")
            slow = variables[0].process(lambda: Dawdle(seed)).filter(lambda x: False)
            return IterationBodyResult([token.filter(lambda x: x < 12).union(slow)], [data[0]])

        late = flow.from_source(lambda: CutItems([7], seed, at_end=data_may_end.wait))
        [output] = iterate([flow.from_items([0])], [late], body, ahead)
        output.collect()
        job = await flow.start(channel_limits=SMALL)
        await until(lambda: len(log.get(("token", 0), ())) > 0)
        for _ in range(200):
            await asyncio.sleep(0)
        data_may_end.set()
        await ended(job)

    run_shuffled(main(), seed)
    assert too_far == []
    assert callbacks(log["token", 0]) == list(range(12))


# -- the ends of inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_plain_data_ends_at_its_own_end_replayed_data_and_variables_at_the_end_of_all(seed: int) -> None:
    """A worker waited for the end of its data until the epoch was complete, and the epoch waited for the worker."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        step = connect(variable=variables[0], left=data[0], data=data[1]).process(
            lambda: Witness(log, on_record=lambda x, context, out: out.emit(x + 1) if isinstance(x, int) else None),
            name="step",
        )
        return IterationBodyResult([step.filter(lambda x: x < 3)], [])

    plain, again = cut_items(flow, ["plain"] * 9, seed=seed), cut_items(flow, ["again"] * 9, seed=seed)
    iterate([flow.from_items([0])], [plain, replayed(again)], body)
    run(flow, seed=seed, limits=SMALL)
    entries = log["step", 0]
    check_listener(entries)
    heard = [entry for entry in entries if entry[0] != "record"]
    assert heard[:4] == [("input ended", "left"), *(("callback", epoch) for epoch in range(3))]
    assert sorted(heard[4:6]) == [("input ended", "data"), ("input ended", "variable")]
    assert heard[6:] == [("terminated", 3), ("finish",), ("close",)]
    at = entries.index(("input ended", "left"))
    assert len([entry for entry in entries[:at] if entry[1:] == ("plain", 0)]) == 9


async def test_the_end_of_plain_data_is_reported_while_other_data_of_epoch_0_arrives() -> None:
    """A step received the end of its data only when the epoch was complete."""
    flow, log, may_end = Flow("loop"), Log(), asyncio.Event()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        both = connect(left=data[0], right=data[1]).process(lambda: Witness(log), name="both")
        return IterationBodyResult(variables, [both])

    late = flow.from_source(lambda: CutItems([3], 0, at_end=may_end.wait))
    [output] = iterate([nothing(flow)], [flow.from_items([1, 2]), late], body)
    output.collect()
    job = await flow.start()
    await until(lambda: ("input ended", "left") in log["both", 0])
    assert kinds(log["both", 0], "callback", "terminated") == []
    may_end.set()
    await ended(job)
    check_listener(log["both", 0])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_fed_by_plain_data_only_has_callback_0_and_then_the_end(seed: int) -> None:
    """A step with plain data only received callbacks of later rounds, or ended before them."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        rows = data[0].process(lambda: Witness(log), name="rows")
        rows.rebalance().process(lambda: Witness(log), name="behind", parallelism=2)
        token = variables[0].process(lambda: Witness(log, on_record=raised), name="token")
        return IterationBodyResult([token.filter(lambda x: x < 5)], [])

    iterate([flow.from_items([0])], [cut_items(flow, range(9), seed=seed)], body)
    run(flow, seed=seed, limits=SMALL)
    for name, subtask in (("rows", 0), ("behind", 0), ("behind", 1)):
        check_listener(log[name, subtask])
        assert callbacks(log[name, subtask]) == [0]
        assert kinds(log[name, subtask], "terminated") == [("terminated", 5)]
