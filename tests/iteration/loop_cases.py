"""Cases of loops with known results, each run in each way; the docstring of a case tells the incident it prevents.

A case builds a flow, and returns a function that checks its results. The results do not depend on the way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from iteration.iteration_support import Dawdle, Log, callbacks, check_listener, kinds, tagged
from iteration.loop_ways import Ahead, Loop

from streamiter import IterationBodyResult, OutputTag, Stream, connect, epochs_every, replayed

CRITERIA = OutputTag("criteria")
OUTPUT = OutputTag("output")
INSTANCES = 4
NUMBERS = 40
"""The reference implementation takes 1000, which takes many times as long and tests the same."""
SUM = INSTANCES * sum(range(NUMBERS))
TOTAL = INSTANCES * NUMBERS

BOUNDED: tuple[Ahead, ...] = (0, 1, 2, None)
ANY: tuple[Ahead, ...] = (*BOUNDED, "unbounded")

Check = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """How to build a case, the limits of epochs ahead with which it runs, and about how many turns a run takes."""

    build: Callable[[Loop], Check]
    aheads: Sequence[Ahead]
    turns: int


CASES: dict[str, Case] = {}


def case(*aheads: Ahead, turns: int = 100) -> Callable[[Callable[[Loop], Check]], Callable[[Loop], Check]]:
    def add(build: Callable[[Loop], Check]) -> Callable[[Loop], Check]:
        CASES[build.__name__] = Case(build, aheads or BOUNDED, turns)
        return build

    return add


def raised(record: int, context: Any, out: Any) -> None:
    out.emit(record + 1)


def lowered(record: int, context: Any, out: Any) -> None:
    if record > 0:
        out.emit(record - 1)


def asks_for_rounds(rounds: int) -> Callable[[int, Any, Any], None]:
    """Return a callback that asks for this number of rounds."""

    def on_callback(epoch: int, context: Any, out: Any) -> None:
        if epoch + 1 < rounds:
            out.emit("go on", tag=CRITERIA)

    return on_callback


def records(log: Sequence[tuple[Any, ...]]) -> list[tuple[Any, int]]:
    """Return record and epoch of all records in a log, in order."""
    return [(entry[1], entry[2]) for entry in kinds(log, "record")]


def check_listeners(log: Log, epochs: int, ended_in: int | None = None) -> None:
    """Check that each step was called at the end of this many epochs, and what it heard of the end."""
    for entries in log.values():
        check_listener(entries)
        assert callbacks(entries) == list(range(epochs))
        assert kinds(entries, "terminated") == [("terminated", epochs if ended_in is None else ended_in)]


# -- the examples of the reference -------------------------------------------------------------------------


@case(*ANY)
def a_token_circulates_until_it_is_not_fed_back(loop: Loop) -> Check:
    """The loop ended too early or too late: feedback exists in epochs 1 to 4, so it must end in epoch 5."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        mapped = loop.witness(variables[0], "map", on_record=raised)
        return IterationBodyResult([mapped.filter(lambda x: x < 5)], [tagged(mapped)])

    [seen] = loop.collect([loop.flow.from_items([0])], [], body)

    def check() -> None:
        assert seen.items == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
        check_listeners(loop.log, epochs=5)
        heard = loop.log["map", 0]
        assert heard[-4:] == [("input ended", "input"), ("terminated", 5), ("finish",), ("close",)]
        if loop.ahead == 0:
            in_turn = [entry for epoch in range(5) for entry in (("record", epoch, epoch), ("callback", epoch))]
            assert heard[:-4] == in_turn

    return check


@case()
def criteria_of_rounds_lead_to_as_many_callbacks_and_replays_and_one_pass_more(loop: Loop) -> Check:
    """The last update, which belongs to the ending epoch, was lost; rows were missing or came twice."""

    def looped(rounds: int) -> Check:
        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            mapped = loop.witness(variables[0], f"map {rounds}", on_record=raised, on_callback=asks_for_rounds(rounds))
            return IterationBodyResult([mapped], [tagged(mapped), tagged(data[0])], mapped.side_output(CRITERIA))

        token, rows = loop.collect([loop.flow.from_items([0])], [replayed(loop.items([10, 20]))], body)

        def check() -> None:
            assert token.items[: rounds + 1] == [(epoch + 1, epoch) for epoch in range(rounds + 1)]
            # With limit s, the head has released the records of s epochs after the last complete epoch.
            assert not isinstance(loop.ahead, int) or len(token.items) <= rounds + max(1, loop.ahead)
            assert rows.items == [(row, epoch) for epoch in range(rounds) for row in (10, 20)]
            check_listeners({("map", 0): loop.log[f"map {rounds}", 0]}, epochs=rounds)

        return check

    checks = [looped(rounds) for rounds in (1, 3, 7)]

    def check_all() -> None:
        for check in checks:
            check()

    return check_all


@case()
def replayed_data_comes_in_the_same_order_on_the_same_instance(loop: Loop) -> Check:
    """A sum of floating-point numbers differed from round to round."""

    def looped(parallelism: int) -> None:
        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            loop.witness(data[0], f"rows {parallelism}")
            mapped = loop.witness(variables[0], f"map {parallelism}", on_record=raised)
            return IterationBodyResult([mapped.filter(lambda x: x < 4)], [])

        loop.iterate([loop.flow.from_items([0])], [replayed(loop.items(range(50), parallelism))], body)

    def check() -> None:
        check_listeners(loop.log, epochs=4)
        for parallelism, subtask in [(1, 0), (3, 0), (3, 1), (3, 2)]:
            for epoch in range(4):
                rows = records(loop.log[f"rows {parallelism}", subtask])
                came = [row for row, of_epoch in rows if of_epoch == epoch]
                assert came == list(range(50))[subtask::parallelism]

    looped(1)
    looped(3)
    return check


# -- the end -----------------------------------------------------------------------------------------------


@case()
def a_body_that_feeds_nothing_back_runs_epoch_0_and_ends(loop: Loop) -> Check:
    """A loop without feedback ended in epoch 0, which never ends an iteration."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        both = loop.witness(connect(left=variables[0], right=data[0]), "both")
        return IterationBodyResult([both.filter(lambda x: False)], [both])

    [seen] = loop.collect([loop.items([1, 2])], [loop.items([3])], body)

    def check() -> None:
        assert sorted(seen.items) == [1, 2, 3]
        check_listeners(loop.log, epochs=1)

    return check


@case()
def criteria_that_still_emit_do_not_keep_an_empty_loop_alive(loop: Loop) -> Check:
    """A loop without feedback ran on because its criteria still had records, although one condition ends a loop."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        mapped = loop.witness(variables[0], "map", on_record=raised, on_callback=asks_for_rounds(1_000_000))
        return IterationBodyResult([mapped.filter(lambda x: x < 3)], [mapped], mapped.side_output(CRITERIA))

    [seen] = loop.collect([loop.flow.from_items([0])], [], body)

    def check() -> None:
        assert seen.items == [1, 2, 3]
        check_listeners(loop.log, epochs=3)

    return check


@case(0)
def criteria_from_plain_data_end_the_loop_after_the_data(loop: Loop) -> Check:
    """A loop waited for criteria from a data stream that had ended."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        mapped = loop.witness(variables[0], "map", on_record=raised)
        return IterationBodyResult([mapped], [mapped], data[0])

    [seen] = loop.collect([loop.flow.from_items([0])], [loop.items([7, 8])], body)

    def check() -> None:
        assert seen.items == [1, 2, 3]  # Epoch 1 has a record of the criteria, epoch 2 has none.
        assert callbacks(loop.log["map", 0]) == [0, 1]

    return check


@case(0)
def a_stream_may_be_feedback_and_criteria_and_output_at_once(loop: Loop) -> Check:
    """A stream with three uses lost records in one of them: each reader needs its own channels."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        small = variables[0].map(lambda x: x + 1).filter(lambda x: x < 4)
        return IterationBodyResult([small], [small, small], small)

    seen = loop.collect([loop.flow.from_items([0])], [], body)

    def check() -> None:
        assert [each.items for each in seen] == [[1, 2, 3]] * 2

    return check


@case(0)
def records_of_the_ending_epoch_are_handled_once_without_callback_or_feedback(loop: Loop) -> Check:
    """An additional callback in the ending epoch gave an algorithm one round too many."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        first = loop.witness(variables[0].rebalance(), "first", parallelism=2)
        last = loop.witness(first.process(lambda: Dawdle(loop.seed)), "last", on_record=raised)
        counts = loop.witness(variables[0], "rounds", on_callback=asks_for_rounds(2))
        return IterationBodyResult([last.rebalance()], [last], counts.side_output(CRITERIA))

    [seen] = loop.collect([loop.items([0, 100, 200], parallelism=2)], [], body)

    def check() -> None:
        assert sorted(seen.items) == sorted(start + epoch + 1 for start in (0, 100, 200) for epoch in range(3))
        check_listeners(loop.log, epochs=2)
        for name in ("first", "last"):
            came = [record for subtask in range(2) for record in records(loop.log[name, subtask])]
            assert sorted(came) == sorted((start + epoch, epoch) for start in (0, 100, 200) for epoch in range(3))

    return check


@case(0, "unbounded")
def termination_runs_in_dataflow_order_and_has_the_ending_epoch(loop: Loop) -> Check:
    """A step ended before it had handled the records that the step before it emitted at its end."""

    def step(stream: Stream, name: str, parallelism: int) -> Stream:
        return loop.witness(
            stream,
            name,
            parallelism,
            on_terminated=lambda context, out: out.emit(f"end of {name}"),
            on_finish=lambda out: out.emit(f"{name} finished"),
        )

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        chained = step(step(variables[0].rebalance(), "first", 2), "chained", 2)
        last = step(chained.rebalance().union(step(data[0], "rows", 1).rebalance()), "last", 3)
        numbers = last.filter(lambda x: isinstance(x, int)).map(lambda x: x - 1).filter(lambda x: x > 0)
        texts = last.filter(lambda x: isinstance(x, str))
        return IterationBodyResult([numbers.union(texts).rebalance()], [texts])

    [seen] = loop.collect([loop.flow.from_items([2])], [loop.flow.from_items([1])], body)

    def check() -> None:
        expected = 2 * ["end of first", "first finished", "end of chained", "chained finished"]
        expected += ["end of rows", "rows finished"]
        of_last = [record for subtask in range(3) for record in records(loop.log["last", subtask])]
        assert sorted(entry for entry in of_last if isinstance(entry[0], str)) == sorted((x, 2) for x in expected)
        assert sorted(seen.items) == sorted(expected + 3 * ["end of last", "last finished"])
        assert len(loop.log) == 8
        for entries in loop.log.values():
            check_listener(entries)  # No record comes after the termination.

    return check


@case(0, "unbounded")
def records_emitted_to_feedback_on_termination_are_dropped(loop: Loop) -> Check:
    """Records emitted at termination were fed back, although no epoch follows the last one."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        at_end = {"on_terminated": lambda context, out: out.emit(100)}
        step = loop.witness(variables[0], "step", on_record=lowered, **at_end)
        return IterationBodyResult([step], [step])

    [seen] = loop.collect([loop.flow.from_items([2])], [], body)

    def check() -> None:
        assert seen.items == [1, 0, 100]
        assert records(loop.log["step", 0]) == [(2, 0), (1, 1), (0, 2)]

    return check


@case(1, 2, 5)
def held_feedback_of_epochs_after_the_end_is_dropped(loop: Loop) -> Check:
    """Feedback that was held in memory at the end was sent as additional rounds."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        token = loop.witness(variables[0], "token", on_record=raised)
        dawdled = variables[1].process(lambda: Dawdle(loop.seed))
        slow = loop.witness(dawdled, "slow", on_record=raised, on_callback=asks_for_rounds(3))
        return IterationBodyResult([token, slow], [tagged(token)], slow.side_output(CRITERIA))

    [seen] = loop.collect([loop.flow.from_items([0]), loop.flow.from_items([0])], [], body)

    def check() -> None:
        assert isinstance(loop.ahead, int)
        last = max(epoch for _, epoch in seen.items)
        assert seen.items == [(epoch + 1, epoch) for epoch in range(last + 1)]
        assert 3 <= last <= max(3, 2 + loop.ahead)
        check_listeners(loop.log, epochs=3)

    return check


@case(0)
def plain_data_ends_at_its_own_end_replayed_data_and_variables_at_the_end_of_all(loop: Loop) -> Check:
    """A worker waited for the end of its data until the epoch was complete, and the epoch waited for the worker."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        step = loop.witness(
            connect(variable=variables[0], left=data[0], data=data[1]),
            "step",
            on_record=lambda x, context, out: out.emit(x + 1) if isinstance(x, int) else None,
        )
        return IterationBodyResult([step.filter(lambda x: x < 3)], [])

    loop.iterate([loop.flow.from_items([0])], [loop.items(["plain"] * 9), replayed(loop.items(["again"] * 9))], body)

    def check() -> None:
        entries = loop.log["step", 0]
        check_listener(entries)
        heard = [entry for entry in entries if entry[0] != "record"]
        assert heard[:4] == [("input ended", "left"), *(("callback", epoch) for epoch in range(3))]
        assert sorted(heard[4:6]) == [("input ended", "data"), ("input ended", "variable")]
        assert heard[6:] == [("terminated", 3), ("finish",), ("close",)]
        assert entries[: entries.index(("input ended", "left"))].count(("record", "plain", 0)) == 9

    return check


@case(0, "unbounded")
def a_step_fed_by_plain_data_only_has_callback_0_and_then_the_end(loop: Loop) -> Check:
    """A step with data only delayed the callbacks of other steps, received those of later rounds, or no end."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        rows = loop.witness(data[0], "rows")
        behind = loop.witness(rows.rebalance(), "behind", parallelism=2)
        both = loop.witness(
            connect(variable=variables[0], data=behind),
            "both",
            on_record=lambda x, context, out: lowered(x, context, out) if x < 9 else None,
        )
        return IterationBodyResult([both.rebalance()], [])

    loop.iterate([loop.flow.from_items([3])], [loop.items([10, 11, 12, 13])], body)

    def check() -> None:
        both = {subtask: entries for subtask, entries in loop.log.items() if subtask[0] == "both"}
        of_data = {subtask: entries for subtask, entries in loop.log.items() if subtask[0] != "both"}
        check_listeners(of_data, epochs=1, ended_in=4)
        for entries in of_data.values():
            assert entries[-5:-2] == [("input ended", "input"), ("callback", 0), ("terminated", 4)]
        check_listeners(both, epochs=4)
        for entries in both.values():
            assert kinds(entries, "input ended") == [("input ended", "data"), ("input ended", "variable")]

    return check


@case("unbounded")
def data_that_is_fed_back_only_at_its_end_circulates(loop: Loop) -> Check:
    """A step with data only lost its end, its callback or its feedback, which are its only calls."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        loop.witness(variables[0], "model")
        step = loop.witness(
            data[0],
            "step",
            on_record=lambda *_: None,
            on_ended=lambda name, out: out.emit("end"),
            on_callback=lambda epoch, context, out: out.emit(epoch),
        )
        return IterationBodyResult([step], [])

    loop.iterate([loop.items(["start"])], [loop.flow.from_items([1, 2, 3])], body)

    def check() -> None:
        assert sorted(records(loop.log["model", 0]), key=repr) == [("end", 1), ("start", 0), (0, 1)]
        check_listeners({("model", 0): loop.log["model", 0]}, epochs=2)

    return check


@case("unbounded")
def records_emitted_at_the_end_of_an_input_are_not_lost(loop: Loop) -> Check:
    """The last partial report of a worker was sent with an epoch that was already complete, and was not counted."""

    def at_end(name: str, out: Any) -> None:
        if name == "data":
            out.emit("the rest")

    def looped(name: str, data: Stream) -> None:
        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            dawdled = variables[0].process(lambda: Dawdle(loop.seed))
            model = loop.witness(dawdled, f"model {name}", on_record=lambda *_: None)
            both = connect(variable=model, data=data[0].process(lambda: Dawdle(loop.seed + 1)))
            worker = loop.witness(both, f"worker {name}", on_record=lambda *_: None, on_ended=at_end)
            return IterationBodyResult([worker], [])

        loop.iterate([loop.flow.from_items(["start"])], [data], body)

    looped("plain", loop.items(range(5)))
    looped("stamped", epochs_every(loop.items(range(5)), records=2))

    def check() -> None:
        for entries in loop.log.values():
            check_listener(entries)
        for name in ("plain", "stamped"):
            [rest] = [epoch for record, epoch in records(loop.log[f"model {name}", 0]) if record == "the rest"]
            assert rest == 1 or name == "stamped"

    return check


@case(*ANY)
def every_instance_has_a_callback_for_each_epoch_after_its_records(loop: Loop) -> Check:
    """A chained or repartitioned listener, or one after a slow step, missed an epoch, or received it too early."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        chained = loop.witness(loop.witness(variables[0], "first"), "chained")
        slow = loop.witness(chained.process(lambda: Dawdle(loop.seed)), "behind slow")
        dealt = loop.witness(slow.rebalance(), "dealt", parallelism=3)
        by_key = loop.witness(dealt.key_by(lambda x: x), "by key", parallelism=2, on_record=lowered)
        loop.witness(by_key.filter(lambda x: False), "without records")
        return IterationBodyResult([by_key.rebalance()], [])

    starts = [4, 0, 2, 2, 3]
    loop.iterate([loop.items(starts, parallelism=2)], [], body)

    def check() -> None:
        assert len(loop.log) == 2 + 2 + 2 + 3 + 2 + 2
        check_listeners(loop.log, epochs=5)
        for name in ("first", "chained", "behind slow", "dealt", "by key"):
            came = [record for subtask in range(3) for record in records(loop.log.get((name, subtask), []))]
            assert sorted(came) == sorted((k - epoch, epoch) for k in starts for epoch in range(k + 1)), name

    return check
