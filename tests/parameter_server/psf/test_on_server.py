"""Psfs on a server with clients and shards."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from parameter_server.psf import aggregate_cases, update_cases
from parameter_server.psf.on_blocks import COLUMNS, ROWS, Fixture
from parameter_server.psf.test_contract import ids

from streamiter.errors import OutOfRange, ParameterServerError
from streamiter.parameter_server import ParameterServer, psf
from streamiter.parameter_server.divided import importable
from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning
from streamiter.parameter_server.optimizers import SGD
from streamiter.parameter_server.requests import AggregateRequest, UpdateRequest
from streamiter.parameter_server.storage.block import Block, BlockRow

FIXTURES = (Fixture("dense", "float64"), Fixture("sparse", "float64", default=2.5, density=0.3))


def settings(fixture: Fixture, **others: Any) -> dict[str, Any]:
    return {
        "rows": ROWS,
        "columns": COLUMNS,
        "dtype": fixture.dtype,
        "sparse": fixture.default is not None,
        "default": fixture.default or 0.0,
        "init": fixture.values(),
        **others,
    }


@pytest.mark.parametrize(
    ("fixture", "shards"),
    [(FIXTURES[0], 1), (FIXTURES[1], 2), (FIXTURES[0], 3), (FIXTURES[1], 3)],
    ids=lambda value: getattr(value, "name", None),
)
async def test_every_psf_gives_on_shards_what_numpy_gives(fixture: Fixture, shards: int) -> None:
    """A psf that was right on blocks was split, sent or merged wrongly."""
    async with ParameterServer(shards=shards) as server:
        client = server.client(worker=0)
        for name, case in zip(ids(update_cases.CASES), update_cases.CASES, strict=True):
            matrix = f"w {name}"
            await server.create_matrix(matrix, **settings(fixture))
            expected = fixture.values()
            with np.errstate(all="ignore"):
                case.expected(expected)
            function = _on(case.function, matrix)
            await client.update(function)
            np.testing.assert_allclose(
                await client.get(matrix, rows=range(ROWS)), expected, rtol=1e-6, atol=1e-6, err_msg=str(function)
            )
        await server.create_matrix("w", **settings(fixture))
        for aggregate in aggregate_cases.CASES:
            given = await client.aggregate(aggregate.function)
            wanted = aggregate.expected(fixture.values(), fixture.default)
            if isinstance(given, BlockRow):
                given = given.columns
            np.testing.assert_allclose(given, wanted, rtol=1e-6, atol=1e-6, err_msg=str(aggregate.function))


def _on(function: Any, matrix: str) -> Any:
    return type(function)(**{**vars(function), "matrix": matrix})


async def test_blocks_on_different_shards_must_agree_before_one_changes() -> None:
    """Each shard compared only its own blocks, and each found one default."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=2, columns=10, sparse=True)
        client = server.client(worker=0)
        with pytest.raises(ParameterServerError, match=r"given 0\.0 for column 0 and 1\.0 for column 5"):
            await client.update(psf.MapWithIndex("w", 0, 1, lambda i, x: i // 5 + 0 * x))
        assert (await client.get("w", row=1)).tolist() == [0.0] * 10


@dataclass(frozen=True)
class NamesNoRows(psf.UpdateFunction):
    """Runs on all blocks, and changes row 0."""

    matrix: str

    def partition_update(self, block: Block, part: Any) -> None:
        if block.is_sparse:
            block.replace_row(0, BlockRow(np.array([block.columns.start]), np.ones(1), 0.0))
        else:
            block.dense_row(0)[:] = 1.0


@dataclass(frozen=True)
class NamesOneColumn(psf.UpdateFunction):
    """Runs on all blocks of row 0, and changes columns 0 and 1."""

    matrix: str

    def rows(self, matrix: Matrix) -> Sequence[int]:
        return (0,)

    def partition_update(self, block: Block, part: Any) -> None:
        block.add(0, np.array([0, 1]), np.ones(2))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            NamesNoRows("w"),
            r"NamesNoRows on matrix 'w': expected a row of the block, 2 to 3, given 0; let its rows\(\)",
        ),
        (NamesOneColumn("w"), r"NamesOneColumn on matrix 'w': expected columns of the block, 2 to 3, given 0; take"),
    ],
)
async def test_a_function_of_a_user_cannot_change_other_blocks(
    function: psf.UpdateFunction, message: str, sparse: bool
) -> None:
    """In the block of rows 2 and 3, row 0 silently meant row 2, and column 0 meant column 2."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=4, columns=4, sparse=sparse, block=(2, 2))
        with pytest.raises(OutOfRange, match=message):
            await server.update(function)
        values = await server.client(worker=0).get("w", rows=range(4))
        assert not values[1:].any()
        assert not values[0, 2:].any() or isinstance(function, NamesNoRows)


async def test_functions_of_a_user_work_on_their_block() -> None:
    """A user's optimizer addressed the wrong columns of its block, or did not count its steps."""

    class Second(psf.Optimize):
        def partition_update(self, block: Block, part: Any) -> None:
            super().partition_update(block, part)
            block.put(0, np.array([block.columns.start]), np.array([float(block.updates)]))

    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=2, columns=4)
        for _ in range(2):
            await server.update(Second("w", SGD(0.5)))
        assert (await server.aggregate(psf.Pull("w", row=0))).tolist() == [2.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("function", "at_most"),
    [
        (psf.CompressUpdate("w", 0, np.linspace(-1.0, 1.0, 10_000)), 1 * 10_000),
        (psf.Push("w", 0, np.linspace(-1.0, 1.0, 10_000)), 8 * 10_000),
        (psf.Diag("w", [1.0]), 8),
        (psf.Pull("w", 0, np.arange(5_000)), 8 * 5_000),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_arrays_of_a_function_are_sent_once_to_the_shards_that_need_them(function: Any, at_most: int) -> None:
    """Each shard received the whole array of a function in addition to its part, so compression saved nothing."""
    matrix = Matrix("w", rows=1, columns=10_000)
    partitioning = MatrixPartitioning(matrix, shards=4)
    sent_bytes = 0
    for block, part in function.split(matrix, partitioning):
        kind = UpdateRequest if isinstance(function, psf.UpdateFunction) else AggregateRequest
        request = importable(kind("w", 0, -1, [(block.number, part)], function))
        assert request.function == function.without_arrays()
        sent_bytes += len(pickle.dumps(request))
    assert at_most <= sent_bytes <= at_most + 4 * 1_000
