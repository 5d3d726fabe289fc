"""Rows, columns and first values of a matrix; ``refusals.txt`` has those that are refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from streamiter.errors import ParameterServerError
from streamiter.parameter_server import ParameterServer, psf
from streamiter.parameter_server.matrix import BlockRange, Matrix, MatrixPartitioning
from streamiter.parameter_server.storage.block import Block

_PARTITIONING = MatrixPartitioning(Matrix("w", rows=3, columns=300), shards=2)


def test_columns_of_the_right_kind_are_not_copied() -> None:
    """A copy of ten thousand keys took as long as their lookup."""
    columns = np.array([299, 0, 5, 5], np.int64)
    assert _PARTITIONING.checked_columns(columns) is columns
    strided = np.arange(300)[::-3]
    assert _PARTITIONING.checked_columns(strided) is strided


@pytest.mark.parametrize(
    "columns",
    [
        [4, 0, 299],
        (4, 0, 299),
        np.array([4, 0, 299], np.int32),
        np.array([4, 0, 299], np.uint16),
        np.array([4, 0, 200], np.uint8),
        np.array([4, 0, 299], np.uint64),
        np.array([4, 0, 299], ">i8"),
    ],
)
def test_whole_numbers_of_any_kind_are_columns(columns: Any) -> None:
    """Columns from pandas, libsvm readers or lists have many dtypes, and some were refused."""
    checked = _PARTITIONING.checked_columns(columns)
    assert checked.dtype == np.int64
    assert checked.dtype.isnative
    assert checked.tolist() == list(columns)


@pytest.mark.parametrize("columns", [[], (), np.empty(0, np.int64), np.empty(0, np.int32), range(0)])
def test_an_empty_list_of_columns_is_accepted(columns: Any) -> None:
    """An empty list becomes a numpy array of floats, which was refused."""
    checked = _PARTITIONING.checked_columns(columns)
    assert checked.dtype == np.int64
    assert checked.shape == (0,)


@pytest.mark.parametrize("row", [0, 2, np.int64(0), np.int64(2), np.uint8(1)])
def test_a_row_is_a_whole_number(row: Any) -> None:
    """A row from an array, which is a numpy integer, was refused."""
    checked = _PARTITIONING.checked_row(row)
    assert type(checked) is int
    assert checked == row
    assert _PARTITIONING.checked_rows(iter([row, 1])) == [row, 1]


@pytest.mark.parametrize("init", [1.0, [1.0, 2.0], [[1.0, 2.0], [3.0, 4.0]], np.float32(1), np.arange(2)])
async def test_first_values_reach_every_block(init: Any) -> None:
    """Blocks started with the numbers of other blocks."""
    async with ParameterServer(shards=2) as server:
        for dtype in ("float64", "int64"):
            await server.create_matrix(dtype, rows=2, columns=2, dtype=dtype, init=init)
            found = await server.aggregate(psf.FullPull(dtype))
            np.testing.assert_array_equal(found, np.broadcast_to(np.asarray(init, dtype), (2, 2)))
            assert found.dtype == dtype


@dataclass(frozen=True)
class FailsOnTheLast(psf.UpdateFunction):
    """Fails on the last of four columns."""

    matrix: str

    def rows(self, matrix: Matrix) -> Sequence[int]:
        return (0,)

    def split(self, matrix: Matrix, partitioning: MatrixPartitioning) -> list[tuple[BlockRange, Any]]:
        return [(block, block.columns.stop) for block in partitioning.blocks_of_row(0)]

    def partition_update(self, block: Block, part: int) -> None:
        if part == 4:
            raise ValueError("no value for column 3")
        block.put(0, None, np.ones(2))


async def test_a_matrix_that_one_shard_cannot_make_is_on_no_shard() -> None:
    """The matrix stayed, empty, on the shards before the failure, and the next try was refused."""
    async with ParameterServer(shards=2) as server:
        with pytest.raises(ParameterServerError, match="no value for column 3"):
            await server.create_matrix("w", rows=1, columns=4, init=FailsOnTheLast("w"))
        assert server.matrices == []
        assert not any(shard.matrices for shard in server.statistics().shards)
        await server.create_matrix("w", rows=2, columns=4, init=3.0)
        assert (await server.aggregate(psf.Sum("w", row=1))) == 12


async def test_settings_are_the_same_however_they_are_written() -> None:
    """A second worker gave the same block as a list and was refused."""
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=2, columns=4, block=(1, 2))
        await server.create_matrix("w", rows=np.int64(2), columns=np.int32(4), block=[1, np.int64(2)])
        await server.create_matrix("v", rows=np.int64(2), columns=np.int32(4))
        settings = (await server.snapshot())["matrices"]["v"]["settings"]
        assert [type(settings[name]) for name in ("rows", "columns")] == [int, int]
