"""Vectors of a sparse matrix that come and go: what waits for a clock, and what is counted."""

from typing import Any

import pytest

from streamiter.parameter_server import BSP, Admission, ParameterServer, matrix_shard, psf
from streamiter.parameter_server.optimizers import SGD

OPTIMIZE = psf.Optimize("w", SGD(1.0))


async def server_with(matrix: str, shards: int) -> ParameterServer:
    server = ParameterServer(shards=shards)
    admission = Admission(admit=3, at_most="1 MB")
    settings: dict[str, Any] = {"sparse": True, "vector": 2, "admission": admission, "on_clock": OPTIMIZE}
    await server.create_matrix(matrix, rows=2, columns=64, consistency=BSP(), **settings)
    return server


@pytest.mark.parametrize("pending_bytes", [1, 64 << 20], ids=["summed up", "one by one"])
@pytest.mark.parametrize("shards", [1, 3])
async def test_occurrences_wait_for_the_clock_with_the_gradients(
    pending_bytes: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of occurrences that waited were added up, and a shard without their block could not be restored."""
    monkeypatch.setattr(matrix_shard, "_PENDING_BYTES", pending_bytes)
    async with await server_with("w", 2) as server:
        client = server.client(worker=0)
        for columns in ([2, 2, 40, 62], [2, 40, 40]):
            values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
            await (
                await client.start_add(
                    "w", row=1, columns=[2, 3, 40, 41, 62, 63], values=values, occurrences=(columns, None)
                )
            )
        state = await server.snapshot()
    async with await server_with("w", shards) as restored:
        client = restored.client(worker=0)
        await restored.restore(state)
        await client.clock("w")
        content = await client.aggregate(psf.PullSparse("w", row=0))
        counts = restored.statistics().matrix("w")
    assert content.columns.tolist() == [2, 3, 40, 41]
    assert content.values.tolist() == [-2.0, -4.0, -6.0, -8.0], (
        "a gradient before the admission is lost, or counts twice"
    )
    assert (counts.features, counts.admitted, counts.expired, counts.evicted) == (3, 2, 0, 0)
