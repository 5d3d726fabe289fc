"""A wrong call is refused with the expected and the given value; it changes nothing, and no call waits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_S

from streamiter.errors import (
    ConfigurationError,
    OutOfRange,
    OutOfTurn,
    ParameterServerError,
    RowsInDifferentBlocks,
    StreamiterError,
    UnknownMatrix,
    WorkerHasLeft,
)
from streamiter.parameter_server import BSP, Client, ParameterServer, psf

Call = Callable[[Client], Awaitable[Any]]


def raise_value_error(x: Any) -> Any:
    raise ValueError("not for these")


def only_small(x: Any) -> Any:
    return x if x.max() < 9 else raise_value_error(x)


WRONG_CALLS: dict[str, tuple[Call, type[StreamiterError], str]] = {
    "get of no matrix": (lambda client: client.get("v", row=0), UnknownMatrix, r"expected one of 'w', given 'v'"),
    "clock of no matrix": (lambda client: client.clock("v"), UnknownMatrix, r"expected one of 'w', given 'v'"),
    "function on no matrix": (
        lambda client: client.update(psf.Fill("v", row=0, value=1)),
        UnknownMatrix,
        r"expected one of 'w', given 'v'",
    ),
    "row too high": (lambda client: client.get("w", row=4), OutOfRange, "from 0 to 3, given 4"),
    "row below 0": (lambda client: client.add("w", row=-1, values=1), OutOfRange, "from 0 to 3, given -1"),
    "one of the rows": (lambda client: client.get("w", rows=[0, 9]), OutOfRange, "from 0 to 3, given 9"),
    "rows that are one number": (
        lambda client: client.get("w", rows=2),  # type: ignore[arg-type]
        OutOfRange,
        "expected a list of rows, given 2",
    ),
    "neither row nor rows": (lambda client: client.get("w"), ParameterServerError, "row= or rows=, given neither"),
    "both row and rows": (
        lambda client: client.add("w", row=0, rows=[1], values=1),
        ParameterServerError,
        "row= or rows=, given both",
    ),
    "column too high": (
        lambda client: client.add("w", row=0, columns=[1, 6], values=1),
        OutOfRange,
        "from 0 to 5, given 6 at position 1",
    ),
    "columns that are no whole numbers": (
        lambda client: client.get("w", row=0, columns=[0.5]),
        OutOfRange,
        "whole numbers, given dtype float64",
    ),
    "too few values": (
        lambda client: client.add("w", row=0, values=[1, 2]),
        ParameterServerError,
        r"shape \(6,\).*given shape \(2,\)",
    ),
    "values of one row for two": (
        lambda client: client.add("w", rows=[0, 1], columns=[3, 4], values=[1, 2]),
        ParameterServerError,
        r"shape \(2, 2\).*given shape \(2,\)",
    ),
    "values of different lengths": (
        lambda client: client.add("w", rows=[0, 1], columns=[3, 4], values=[[1], [1, 2]]),
        ParameterServerError,
        r"shape \(2, 2\), given lists of different lengths",
    ),
    "values that are no numbers": (
        lambda client: client.add("w", row=0, columns=[0], values=["1"]),
        ParameterServerError,
        "expected values of float64, given <U1",
    ),
    "array of another width": (
        lambda client: client.update(psf.Put("w", row=0, values=[1.0])),
        ParameterServerError,
        "values=: expected 6 numbers, one for each column, given 1",
    ),
    "rows in different blocks": (
        lambda client: client.update(psf.Copy("w", source=1, to=2)),
        RowsInDifferentBlocks,
        r"one row block \(2 rows each\), given rows 1, 2.*block=\(4, 3\)",
    ),
    "aggregate of rows in different blocks": (
        lambda client: client.aggregate(psf.Dot("w", first=0, second=3)),
        RowsInDifferentBlocks,
        "given rows 0, 3",
    ),
    "aggregate to update with": (
        lambda client: client.update(psf.Sum("w", row=0)),  # type: ignore[arg-type]
        ParameterServerError,
        r"expected a psf such as psf\.Axpy.*given Sum",
    ),
    "aggregate fused with an add": (
        lambda client: client.add("w", row=0, values=1, update=psf.Sum("w", row=0)),  # type: ignore[arg-type]
        ParameterServerError,
        r"expected a psf such as psf\.Axpy.*given Sum",
    ),
    "no function fused with an add": (
        lambda client: client.add_get("w", row=0, values=1, update=abs),  # type: ignore[arg-type]
        ParameterServerError,
        r"expected a psf such as psf\.Axpy.*given <built-in function abs>",
    ),
    "function of another matrix fused with an add": (
        lambda client: client.add("w", row=0, values=1, update=psf.Scale("v", row=0, scalar=2)),
        ParameterServerError,
        "expected matrix 'w', given 'v'",
    ),
    "function that fails fused with an add": (
        lambda client: client.add("w", row=0, values=1, update=psf.Map("w", 0, 1, raise_value_error)),
        ParameterServerError,
        "given ValueError: not for these",
    ),
    "function that fails on the last block fused with an add": (
        lambda client: client.start_add("w", row=1, values=1, update=psf.Map("w", 1, 0, only_small)),
        ParameterServerError,
        "given ValueError: not for these",
    ),
    "barrier that is not the next": (
        lambda client: client.barrier(3),
        OutOfTurn,
        "expected barrier 0, given barrier 3",
    ),
    "barrier without a number": (
        lambda client: client.barrier("first"),  # type: ignore[arg-type]
        OutOfTurn,
        "of at least 0, given 'first'",
    ),
    "barrier below 0": (lambda client: client.barrier(-1), OutOfTurn, "of at least 0, given -1"),
    "other settings": (
        lambda client: client.create_matrix("w", rows=3, columns=6),
        ParameterServerError,
        "rows=3 instead of rows=4",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_CALLS)
async def test_a_wrong_call_says_what_was_expected_and_given_and_changes_nothing(wrong: str) -> None:
    """An add with a wrong function was applied on one of two shards, and the error named an attribute."""
    call, error, message = WRONG_CALLS[wrong]
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=4, columns=6, block=(2, 3))
        client = server.client(worker=0)
        await client.add("w", rows=[0, 1], columns=[0, 5], values=[[1.0, 2.0], [3.0, 9.0]])
        before = await client.get("w", rows=range(4))
        with pytest.raises(error, match=message) as raised:
            await asyncio.wait_for(call(client), PATIENCE_S)
        assert re.search("expected .*given ", str(raised.value))
        assert np.array_equal(await client.get("w", rows=range(4)), before)
        assert server.statistics().matrix("w").clocks == {"0": 0}


@pytest.mark.parametrize("values", [[1 << 63, 1 << 63], np.array([1, (1 << 64) - 1], np.uint64)])
async def test_values_that_64_bits_do_not_hold_are_refused_for_whole_numbers(values: Any) -> None:
    """Values above 2⁶³ were added as negative numbers."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=1, columns=2, dtype="int64")
        client = server.client(worker=0)
        with pytest.raises(ParameterServerError, match=rf"expected values of int64.* below 2\*\*63, given {values[1]}"):
            await client.add("w", row=0, values=values)
        await client.add("w", row=0, values=np.array([1, (1 << 63) - 1], np.uint64))
        assert (await client.get("w", row=0)).tolist() == [1, (1 << 63) - 1]


async def test_a_clock_does_not_fail_by_numbers_that_another_worker_added() -> None:
    """A numpy warning, raised as an error, ended the job of a worker whose numbers were small."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=1, columns=2, dtype="float32", consistency=BSP())
        large, small = server.client(worker=0), server.client(worker=1)
        for _ in range(2):
            await large.add("w", row=0, columns=[1], values=[3e38])
        await large.clock("w")
        await small.add("w", row=0, values=1.0)
        with np.errstate(all="raise"):
            assert await small.clock("w") == 1
        assert (await small.get("w", row=0)).tolist() == [1.0, np.inf]


async def test_statistics_of_a_missing_matrix_name_the_existing_matrices() -> None:
    """The error was a KeyError, which callers that handle the errors of a server did not catch."""
    async with ParameterServer(name="ps") as server:
        with pytest.raises(UnknownMatrix, match=r"ps, statistics of matrix 'v': expected one of none yet, given 'v'"):
            server.statistics().matrix("v")
        await server.create_matrix("w", rows=1, columns=4)
        with pytest.raises(UnknownMatrix, match=r"expected one of 'w', given 'v'; make it first"):
            server.statistics().matrix("v")


CALLS_OF_A_CLIENT: dict[str, Call] = {
    "get": lambda client: client.get("w", row=0),
    "start_get": lambda client: client.start_get("w", row=0),
    "add": lambda client: client.add("w", row=0, values=1.0),
    "start_add": lambda client: client.start_add("w", row=0, values=1.0),
    "add_get": lambda client: client.add_get("w", row=0, values=1.0),
    "clock": lambda client: client.clock("w"),
    "barrier": lambda client: client.barrier(),
    "update": lambda client: client.update(psf.Fill("w", row=0, value=1)),
    "aggregate": lambda client: client.aggregate(psf.Sum("w", row=0)),
    "create_matrix": lambda client: client.create_matrix("v", rows=1, columns=1),
}


@pytest.mark.parametrize("used_before", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("call", CALLS_OF_A_CLIENT)
async def test_every_call_of_a_client_that_has_left_raises_an_error(call: str, used_before: bool) -> None:
    """A gradient was added after its worker had left, and counted in a finished iteration."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=1, columns=4)
        client = server.client(worker=7)
        if used_before:
            await client.get("w", row=0)
        await client.leave()
        with pytest.raises(WorkerHasLeft, match=r"worker 7: expected .* takes part, given .*it has left"):
            await asyncio.wait_for(CALLS_OF_A_CLIENT[call](client), PATIENCE_S)
        with pytest.raises(WorkerHasLeft, match="worker 7"):
            client.heartbeat()
        assert (await server.aggregate(psf.Asum("w", row=0)), server.matrices) == (0.0, ["w"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_calls": 0}, r"client\(max_calls=\): expected a whole number of at least 1, given 0"),
        ({"cache_bytes": "1 MB"}, r"client\(cache_bytes=\): expected a whole number of at least 0, given '1 MB'"),
        ({"worker": "first"}, r"client\(worker=\): expected a whole number of at least 0, given 'first'"),
    ],
)
async def test_wrong_settings_of_a_client_are_refused_by_their_public_name(
    settings: dict[str, Any], message: str
) -> None:
    """The message named Outstanding(limit=), which the caller had not used, and the worker was registered."""
    async with ParameterServer() as server:
        with pytest.raises(ConfigurationError, match=message):
            server.client(**{"worker": 0, **settings})
        assert server.workers == []
        server.client(worker=0)


async def test_shards_stay_in_step_where_the_function_on_the_clock_fails() -> None:
    """The first shard raised an error, so the second never received the clock, and its gets waited forever."""
    async with ParameterServer(shards=2) as server:
        failing = psf.Map("w", 0, 0, raise_value_error)
        await server.create_matrix("w", rows=1, columns=4, consistency=BSP(), on_clock=failing)
        clients = [server.client(worker=number) for number in range(2)]
        await clients[0].clock("w")
        with pytest.raises(ParameterServerError, match="not for these"):
            await clients[1].clock("w")
        assert [shard.matrices[0].clocks for shard in server.statistics().shards] == [{"0": 1, "1": 1}] * 2
        for client in clients:
            assert (await asyncio.wait_for(client.get("w", row=0), PATIENCE_S)).tolist() == [0.0] * 4


async def test_a_worker_leaves_everywhere_though_a_function_on_the_clock_fails() -> None:
    """A worker remained registered on other shards and matrices, where all others waited for it forever."""
    async with ParameterServer(shards=2) as server:
        failing = psf.Map("v", 0, 0, raise_value_error)
        await server.create_matrix("v", rows=1, columns=4, consistency=BSP(), on_clock=failing)
        await server.create_matrix("w", rows=1, columns=4, consistency=BSP())
        stays, leaves = (server.client(worker=number) for number in range(2))
        await stays.clock("v")
        await stays.clock("w")
        reading = asyncio.ensure_future(stays.get("w", row=0))
        with pytest.raises(ParameterServerError, match="not for these"):
            await leaves.leave()
        assert (await asyncio.wait_for(reading, PATIENCE_S)).tolist() == [0.0] * 4
        assert server.workers == [0]


def test_a_place_for_the_shards_is_refused_with_what_to_write_instead() -> None:
    """Programs that had their shards on Ray failed with a TypeError that did not say what to write now."""
    with pytest.raises(ConfigurationError, match=r"on=: expected no place, given 'ray'; .* flow\.run\(on=Ray\(2\)\)"):
        ParameterServer(on="ray")
