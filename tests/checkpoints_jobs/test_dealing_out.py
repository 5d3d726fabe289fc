"""What is dealt out anew: nothing is lost, nothing comes twice, and all is where the flow would send it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streamiter.checkpoints.plain_data import PlainData
from streamiter.clock import SystemClock
from streamiter.iteration.epoch_counts import EpochCounts
from streamiter.operators.items import ItemsSource
from streamiter.records import Batch
from streamiter.runtime.checkpointing.redistribution.dealing import deal, dealt_to
from streamiter.runtime.checkpointing.redistribution.instances import KeyShare, timers_of
from streamiter.runtime.checkpointing.redistribution.waiting import Frames, Waiting, batches_queued, entry_of
from streamiter.runtime.partitioning import Broadcast, ByFunction, ByKey, Forward, Partitioning, Rebalance
from streamiter.topics.topic_source import TopicSource

counts = st.integers(1, 9)
keys = st.one_of(
    st.integers(), st.text(max_size=3), st.binary(max_size=3), st.tuples(st.integers(), st.text())
)
batches = st.lists(st.tuples(st.integers(0, 8), st.lists(st.integers(-99, 99), min_size=1)))
sharing = st.sampled_from([Forward(), Rebalance(), ByKey(lambda x: x % 5), ByFunction(lambda x: x)])

plain_data = PlainData()


def owner(partitioning: Partitioning, record: Any, subtasks: int) -> int:
    """Where the flow sends a record."""
    [(subtask, _)] = partitioning.splitter(0, subtasks)([record])
    return subtask


@given(st.lists(st.dictionaries(keys, st.integers(), max_size=20), min_size=1), counts)
def test_each_key_is_where_its_records_go(states: list[dict[Any, int]], subtasks: int) -> None:
    """The state of a key lay at one subtask, and its records came to another, which began anew."""
    states = [{(subtask, key): value for key, value in state.items()} for subtask, state in enumerate(states)]
    frames = [[[list(state), list(state.values())], [[], []]] for state in states]
    by_key = ByKey(lambda key: key)
    found: Counter[Any] = Counter()
    for subtask in range(subtasks):
        share = KeyShare(frames, subtask, subtasks)
        for of_keys, values in share:
            assert all(owner(by_key, key, subtasks) == subtask for key in of_keys)
            found.update(zip(of_keys, values, strict=True))
        assert list(share) == list(share), "it can be read again"
    assert found == Counter(item for state in states for item in state.items())


@given(st.lists(st.lists(st.tuples(st.integers(), st.none() | keys, st.text()))), counts)
def test_timers_are_where_the_states_of_their_keys_are(timers: Any, subtasks: int) -> None:
    """A timer was dealt out by its number, and met no state."""
    dealt = timers_of(timers, subtasks, by_key=True)
    assert Counter(timer for of_subtask in dealt for timer in of_subtask) == Counter(
        timer for of_subtask in timers for timer in of_subtask
    )
    by_key = ByKey(lambda key: key)
    for subtask, of_subtask in enumerate(dealt):
        assert all(owner(by_key, key, subtasks) == subtask for _, key, _ in of_subtask if key is not None)


@given(batches, sharing, counts)
def test_records_that_waited_are_where_the_edge_takes_them(
    given_batches: list[tuple[int, list[int]]], partitioning: Partitioning, subtasks: int
) -> None:
    """What had waited was all given to the first subtask, or to those of other keys."""
    dealt = list(deal(given_batches, partitioning, subtasks))
    records = [(subtask, record) for subtask, batch in dealt for record in batch]
    assert Counter(record for _, record in records) == Counter(
        record for _, batch in given_batches for record in batch
    )
    if isinstance(partitioning, (ByKey, ByFunction)):
        assert all(owner(partitioning, record, subtasks) == subtask for subtask, record in records)
    if isinstance(partitioning, Rebalance):
        assert [subtask for subtask, _ in sorted(records, key=lambda each: each[0])] == sorted(
            number % subtasks for number in range(len(records))
        )


@given(batches, sharing | st.just(Broadcast()), counts, st.booleans())
def test_what_is_read_for_one_subtask_is_what_is_dealt_to_it(
    given_batches: list[tuple[int, list[int]]], partitioning: Partitioning, subtasks: int, encoded: bool
) -> None:
    """Each new subtask goes through all that waited by itself: they must agree on who gets what."""
    waiting = [_waiting(reader, batch, encoded=encoded) for reader, batch in given_batches]
    expected = list(deal(given_batches, partitioning, subtasks))
    for subtask in range(subtasks):
        got = dealt_to(subtask, waiting, partitioning, subtasks, plain_data)
        assert [list(each.records(plain_data)) for each in got] == [
            list(batch) for owner, batch in expected if owner == subtask
        ]


def _waiting(reader: int, batch: Batch, *, encoded: bool) -> Waiting:
    content = plain_data.encode_batch(batch) if encoded else None
    return Waiting(0, 1, reader, len(batch), None if encoded else batch, content)


@given(batches)
def test_a_queue_reads_what_was_dealt_out(given_batches: list[tuple[int, list[int]]]) -> None:
    """What was dealt out decoded, and what was passed on encoded, have one form in a snapshot."""
    waiting = [_waiting(0, batch, encoded=bool(reader % 2)) for reader, batch in given_batches]
    frames = Frames(lambda: (entry_of(each, plain_data) for each in waiting))
    for _ in range(2):
        read = batches_queued(frames, 0, 0)
        assert [list(each.records(plain_data)) for each in read] == [batch for _, batch in given_batches]


@given(st.integers(0, 60), st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=4), counts)
def test_items_are_read_once_whatever_was_done_before(
    items: int, done: list[list[int]], subtasks: int
) -> None:
    """After a second change, items that were read before the first were read again."""
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
    """All that such a source asks of its context."""

    clock = SystemClock()

    def __init__(self, subtask: int, subtasks: int) -> None:
        self.subtask_index, self.parallelism = subtask, subtasks


@given(st.lists(st.dictionaries(st.integers(0, 9), st.integers(0, 99)), min_size=1), counts)
def test_no_partition_begins_anew(positions: list[dict[int, int]], subtasks: int) -> None:
    """A partition that the positions of its reader did not name counted as new."""
    shared = TopicSource.redistribute(positions, subtasks)
    furthest: dict[int, int] = {}
    for of_subtask in positions:
        for partition, offset in of_subtask.items():
            furthest[partition] = max(offset, furthest.get(partition, 0))
    assert {partition: offset for each in shared for partition, offset in each.items()} == furthest
    for subtask, of_subtask in enumerate(shared):
        assert all(partition % subtasks == subtask for partition in of_subtask)


@given(st.lists(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)))))
def test_counts_of_several_heads_add_up(added: list[list[tuple[int, int]]]) -> None:
    """A loop ended while feedback was in it that another head had counted."""
    expected: Counter[int] = Counter()
    runs = []
    for of_head in added:
        each = EpochCounts()
        for epoch, count in of_head:
            each.add(epoch, count)
            expected[epoch] += count
        runs.append(each.runs)
    together = EpochCounts()
    together.restore(EpochCounts.added(runs))
    assert [together.take(epoch) for epoch in range(31)] == [expected[epoch] for epoch in range(31)]
