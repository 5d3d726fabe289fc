"""Psfs through a server: client, shards and all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from parameter_server.psf import aggregate_cases, update_cases
from parameter_server.psf.on_blocks import COLUMNS, ROWS, Fixture
from parameter_server.psf.test_contract import ids

from streamiter.errors import OutOfRange, ParameterServerError, RowsInDifferentBlocks
from streamiter.parameter_server import ParameterServer, psf
from streamiter.parameter_server.storage.block import SparseRow

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


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("fixture", FIXTURES, ids=[fixture.name for fixture in FIXTURES])
async def test_every_psf_gives_on_shards_what_numpy_gives(fixture: Fixture, shards: int) -> None:
    """A psf that is right on blocks may be split, sent and merged wrongly."""
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
                await client.get(matrix, rows=range(ROWS)),
                expected,
                rtol=1e-6,
                atol=1e-6,
                err_msg=str(function),
            )
        await server.create_matrix("w", **settings(fixture))
        for aggregate in aggregate_cases.CASES:
            given = await client.aggregate(aggregate.function)
            wanted = aggregate.expected(fixture.values(), fixture.default)
            if isinstance(given, SparseRow):
                given = given.columns
            np.testing.assert_allclose(given, wanted, rtol=1e-6, atol=1e-6, err_msg=str(aggregate.function))


def _on(function: Any, matrix: str) -> Any:
    return type(function)(**{**vars(function), "matrix": matrix})


async def test_blocks_on_different_shards_must_agree_before_any_changes() -> None:
    """Each shard asked its own blocks only, and both found one default each."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=2, columns=10, sparse=True)
        client = server.client(worker=0)
        with pytest.raises(ParameterServerError, match=r"given 0\.0 for column 0 and 1\.0 for column 5"):
            await client.update(psf.MapWithIndex("w", 0, 1, lambda i, x: i // 5 + 0 * x))
        assert (await client.get("w", row=1)).tolist() == [0.0] * 10


async def test_rows_that_are_not_there_or_apart_are_refused() -> None:
    """A row id that did not exist was a silent no-op."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=4, columns=10, block=(2, 5))
        client = server.client(worker=0)
        with pytest.raises(OutOfRange):
            await client.update(psf.Fill("w", 4, 1.0))
        with pytest.raises(RowsInDifferentBlocks):
            await client.update(psf.Axpy("w", x=1, y=2, a=1.0))
        with pytest.raises(RowsInDifferentBlocks):
            await client.aggregate(psf.Dot("w", 1, 2))
