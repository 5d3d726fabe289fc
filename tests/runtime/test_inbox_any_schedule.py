"""The inbox under random schedules, compared with simple rules."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from runtime.inbox_run import InboxRun, Item, Seen, held_records
from support.examples import random_examples

from streamiter.engine.inbox.port_progress import InputEnded
from streamiter.values.records import CheckpointBarrier, DataBatch, EndOfData, EndOfInput, EpochWatermark

NAMES = ("a", "b")


@dataclass
class Plan:
    """The content of the channels, and the behaviour of the operator and the scheduler."""

    inputs: list[str]
    scripts: list[list[Item]]
    moves: list[int]
    wishes: list[tuple[str, ...] | None] | None
    in_order: bool
    limit_records: int
    merges: bool = False
    """Whether records have the order of epochs and ports."""
    epochs_in_order: bool = True
    wishes_follow_trace: bool = False
    """Whether the wishes depend on what was handled, and not on how often the inbox has asked."""


def scripts_of(random: Random, port: int, *, may_run_ahead: bool, may_end_early: bool = True) -> list[Item]:
    """Return a script for each channel: data of growing records, valid watermarks, two barriers, an end."""
    items: list[Item] = []
    watermark, record = -1, 1000 * port
    for _ in range(random.randrange(7)):
        if random.random() < 0.2:
            watermark += random.randint(1, 2)
            items.append(EpochWatermark(watermark))
            continue
        count = random.randint(1, 4)
        records = list(range(record, record + count))
        record += count
        epoch = watermark + 1 + (random.randint(0, 2) if may_run_ahead else 0)
        as_array = random.random() < 0.5
        items.append(DataBatch(np.array(records) if as_array else records, epoch))
    places = sorted(random.randint(0, len(items)) for _ in range(2))
    ends_before = random.choice((0, 0, 0, 1, 2))  # A channel that has ended has no further barrier.
    for checkpoint, place in reversed(list(enumerate(places, 1))):
        items.insert(place, CheckpointBarrier(checkpoint))
    if ends_before and may_end_early:
        items = items[: next(i for i, item in enumerate(items) if _is_barrier(item, ends_before))]
    return [*items, EndOfInput()]


def _is_barrier(item: Item, checkpoint: int) -> bool:
    return isinstance(item, CheckpointBarrier) and item.checkpoint == checkpoint


def _brings(script: Iterable[Item], checkpoint: int) -> bool:
    return any(_is_barrier(item, checkpoint) for item in script)


def plans(random: Random) -> Plan:
    inputs = random.choices(NAMES, k=random.choice((1, 2, 2, 3, 4)))
    in_order = random.random() < 0.6
    merges = in_order and random.random() < 0.5
    wanted = [None, (), *((name,) for name in dict.fromkeys(inputs))]
    has_wishes = random.random() < 0.7
    return Plan(
        inputs=inputs,
        scripts=[scripts_of(random, port, may_run_ahead=in_order) for port in range(len(inputs))],
        moves=[random.randint(0, len(inputs)) for _ in range(random.randrange(41))],
        wishes=random.choices(wanted, k=random.randrange(26)) if has_wishes else None,
        in_order=in_order,
        limit_records=random.randint(1, 6),
        merges=merges,
        epochs_in_order=not merges or random.random() < 0.5,
    )


def plans_with_moves_after_a_restore(random: Random) -> tuple[Plan, list[int]]:
    return plans(random), [random.randint(0, 4) for _ in range(random.randrange(41))]


class Scheduler:
    """Puts the items of a plan into the channels and runs the inbox, in the order of the plan's moves."""

    def __init__(self, plan: Plan, scripts: list[list[Item]], restored: list[dict[str, Any]] | None = None) -> None:
        self.originals = scripts
        self.scripts = [deque(script) for script in scripts]
        self.moves = deque(plan.moves)
        self.expected: set[int] = set()
        wishes: Iterator[tuple[str, ...] | None] | None = None if plan.wishes is None else iter(plan.wishes)

        def wish(run: InboxRun) -> tuple[str, ...] | None:
            if plan.wishes is None or not plan.wishes_follow_trace:
                return next(wishes, None) if wishes is not None else None
            handled = len(sequence_of(run))
            return plan.wishes[handled] if handled < len(plan.wishes) else None

        self.run = InboxRun(
            plan.inputs,
            in_order=plan.in_order,
            merges_in_order=plan.merges,
            epochs_in_order=plan.epochs_in_order,
            wants=None if wishes is None else wish,
            limit_records=plan.limit_records,
            restored=restored,
        )

    def bring(self, port: int) -> bool:
        """Put the next item of a channel, if protocol and room allow it."""
        script = self.scripts[port]
        if not script:
            return False
        item = script[0]
        if isinstance(item, CheckpointBarrier):
            # One checkpoint at a time, and the task expects each before any barrier is sent.
            if any(done.checkpoint == item.checkpoint - 1 for done in self.open_barriers()):
                return False
            if item.checkpoint not in self.expected:
                self.expected.add(item.checkpoint)
                self.run.inbox.expect_barrier(item)
        if not self.run.put(port, item):
            return False
        script.popleft()
        return True

    def open_barriers(self) -> list[CheckpointBarrier]:
        """Return the barriers that were sent, or will be sent, and have not passed."""
        left = [item for script in self.scripts for item in script if isinstance(item, CheckpointBarrier)]
        sent = [CheckpointBarrier(checkpoint) for checkpoint in sorted(self.expected)]
        return [item for item in [*left, *sent] if item.checkpoint not in self.run.snapshots and self.may_come(item)]

    def may_come(self, barrier: CheckpointBarrier) -> bool:
        """Return whether the task would pass the barrier: not if all channels end without it."""
        return barrier.checkpoint in self.expected and not self.run.has_ended

    def check_nothing_keeps_a_barrier_waiting(self) -> None:
        """Check that the barrier passes for any wanted inputs, once all channels have it or have ended."""
        for checkpoint in self.expected:
            brought = all(
                not _brings(left, checkpoint) if _brings(script, checkpoint) else not left
                for left, script in zip(self.scripts, self.originals, strict=True)
            )
            assert not brought or checkpoint in self.run.snapshots

    def play(self) -> InboxRun:
        """Run to the end; fail if nothing moves before the end."""
        while self.moves:
            move = self.moves.popleft()
            if move == len(self.scripts):
                self.run.step()
            else:
                self.bring(move)
        idle = 0
        while not self.run.has_ended:
            moved = [self.bring(port) for port in range(len(self.scripts))]
            stepped = self.run.step()
            idle = 0 if stepped or any(moved) else idle + 1
            if not stepped:
                self.check_nothing_keeps_a_barrier_waiting()
            # In a real job a timer changes a wish that names no input.
            self.run._ask()
            assert idle < 60, f"stuck: {self.run.told()}, left {self.scripts}"
        return self.run


def records_in(items: list[Item]) -> list[int]:
    return [int(record) for item in items if isinstance(item, DataBatch) for record in item.records]


def records_before(script: list[Item], checkpoint: int) -> list[int]:
    """Return the records of a checkpoint: those before its barrier, or all if the barrier never comes."""
    at = next((index for index, item in enumerate(script) if _is_barrier(item, checkpoint)), len(script))
    return records_in(script[:at])


def check_order(run: InboxRun, plan: Plan) -> None:
    """Check that each record comes once, and in order in its channel (by epoch if epochs are in order)."""
    for port, script in enumerate(plan.scripts):
        expected = [
            (item.epoch, int(record)) for item in script if isinstance(item, DataBatch) for record in item.records
        ]
        got = [(seen.epoch, seen.record) for seen in run.trace if isinstance(seen, Seen) and seen.port == port]
        if plan.in_order:
            assert sorted(got) == sorted(expected)
            for epoch in {epoch for epoch, _ in expected}:
                assert [pair for pair in got if pair[0] == epoch] == [p for p in expected if p[0] == epoch]
        else:
            assert got == expected


def check_watermarks(run: InboxRun) -> None:
    """Check that watermarks increase, and no record comes after the watermark of its epoch."""
    watermark = -1
    for entry in run.trace:
        if isinstance(entry, EpochWatermark):
            assert entry.epoch > watermark
            watermark = entry.epoch
        elif isinstance(entry, Seen):
            assert entry.epoch > watermark


def check_ends(run: InboxRun, plan: Plan) -> None:
    """Check that each input ends once, after its records, and all inputs together once, at the end."""
    assert sum(isinstance(entry, EndOfInput) for entry in run.trace) == 1
    ends = [entry.input_name for entry in run.trace if isinstance(entry, InputEnded)]
    assert Counter(ends) == Counter(dict.fromkeys(plan.inputs, 1))
    for position, entry in enumerate(run.trace):
        if isinstance(entry, InputEnded):
            later = [seen for seen in run.trace[position:] if isinstance(seen, Seen)]
            assert all(plan.inputs[seen.port] != entry.input_name for seen in later)


@random_examples(plans_with_moves_after_a_restore)
def test_every_record_arrives_once_in_order_and_the_end_last_also_from_a_checkpoint(
    example: tuple[Plan, list[int]],
) -> None:
    """A record was lost, doubled, late or stuck under one choice of wanted inputs, channel sizes and barriers.

    A checkpoint has exactly the records before its barriers; a run until the first checkpoint and a run restored from
    it are together one uninterrupted run.
    """
    plan, moves = example
    run = Scheduler(plan, plan.scripts).play()
    check_order(run, plan)
    check_watermarks(run)
    check_ends(run, plan)
    for checkpoint, snapshot in run.snapshots.items():
        check_checkpoint(run, plan, checkpoint, snapshot)
    if 1 in run.snapshots:
        check_restored(run, plan, moves)


def check_checkpoint(run: InboxRun, plan: Plan, checkpoint: int, snapshot: dict[str, Any]) -> None:
    """Check that the records handled before a checkpoint and in its snapshot are those before the barriers."""
    handled = []
    for entry in run.trace:
        if isinstance(entry, CheckpointBarrier) and entry.checkpoint == checkpoint:
            break
        if isinstance(entry, Seen):
            handled.append(entry.record)
    kept = held_records(snapshot, plan.in_order)
    expected = [record for script in plan.scripts for record in records_before(script, checkpoint)]
    assert Counter([*handled, *kept]) == Counter(expected)


def check_restored(run: InboxRun, plan: Plan, moves: list[int]) -> None:
    """Check that the records before the first checkpoint and those after a restore from it form one run."""
    before = run.trace[: next(i for i, entry in enumerate(run.trace) if _is_barrier(entry, 1))]  # type: ignore[arg-type]
    plan.moves = [min(move, len(plan.inputs)) for move in moves]
    behind = [behind_barrier(script) for script in plan.scripts]
    again = Scheduler(plan, behind, restored=run.snapshots[1])
    again.run.snapshots[1] = []
    again.play()
    again.run.trace[:0] = before
    check_order(again.run, plan)
    check_watermarks(again.run)
    check_ends(again.run, plan)


def behind_barrier(script: list[Item]) -> list[Item]:
    """Return the content of a channel after a restore of checkpoint 1: nothing if it had ended before."""
    for index, item in enumerate(script):
        if _is_barrier(item, 1):
            return script[index + 1 :]
    return []


# -- one sequence, whatever arrives first ---------------------------------------------------------------------------


def plans_of_two_schedules(random: Random) -> tuple[Plan, list[int]]:
    """Return a plan of an inbox that merges in order, with ends of data and an iteration, and moves of another run."""
    plan = plans(random)
    plan.in_order = plan.merges = plan.wishes_follow_trace = True
    ends = random.random() < 0.5
    plan.scripts = [
        scripts_of(random, port, may_run_ahead=True, may_end_early=not ends) for port in range(len(plan.inputs))
    ]
    if ends:
        for port, script in enumerate(plan.scripts):
            _end_iteration(random, port, script)
    if plan.wishes is not None:
        plan.wishes = [wish for wish in plan.wishes if wish != ()]
    return plan, [random.randint(0, len(plan.inputs)) for _ in range(random.randrange(41))]


def _end_iteration(random: Random, port: int, script: list[Item]) -> None:
    """Let a channel end with its iteration, often after the end of its data; its last records have the last epoch."""
    last, watermark = 20, max((item.epoch for item in script if isinstance(item, EpochWatermark)), default=-1)
    script.pop()
    if random.random() < 0.5:
        is_behind = isinstance(script[-1], CheckpointBarrier) and random.random() < 0.5
        script.insert(len(script) - is_behind, EndOfData(max(0, watermark)))
    else:
        script.append(EpochWatermark(last - 1))
    script += [DataBatch([1000 * port + 900 + place], last) for place in range(random.randrange(3))]
    script.append(EndOfInput(last))


@random_examples(plans_of_two_schedules)
def test_a_gate_that_merges_in_order_has_one_sequence(example: tuple[Plan, list[int]]) -> None:
    """A record, a watermark or an end was handled before another one in one of two runs, because it arrived before.

    A run until the first checkpoint and a run that is restored from it have the same sequence together.
    """
    plan, moves = example
    run = Scheduler(plan, plan.scripts).play()
    plan.moves, plan.limit_records = moves, 7 - plan.limit_records
    assert sequence_of(Scheduler(plan, plan.scripts).play()) == sequence_of(run)
    if 1 in run.snapshots:
        again = Scheduler(plan, [behind_barrier(script) for script in plan.scripts], restored=run.snapshots[1])
        again.run.snapshots[1] = []
        again.run.trace += run.trace[: next(i for i, entry in enumerate(run.trace) if _is_barrier(entry, 1))]  # type: ignore[arg-type]
        again.run._ask()
        assert sequence_of(again.play()) == sequence_of(run)


def sequence_of(run: InboxRun) -> list[object]:
    """Return the records, the callbacks of epochs and the ends, in order: a watermark may stand for several epochs."""
    sequence, watermark = list[object](), -1
    for entry, word in zip(run.trace, run.told(), strict=True):
        if isinstance(entry, EpochWatermark):
            sequence += range(watermark + 1, entry.epoch + 1)
            watermark = entry.epoch
        elif not isinstance(entry, CheckpointBarrier):
            sequence.append(word)
    return sequence
