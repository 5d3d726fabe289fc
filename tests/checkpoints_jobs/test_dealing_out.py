"""Redistributed state: nothing is lost or doubled, and each record is at the subtask that receives it in the flow."""

from collections import Counter
from random import Random
from typing import Any

from checkpoints.plain_values import many, some_bytes, some_int, some_text
from support.examples import random_examples

from streamiter.engine.checkpointing.redistribute import key_share, redistribute_timers
from streamiter.engine.checkpointing.shares import WaitingBatch, deal, waiting_batches
from streamiter.engine.graph.output import Broadcast, ByFunction, ByKey, Forward, Partitioning, Rebalance
from streamiter.iteration.progress import EpochCounts
from streamiter.operators.source import ItemsSource
from streamiter.topics.source_and_sink import TopicSource
from streamiter.values.helpers.clock import SystemClock
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Batch

Waited = list[tuple[int, list[int]]]
"""Waiting batches, each with the subtask that it waits for."""

SHARING = [Forward(), Rebalance(), ByKey(lambda x: x % 5), ByFunction(lambda x: x)]

plain_data = PlainData()


def some_count(random: Random) -> int:
    return random.randint(1, 9)


def some_key(random: Random) -> Any:
    kind = random.choice((some_int, some_text, some_bytes, None))
    return kind(random) if kind else (some_int(random), some_text(random))


def some_batches(random: Random) -> Waited:
    return many(
        random, lambda random: (random.randint(0, 8), [random.randint(-99, 99) for _ in range(some_count(random))])
    )


def all_go_to(subtask: int, partitioning: Partitioning, records: list[Any], subtasks: int) -> bool:
    """Return whether the flow sends all records to this subtask."""
    return [to for to, _ in partitioning.splitter(0, subtasks)(records)] == [subtask] * bool(records)


def some_states(random: Random) -> list[dict[Any, int]]:
    """Return the state of each key at each subtask."""
    return [
        {some_key(random): random.getrandbits(70) for _ in range(random.randrange(6))}
        for _ in range(random.randint(1, 3))
    ]


@random_examples(lambda random: (some_states(random), random.randint(1, 4)))
def test_each_key_is_at_the_subtask_of_its_records(example: tuple[list[dict[Any, int]], int]) -> None:
    """The state of a key was at one subtask, and its records were sent to another subtask, which had no state."""
    given_states, subtasks = example
    states = [{(subtask, key): value for key, value in state.items()} for subtask, state in enumerate(given_states)]
    frames = [[[list(state), list(state.values())], [[], []]] for state in states]
    by_key = ByKey(lambda key: key)
    found: Counter[Any] = Counter()
    for subtask in range(subtasks):
        share = key_share(frames, subtask, subtasks)
        dealt = list(share)
        for of_keys, values in dealt:
            assert all_go_to(subtask, by_key, of_keys, subtasks)
            found.update(zip(of_keys, values, strict=True))
        assert list(share) == dealt, "it can be read again"
    assert found == Counter(item for state in states for item in state.items())


def some_timers(random: Random) -> list[tuple[int, Any, str]]:
    return many(random, lambda random: (some_int(random), random.choice((None, some_key(random))), some_text(random)))


@random_examples(lambda random: (many(random, some_timers), some_count(random)))
def test_timers_are_at_the_subtasks_of_their_keys(example: tuple[Any, int]) -> None:
    """A timer was distributed by its number, and did not find the state of its key."""
    timers, subtasks = example
    dealt = redistribute_timers(timers, subtasks, by_key=True)
    assert Counter(timer for of_subtask in dealt for timer in of_subtask) == Counter(
        timer for of_subtask in timers for timer in of_subtask
    )
    by_key = ByKey(lambda key: key)
    for subtask, of_subtask in enumerate(dealt):
        assert all_go_to(subtask, by_key, [key for _, key, _ in of_subtask if key is not None], subtasks)


@random_examples(lambda random: (some_batches(random), random.choice(SHARING), some_count(random)))
def test_waiting_records_are_at_the_subtasks_to_which_the_edge_sends_them(
    example: tuple[Waited, Partitioning, int],
) -> None:
    """All waiting records were sent to the first subtask, or to the subtasks of other keys."""
    given_batches, partitioning, subtasks = example
    encoded = len(given_batches) % 2 == 1
    waiting = [_waiting(reader, batch, encoded=encoded) for reader, batch in given_batches]
    dealt = [
        (subtask, list(each.records(plain_data))) for subtask, each in deal(waiting, partitioning, subtasks, plain_data)
    ]
    records = [(subtask, record) for subtask, batch in dealt for record in batch]
    assert Counter(record for _, record in records) == Counter(record for _, batch in given_batches for record in batch)
    if isinstance(partitioning, (ByKey, ByFunction)):
        assert all(all_go_to(subtask, partitioning, batch, subtasks) for subtask, batch in dealt)
    if isinstance(partitioning, Rebalance):
        assert [subtask for subtask, _ in sorted(records, key=lambda each: each[0])] == sorted(
            number % subtasks for number in range(len(records))
        )


@random_examples(lambda random: (some_batches(random), some_count(random)))
def test_each_subtask_has_all_waiting_records_of_a_broadcast_once(example: tuple[Waited, int]) -> None:
    """New subtasks had the records of a broadcast once for each old subtask."""
    given_batches, subtasks = example
    waiting = [_waiting(reader, batch, encoded=False) for reader, batch in given_batches]
    dealt = [(subtask, each.content) for subtask, each in deal(waiting, Broadcast(), subtasks, plain_data)]
    first = [batch for reader, batch in given_batches if reader == 0]
    assert dealt == [(subtask, batch) for batch in first for subtask in range(subtasks)]


def _waiting(reader: int, batch: Batch, *, encoded: bool) -> WaitingBatch:
    return WaitingBatch(0, 1, reader, len(batch), plain_data.encode_batch(batch) if encoded else batch)


def test_batches_that_waited_after_a_watermark_keep_their_level() -> None:
    """In a channel with watermarks between its batches, all batches came before the first watermark after a change."""
    items = [("data", 4, 1, [1]), ("watermark", 5), ("data", 6, 2, b"encoded"), ("end of data", 0), ("data", 7, 1, [4])]
    assert list(waiting_batches(items, 2, 1)) == [
        WaitingBatch(2, 4, 1, 1, [1]),
        WaitingBatch(5, 6, 1, 2, b"encoded"),
        WaitingBatch(5, 7, 1, 1, [4]),
    ]


Done = tuple[int, list[list[int]], int]


def items_and_done(random: Random) -> Done:
    """Return the number of items, the items that each subtask emitted in each earlier run, and the present subtasks."""
    done = many(random, lambda random: [random.randint(0, 9) for _ in range(random.randint(1, 4))])
    return random.randint(0, 60), done, some_count(random)


@random_examples(items_and_done)
def test_items_are_read_once_after_any_earlier_runs(example: Done) -> None:
    """After a second change, items that were read before the first change were read again."""
    items, done, subtasks = example
    read: list[int] = []
    positions: list[dict[Any, Any]] = [{}]
    for of_subtasks in done:
        positions = ItemsSource.redistribute(positions, len(of_subtasks))
        for subtask, count in enumerate(of_subtasks):
            source = _opened(items, subtask, len(of_subtasks), positions[subtask])
            passed_on = list(source._items[:count])
            read += passed_on
            positions[subtask] = {**positions[subtask], "items done": len(passed_on)}
    positions = ItemsSource.redistribute(positions, subtasks)
    for subtask in range(subtasks):
        read += _opened(items, subtask, subtasks, positions[subtask])._items
    assert sorted(read) == list(range(items))


def _opened(items: int, subtask: int, subtasks: int, positions: dict[Any, Any]) -> ItemsSource:
    source = ItemsSource(list(range(items)))
    source.open(_Place(subtask, subtasks), positions)  # type: ignore[arg-type]
    return source


class _Place:
    """The part of a context that an `ItemsSource` uses."""

    clock = SystemClock()

    def __init__(self, subtask: int, subtasks: int) -> None:
        self.subtask_index, self.parallelism = subtask, subtasks


def some_positions(random: Random) -> list[dict[int, int]]:
    return [
        {random.randint(0, 9): random.randint(0, 99) for _ in range(random.randrange(5))}
        for _ in range(some_count(random))
    ]


@random_examples(lambda random: (some_positions(random), some_count(random)))
def test_no_partition_starts_again(example: tuple[list[dict[int, int]], int]) -> None:
    """A partition that was missing in its reader's positions counted as new."""
    positions, subtasks = example
    shared = TopicSource.redistribute(positions, subtasks)
    furthest: dict[int, int] = {}
    for of_subtask in positions:
        for partition, offset in of_subtask.items():
            furthest[partition] = max(offset, furthest.get(partition, 0))
    assert {partition: offset for each in shared for partition, offset in each.items()} == furthest
    for subtask, of_subtask in enumerate(shared):
        assert all(partition % subtasks == subtask for partition in of_subtask)


def some_adds(random: Random) -> list[tuple[int, int]]:
    return many(random, lambda random: (random.randint(0, 30), random.randint(1, 5)), 12)


@random_examples(lambda random: many(random, some_adds))
def test_counts_of_several_heads_add_up(added: list[list[tuple[int, int]]]) -> None:
    """A loop ended while it still had feedback that another head had counted."""
    expected: Counter[int] = Counter()
    runs = []
    for of_head in added:
        each = EpochCounts()
        for epoch, count in of_head:
            each.add(epoch, count)
            expected[epoch] += count
        runs.append(each.runs)
    together = EpochCounts()
    together.restore({"runs": EpochCounts.added(runs)})
    assert [together.take(epoch) for epoch in range(31)] == [expected[epoch] for epoch in range(31)]
