"""How requests are cut into blocks, compared with a loop over all columns."""

from itertools import pairwise, product
from random import Random

import numpy as np
import pytest
from support.examples import random_examples

from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning, Slice

Settings = tuple[int, int, int, tuple[int, int] | None]
"""Rows, columns, shards, block."""


def _settings(random: Random) -> Settings:
    """Return random settings with at most a few hundred blocks; a test below has more."""
    columns = random.choice((1, 2, 3, 10, 97, 2000))
    widths = [width for width in (1, 2, 3, 40, 700, 5000) if columns <= 10 * width]
    block = (random.randint(1, 12), random.choice(widths)) if random.random() < 0.8 else None
    return random.randint(1, 9), columns, random.randint(1, 7), block


def _partitioning(rows: int, columns: int, shards: int, block: tuple[int, int] | None) -> MatrixPartitioning:
    return MatrixPartitioning(Matrix("w", rows=rows, columns=columns, block=block), shards)


@random_examples(_settings)
def test_blocks_cover_each_number_once(given_settings: Settings) -> None:
    """The remainder at the right border belonged to no block, and was never stored."""
    rows, columns, _, block = given_settings
    partitioning = _partitioning(*given_settings)
    covered = np.zeros((rows, columns), int)
    for number, part in enumerate(partitioning.blocks):
        assert part.number == number
        covered[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop] += 1
        if block is not None:
            assert len(part.rows) <= block[0]
            assert len(part.columns) <= block[1]
    assert (covered == 1).all()
    for row in range(rows):
        of_row = partitioning.blocks_of_row(row)
        assert list(of_row) == [part for part in partitioning.blocks if row in part.rows]
        assert all(left.columns.stop == right.columns.start for left, right in pairwise(of_row))


@random_examples(_settings)
def test_neighbours_share_a_shard_and_shards_have_equal_numbers_of_blocks(given_settings: Settings) -> None:
    """One shard had twice the blocks of the others, and all calls waited for it."""
    shards = given_settings[2]
    blocks = _partitioning(*given_settings).blocks
    order = [block.shard for block in blocks]
    assert order == sorted(order)
    counts = [order.count(shard) for shard in range(shards)]
    assert sum(counts) == len(blocks)
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("columns", "shards"), [(10, 2), (11, 2), (1_000_000, 7), (3, 5), (1, 4)])
def test_without_a_block_size_each_shard_has_one_block(columns: int, shards: int) -> None:
    """A shard with two blocks got two slices of each request."""
    blocks = _partitioning(3, columns, shards, None).blocks
    assert [block.shard for block in blocks] == [number * shards // len(blocks) for number in range(len(blocks))]
    assert len(blocks) == min(columns, shards)
    assert all(block.rows == range(3) for block in blocks)
    widths = [len(block.columns) for block in blocks]
    assert max(widths) == widths[0]
    assert min(widths) == widths[-1]


ORDERS = ["as drawn", "ascending", "descending", "all the same", "nearly ascending"]


def settings_and_keys(random: Random) -> tuple[Settings, int, list[int], str]:
    """Return settings, a row, its columns, and the order in which the columns are given."""
    settings = _settings(random)
    columns = [random.randrange(settings[1]) for _ in range(random.randrange(31))]
    return settings, random.randrange(10), columns, random.choice(ORDERS)


@random_examples(settings_and_keys)
def test_keys_are_split_as_by_a_loop(example: tuple[Settings, int, list[int], str]) -> None:
    """A value went to the column of another value, because positions and columns were ordered differently."""
    given_settings, row, given_columns, order = example
    rows = given_settings[0]
    columns = _ordered(np.array(given_columns, np.int64), order)
    before = columns.copy()
    partitioning = _partitioning(*given_settings)
    slices = partitioning.split(row % rows, columns)
    np.testing.assert_array_equal(columns, before)
    expected = [
        (block.number, positions)
        for block in partitioning.blocks_of_row(row % rows)
        if (positions := [at for at, column in enumerate(columns.tolist()) if column in block.columns])
    ]
    assert [(part.block.number, _positions(part, len(columns))) for part in slices] == expected
    _check_columns(slices, columns)


def _ordered(columns: np.ndarray, order: str) -> np.ndarray:
    match order:
        case "ascending":
            columns.sort()
        case "descending":
            columns[::-1].sort()
        case "all the same":
            columns[:] = columns[:1] if len(columns) else 0
        case "nearly ascending" if len(columns) > 4:
            columns.sort()
            columns[1:4] = columns[3:0:-1]
    return columns


def _positions(part: Slice, count: int) -> list[int]:
    return np.arange(count)[part.positions].tolist()


def _check_columns(slices: list[Slice], columns: np.ndarray) -> None:
    for part in slices:
        assert part.columns is not None
        assert part.columns.dtype == np.int64
        np.testing.assert_array_equal(part.columns, columns[part.positions])


@pytest.mark.parametrize(("blocks", "is_sorted"), list(product([1, 2, 3, 4, 5, 300, 70_000], [False, True])))
def test_many_keys_are_split_over_few_blocks_and_many(blocks: int, is_sorted: bool) -> None:
    """One of the five ways to split failed, or a block number did not fit into one or two bytes."""
    width = 70_000 * 3
    partitioning = _partitioning(1, width, 2, (1, -(-width // blocks)))
    columns = np.random.default_rng(blocks).integers(0, width, 20_000)
    if is_sorted:
        columns.sort()
    slices = partitioning.split(0, columns)
    _check_columns(slices, columns)
    numbers = [part.block.number for part in slices]
    assert numbers == sorted(set(numbers))
    for part in slices:
        assert part.columns is not None
        assert part.columns.min() in part.block.columns
        assert part.columns.max() in part.block.columns
        assert np.all(np.diff(_positions(part, len(columns))) > 0)
    values = np.empty(20_000, np.int64)
    for part in slices:
        values[part.positions] = part.columns
    np.testing.assert_array_equal(values, columns)
    assert sum(len(part.columns) for part in slices if part.columns is not None) == 20_000


@pytest.mark.parametrize("block", [None, (1, 5), (2, 4), (1, 1)])
def test_a_whole_row_is_split_without_naming_its_columns(block: tuple[int, int] | None) -> None:
    """A pull of ten million numbers made an array of ten million column numbers."""
    partitioning = _partitioning(3, 11, 2, block)
    slices = partitioning.split(2, None)
    assert all(part.columns is None for part in slices)
    assert [part.block for part in slices] == list(partitioning.blocks_of_row(2))
    assert [_positions(part, 11) for part in slices] == [list(part.block.columns) for part in slices]


@pytest.mark.parametrize("block", [None, (1, 3)])
def test_keys_in_order_are_not_copied(block: tuple[int, int] | None) -> None:
    """Keys in order were copied, although a view costs nothing."""
    partitioning = _partitioning(1, 1000, 4, block)
    columns = np.arange(0, 1000, 10)
    for part in partitioning.split(0, columns):
        assert part.columns is not None
        assert np.shares_memory(part.columns, columns)
        assert isinstance(part.positions, slice)


def test_an_empty_list_of_keys_is_sent_to_no_shard() -> None:
    """An empty batch sent an empty request to every shard and waited for all replies."""
    for shards in (1, 4):
        assert _partitioning(2, 1000, shards, None).split(1, np.empty(0, np.int64)) == []
