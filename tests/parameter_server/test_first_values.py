"""Initial values and settings of a matrix; ``refusals.txt`` has those that are refused before a shard makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from streamiter.errors import ParameterServerError
from streamiter.parameter_server import ParameterServer, psf
from streamiter.parameter_server.matrix import BlockRange, Matrix, MatrixPartitioning
from streamiter.parameter_server.storage.block import Block


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
