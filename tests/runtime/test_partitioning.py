"""The subtask that receives a record."""

from collections.abc import Callable
from itertools import chain, pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from checkpoints.plain_values import some_bytes, some_int, some_text
from support.examples import random_examples

from streamiter.engine.graph.output import Broadcast, ByFunction, ByKey, Forward, Partitioning, Rebalance, Turns
from streamiter.errors import PlainDataError
from streamiter.values.records import Batch, Columns, slice_batch
from streamiter.values.subtasks import KEY_GROUPS, key_group, subtask_of_group

KINDS: dict[str, Callable[[list[int]], Batch]] = {
    "list": list,
    "tuple": tuple,
    "array": lambda values: np.array(values, np.int64),
    "columns": lambda values: Columns({"value": np.array(values, np.int64)}),
}


def value_of(record: Any) -> int:
    return int(record["value"] if isinstance(record, dict) else record)


def is_part_in_order(part: list[int], whole: list[int]) -> bool:
    """Return whether ``part`` is ``whole`` with some items left out."""
    rest = iter(whole)
    return all(value in rest for value in part)


PARTITIONINGS: dict[str, Partitioning] = {
    "broadcast": Broadcast(),
    "rebalance": Rebalance(),
    "by key": ByKey(lambda record: value_of(record) % 7),
    "by text key": ByKey(lambda record: f"user-{value_of(record)}"),
    "by function": ByFunction(lambda record: value_of(record) // 2),
}


def spread(partitioning: Partitioning, batches: list[Batch], subtasks: int, subtask: int = 0) -> list[list[int]]:
    """Return the records of each downstream subtask, in order."""
    split = partitioning.splitter(subtask, subtasks)
    got: list[list[int]] = [[] for _ in range(subtasks)]
    for batch in batches:
        for target, part in split(batch):
            assert len(part) > 0
            got[target] += [value_of(record) for record in part]
    return got


Cut = tuple[str, str, int, list[int], list[int]]


def cut_values(random: Random) -> Cut:
    """Return a partitioning, a type of batch, the number of subtasks, records, and their cuts."""
    values = [random.randint(-50, 50) for _ in range(random.randrange(21))]
    cuts = sorted(random.randint(0, len(values)) for _ in range(random.randrange(6)))
    return random.choice([*PARTITIONINGS]), random.choice([*KINDS]), random.randint(2, 5), values, cuts


@random_examples(cut_values)
def test_the_cuts_of_batches_have_no_effect(example: Cut) -> None:
    """The same records with other cuts were sent to other subtasks, so results depended on the load."""
    name, kind, subtasks, values, cuts = example
    batch = KINDS[kind](values)
    bounds = [0, *cuts, len(values)]
    parts = [slice_batch(batch, start, stop) for start, stop in pairwise(bounds) if stop > start]
    whole = spread(PARTITIONINGS[name], [batch] if values else [], subtasks)
    assert spread(PARTITIONINGS[name], parts, subtasks) == whole
    copies = subtasks if name == "broadcast" else 1
    assert sorted(chain.from_iterable(whole)) == sorted(values * copies)
    assert all(is_part_in_order(got, values) for got in whole)


def keys_and_subtasks(random: Random) -> tuple[list[Any], int]:
    keys = [random.choice((some_int, some_text, some_bytes))(random) for _ in range(random.randint(1, 20))]
    return keys, random.randint(2, 9)


@random_examples(keys_and_subtasks)
def test_a_key_is_sent_to_the_subtask_of_its_group(example: tuple[list[Any], int]) -> None:
    """Keyed state was not found after a restore, because key → group → subtask had another rule."""
    keys, n = example
    split = ByKey(lambda record: record).splitter(0, n)
    for target, part in split(keys):
        assert {subtask_of_group(key_group(key), n) for key in part} == {target}


def test_every_subtask_owns_a_range_of_groups() -> None:
    """A subtask without a group was idle forever, or groups out of order could not move as ranges."""
    for subtasks in range(1, KEY_GROUPS + 1):
        owners = [subtask_of_group(group, subtasks) for group in range(KEY_GROUPS)]
        assert owners == sorted(owners)
        assert set(owners) == set(range(subtasks))


def test_keys_of_whole_batches_and_of_single_records_agree() -> None:
    """``key_by_batch`` and ``key_by`` sent the same key to different subtasks, so a join of the two found no pairs."""
    values = np.arange(-40, 40)
    single = spread(ByKey(lambda record: int(record) % 11), [values], 4)
    batched = spread(ByKey(lambda batch: batch % 11, whole_batches=True), [values], 4)
    assert batched == single
    as_list = spread(ByKey(lambda batch: [int(value) % 11 for value in batch], whole_batches=True), [values], 4)
    assert as_list == single


def counts_and_subtasks(random: Random) -> tuple[list[int], int, int]:
    counts = [random.randint(1, 7) for _ in range(random.randrange(9))]
    return counts, random.randint(0, 5), random.randint(2, 4)


@random_examples(counts_and_subtasks)
def test_rebalancing_deals_records_in_turn_across_batches(example: tuple[list[int], int, int]) -> None:
    """With whole batches in turn, or a new start for each batch, the first subtask received all single records."""
    counts, subtask, n = example
    batches: list[Batch] = []
    for count in counts:
        begin = sum(len(batch) for batch in batches)
        batches.append(list(range(begin, begin + count)))
    total = sum(counts)
    got = spread(Rebalance(), batches, n, subtask)
    assert got == [[value for value in range(total) if (value + subtask) % n == target] for target in range(n)]


@pytest.mark.parametrize(
    ("chosen", "subtask"), [(0, 0), (4, 1), (-1, 2), (-7, 2), (2**70, 1), (np.int8(-2), 1), (True, 1)]
)
def test_a_function_s_whole_number_is_taken_modulo_the_subtasks(chosen: Any, subtask: int) -> None:
    """Negative hashes, or numbers of more than 64 bits, failed or went to another subtask."""
    [(target, _)] = ByFunction(lambda _: chosen).splitter(0, 3)([1])
    assert target == subtask


@pytest.mark.parametrize("kind", [list, np.array])
def test_a_tolerant_key_sends_only_the_records_without_a_good_one_to_the_first_subtask(kind: Any) -> None:
    """One bad key removed all records of its batch, instead of the one that the next step rejects by its policy."""
    values = [7, 0, 3, 5, 0, 11]

    def key_of(record: Any) -> Any:
        return 1.5 if record == 0 else f"user-{record}"

    owners = {
        value: subtask
        for value in (7, 3, 5, 11)
        for subtask, _ in ByKey(lambda record: f"user-{record}").splitter(0, 4)([value])
    }
    assert len(set(owners.values()) | {0}) > 2
    for _ in range(2):
        parts = dict(ByKey(key_of, tolerant=True).splitter(0, 4)(kind(values)))
        assert {subtask: [*map(int, part)] for subtask, part in parts.items()} == {
            subtask: [value for value in values if owners.get(value, 0) == subtask]
            for subtask in sorted({0, *owners.values()})
        }
    with pytest.raises(PlainDataError):
        ByKey(key_of).splitter(0, 4)(kind(values))


def test_a_tolerant_key_that_is_good_splits_like_any_other() -> None:
    """Good records went to another subtask, and so to another state, when bad records were allowed."""
    values = np.arange(-40, 40)
    key = ByKey(lambda record: int(record) % 11)
    tolerant = ByKey(lambda record: int(record) % 11, tolerant=True)
    assert spread(tolerant, [values], 4) == spread(key, [values], 4)


def test_forward_keeps_the_subtask_and_broadcast_shares_the_batch() -> None:
    """A copy for each consumer multiplied the memory of a large model by the parallelism."""
    batch = np.arange(3)
    assert list(Forward().splitter(2, 4)(batch)) == [(2, batch)]
    assert all(part is batch for _, part in Broadcast().splitter(0, 3)(batch))


def test_a_batch_that_goes_to_one_subtask_is_not_copied() -> None:
    """A batch with one skewed key, a common case, was copied."""
    batch = np.arange(3)
    [(_, part)] = ByKey(lambda _: 1).splitter(0, 4)(batch)
    assert np.shares_memory(part, batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in PARTITIONINGS if name != "broadcast"])
def test_an_empty_batch_is_sent_to_no_subtask(name: str, kind: str) -> None:
    """Batches without records were sent, and cost as much as batches with records."""
    assert list(PARTITIONINGS[name].splitter(0, 3)(KINDS[kind]([]))) == []


def test_turns_resume_with_the_subtask_of_a_snapshot() -> None:
    """After a restore the next record was sent to another subtask than without the restore."""
    turns = Turns(0, 3)
    turns.following = 2
    assert [(subtask, list(part)) for subtask, part in turns([7, 8])] == [(2, [7]), (0, [8])]
    assert turns.following == 1
