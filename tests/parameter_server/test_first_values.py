"""Initial values and functions of a matrix are checked before any shard makes the matrix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from streamiter.errors import ConfigurationError, OutOfRange, ParameterServerError, RowsInDifferentBlocks
from streamiter.optimizers import SGD
from streamiter.parameter_server import ParameterServer, psf
from streamiter.parameter_server.matrix import BlockRange, Matrix, MatrixPartitioning
from streamiter.parameter_server.storage.block import Block

FUNCTIONS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (psf.Fill("v", row=0, value=1.0), {}, ParameterServerError, "Fill: expected matrix 'w', given 'v'"),
    (psf.Fill("w", row=2, value=1.0), {}, OutOfRange, "expected a whole number from 0 to 1, given 2"),
    (psf.Axpy("w", 0, 1, 1.0), {"block": (1, 4)}, RowsInDifferentBlocks, "Axpy on matrix 'w': expected rows of one"),
    (psf.Optimize("w", SGD(0.5)), {"dtype": "int64"}, ParameterServerError, "expected a matrix of float32 or float64"),
]


@pytest.mark.parametrize("setting", ["init", "on_clock"])
@pytest.mark.parametrize(("function", "settings", "error", "message"), FUNCTIONS)
async def test_a_function_that_does_not_fit_is_refused_and_nothing_is_made(
    setting: str, function: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    """A function of a missing row did nothing silently; others failed at another worker's clock."""
    async with ParameterServer(shards=2) as server:
        with pytest.raises(error, match=message):
            await server.create_matrix("w", rows=2, columns=4, **settings, **{setting: function})
        await server.create_matrix("w", rows=2, columns=4)
        assert await server.aggregate(psf.Size("w", row=0)) == 4


@pytest.mark.parametrize("init", [[1.0, 2.0], "abc", [[1.0], [2.0]], [[1.0], [2.0, 3.0]], [psf.Eye, 1.0]])
async def test_first_values_of_another_shape_or_kind_are_refused(init: Any) -> None:
    """A shard raised numpy's broadcasting error, and the matrix was half made."""
    async with ParameterServer(shards=2) as server:
        with pytest.raises(ConfigurationError, match="matrix 'w', init=: expected numbers of float64"):
            await server.create_matrix("w", rows=2, columns=4, init=init)


async def test_fractions_are_refused_for_whole_numbers() -> None:
    """1.5 was silently stored as 1."""
    async with ParameterServer() as server:
        with pytest.raises(ConfigurationError, match=r"given 1\.5"):
            await server.create_matrix("w", rows=1, columns=2, dtype="int64", init=1.5)
        await server.create_matrix("w", rows=1, columns=2, dtype="int64", init=2.0)
        assert (await server.aggregate(psf.Pull("w", row=0))).tolist() == [2, 2]


@pytest.mark.parametrize("init", [1e30, np.inf, [1.0, -1e19], [1, 1 << 63], np.full(2, 1 << 63, np.uint64)])
async def test_numbers_that_64_bits_do_not_hold_are_refused_for_whole_numbers(init: Any) -> None:
    """Too large numbers were stored as −9,223,372,036,854,775,808."""
    async with ParameterServer() as server:
        with pytest.raises(ConfigurationError, match="init=: expected numbers of int64"):
            await server.create_matrix("w", rows=1, columns=2, dtype="int64", init=init)


@pytest.mark.parametrize("init", [1.0, [1.0, 2.0], [[1.0, 2.0], [3.0, 4.0]], np.float32(1), np.arange(2)])
async def test_first_values_reach_every_block(init: Any) -> None:
    """Blocks started with the numbers of other blocks."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=2, columns=2, init=init)
        found = await server.client(worker=0).get("w", rows=[0, 1])
        np.testing.assert_array_equal(found, np.broadcast_to(np.asarray(init, float), (2, 2)))


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


async def test_an_aggregate_is_refused_as_on_clock() -> None:
    """The matrix was made, and each of its clocks failed."""
    async with ParameterServer() as server:
        with pytest.raises(ConfigurationError, match="on_clock=: expected a psf that changes parameters"):
            await server.create_matrix("w", rows=1, columns=2, on_clock=psf.Sum("w", row=0))


async def test_a_block_that_is_no_pair_is_refused() -> None:
    """A block that was no pair raised a TypeError about unpacking."""
    async with ParameterServer() as server:
        with pytest.raises(ConfigurationError, match=r"block=: expected \(rows, columns\), given 5"):
            await server.create_matrix("w", rows=1, columns=2, block=5)


@pytest.mark.parametrize(
    ("setting", "given", "message"),
    [
        ("sparse", "no", "expected True or False, given 'no'"),
        ("dtype", np.dtype("float32"), r"expected one of float32, float64, int64, given dtype\('float32'\)"),
    ],
)
async def test_a_setting_of_another_type_is_refused(setting: str, given: Any, message: str) -> None:
    """The string "no" made a sparse matrix; a numpy dtype was accepted, and the first checkpoint failed."""
    async with ParameterServer() as server:
        with pytest.raises(ConfigurationError, match=f"matrix 'w', {setting}=: {message}"):
            await server.create_matrix("w", rows=1, columns=2, **{setting: given})


async def test_settings_are_the_same_however_they_are_written() -> None:
    """A second worker gave the same block as a list and was refused."""
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=2, columns=4, block=(1, 2))
        await server.create_matrix("w", rows=np.int64(2), columns=np.int32(4), block=[1, np.int64(2)])
        await server.create_matrix("v", rows=np.int64(2), columns=np.int32(4))
        settings = (await server.snapshot())["matrices"]["v"]["settings"]
        assert [type(settings[name]) for name in ("rows", "columns")] == [int, int]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"default": psf.RandomUniform("v", 0, 0.0, 1.0, seed=1)},
            ParameterServerError,
            "expected matrix 'w', given 'v'",
        ),
        ({"default": psf.RandomUniform("w", 2, 0.0, 1.0, seed=1)}, OutOfRange, "from 0 to 1, given 2"),
        (
            {"default": psf.RandomUniform("w", 0, 0.0, 1.0, seed=1), "dtype": "int64"},
            ParameterServerError,
            "expected a matrix of float32 or float64",
        ),
        (
            {"default": psf.RandomUniform("w", 0, 0.0, 1.0, seed=1), "sparse": False},
            ConfigurationError,
            "random numbers such as psf.RandomNormal(…), and sparse=True where it is not 0, given RandomUniform",
        ),
        ({"default": psf.Fill("w", 0, 1.0)}, ConfigurationError, "expected a number or random numbers such as"),
        (
            {"default": psf.RandomUniform("w", None, 0.0, 1.0, seed=1), "on_clock": psf.Optimize("w", SGD(0.5))},
            ParameterServerError,
            "expected default=0.0, the first value of gradients and slots, given RandomUniform",
        ),
        ({"vector": 3}, ConfigurationError, "whole vectors, given vector=3, sparse=True, columns=4, block=None"),
        ({"vector": 2, "block": (2, 3)}, ConfigurationError, r"given vector=2, .* block=(2, 3)"),
        ({"vector": 2, "sparse": False}, ConfigurationError, "given vector=2, sparse=False"),
        ({"vector": 0}, ConfigurationError, "vector=: expected a whole number of at least 1, given 0"),
    ],
)
async def test_drawn_defaults_and_vectors_that_do_not_fit_are_refused(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    """A matrix whose vectors were cut by a block gave numbers of another feature."""
    async with ParameterServer(shards=2) as server:
        with pytest.raises(error, match=re.escape(message).replace(r"\.\*", ".*")):
            await server.create_matrix("w", **{"rows": 2, "columns": 4, "sparse": True, **settings})


@pytest.mark.parametrize(
    ("dtype", "default"),
    [
        ("float64", float("nan")),
        ("float64", "0"),
        ("float32", 10**400),
        ("int64", 0.5),
        ("int64", float("inf")),
        ("int64", 1e30),
        ("int64", 1 << 63),
    ],
)
async def test_a_default_that_columns_cannot_be_compared_with_is_refused(dtype: Any, default: Any) -> None:
    """A default of 0.5 for a matrix of whole numbers silently became 0."""
    async with ParameterServer() as server:
        with pytest.raises(ConfigurationError, match=re.escape(f"given {default!r}")):
            await server.create_matrix("w", rows=1, columns=4, dtype=dtype, sparse=True, default=default)
        await server.create_matrix("w", rows=1, columns=4, dtype=dtype, sparse=True, default=2.0)
        assert (await server.aggregate(psf.Sum("w", row=0))) == 8
