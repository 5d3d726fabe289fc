"""Calls to shards in Ray actors, compared with the same calls in one process."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from streamiter.errors import ConfigurationError, OutOfRange, ParameterServerError, ServerReset, UnknownMatrix
from streamiter.parameter_server import SSP, psf
from streamiter.parameter_server.ray.host import RayAddress
from streamiter.parameter_server.server import ParameterServer

KEYS = 10_000
REPEAT = 50


@pytest.mark.parametrize("place", ["process", "ray"])
async def test_fifty_pushes_and_push_pulls_of_ten_thousand_keys_add_up(
    place: str, request: pytest.FixtureRequest
) -> None:
    """An add was lost or counted twice on its way; ps-lite's acceptance test shows that in the sum."""
    random = np.random.default_rng(1)
    keys = np.sort(random.choice(1 << 20, KEYS, replace=False))
    values = random.normal(size=KEYS).astype("float32")
    server: Any = ParameterServer(shards=2) if place == "process" else None
    server = server or ParameterServer.connect(request.getfixturevalue("shared_address"))
    async with server:
        await server.create_matrix("kv", rows=1, columns=1 << 20, dtype="float32", sparse=True)
        client = server.client(worker=0)
        for _ in range(REPEAT):
            await client.add("kv", row=0, columns=keys, values=values)
        pulled = await client.get("kv", row=0, columns=keys)
        assert _error(pulled, REPEAT * values) < 1e-5
        for _ in range(REPEAT):
            pulled = await client.add_get("kv", row=0, columns=keys, values=values)
        assert _error(pulled, 2 * REPEAT * values) < 1e-5


def _error(found: Any, expected: Any) -> float:
    return float(np.abs(found - expected).sum() / np.abs(expected).sum())


async def test_rows_columns_and_functions_give_the_same_as_numpy(shared_address: RayAddress) -> None:
    """A slice went to the wrong shard, an array came back read-only, or an aggregate was merged twice."""
    random = np.random.default_rng(2)
    expected = np.zeros((2, 300_000))
    async with ParameterServer.connect(shared_address) as server:
        await server.create_matrix("two rows", rows=2, columns=300_000, consistency=SSP(staleness=1))
        client = server.client(worker=0)
        whole = random.normal(size=300_000)  # 2.4 MB, which go through the object store
        some = random.integers(0, 300_000, 100)
        await client.add("two rows", row=0, values=whole)
        await client.add("two rows", row=1, columns=some, values=np.ones(100))
        expected[0] += whole
        np.add.at(expected[1], some, 1.0)
        np.testing.assert_array_equal(await client.get("two rows", rows=[1, 0]), expected[[1, 0]])
        await client.update(psf.Axpy("two rows", x=0, y=1, a=2.0))
        expected[1] += 2 * expected[0]
        one = await client.get("two rows", row=1, columns=[7])
        one += 1.0  # the array belongs to the caller
        left = await client.get("two rows", row=1, columns=np.arange(100_000))  # of one shard
        left += 1.0
        np.testing.assert_array_equal(await client.get("two rows", row=1, columns=some), expected[1][some])
        total = await client.aggregate(psf.Sum("two rows", row=1))
        assert total == pytest.approx(expected[1].sum(), rel=1e-9)
        assert await client.clock("two rows") == 1


async def test_errors_of_shards_are_the_same_as_in_one_process(shared_address: RayAddress) -> None:
    """A worker in another process could not tell a misspelt matrix from a broken connection."""
    async with ParameterServer.connect(shared_address) as server:
        await server.create_matrix("errors", rows=1, columns=4)
        client = server.client(worker=0)
        with pytest.raises(UnknownMatrix, match="'eros'"):
            await client.get("eros", row=0)
        with pytest.raises(OutOfRange, match="4"):
            await client.get("errors", row=0, columns=[4])
        with pytest.raises(ParameterServerError, match="expected the settings it was made with"):
            async with ParameterServer.connect(shared_address) as other:
                await other.create_matrix("errors", rows=1, columns=5)
        await client.add("errors", row=0, values=np.arange(4.0))
        assert (await client.get("errors", row=0)).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.usefixtures("ray_cluster")
async def test_a_call_that_waits_when_the_server_is_closed_fails() -> None:
    """A worker waited forever for a closed server."""
    server = ParameterServer(shards=1, on="ray")
    await server.create_matrix("w", rows=1, columns=4, consistency=SSP(staleness=0))
    client, other = server.client(worker=0), server.client(worker=1)
    await other.join()
    await client.clock("w")
    waiting = await client.start_get("w", row=0)
    await client.aggregate(psf.Sum("w", row=0))  # the shard has both requests after this reply
    await server.close()
    with pytest.raises(ServerReset, match="closed"):
        await waiting


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing optional package raised an ImportError from deep inside."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'streamiter\[ray\]'"):
        ParameterServer(on="ray")
