"""Cases of parameter servers: matrices, clocks, adds that wait for a clock, and barriers of workers."""

import functools
from typing import Any

from restore.case import Case, fed, turns

from streamiter import Flow, Operator, Stream
from streamiter.operators import Context, Output
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer, psf
from streamiter.parameter_server.consistency import ConsistencyModel, PendingAdds, ProgressTracker
from streamiter.parameter_server.matrix_shard import MatrixShard
from streamiter.parameter_server.shard import Arrivals, Shard
from streamiter.parameter_server.storage.block import DenseBlock
from streamiter.parameter_server.storage.sparse import SparseBlock

KINDS = {"ASP": ASP(), "BSP": BSP(), "SSP": SSP(staleness=1)}


class AddsAndClocks(Operator):
    """Adds for each record, clocks for every second record, and emits its clock and the values that it reads."""

    def __init__(self, how: str, *, sparse: bool) -> None:
        self._settings = {
            "rows": 2,
            "columns": 5,
            "consistency": KINDS[how],
            "sparse": sparse,
            # Under BSP the sum shows the number of calls.
            "on_clock": psf.AddS("w", 1, 1, 1.0) if how == "BSP" else None,
        }

    async def open(self, context: Context) -> None:
        self._client = context.parameter_server
        await self._client.create_matrix("w", **self._settings)

    async def process(self, record: int, out: Output) -> None:
        await self._client.add("w", row=0, columns=[record % 5, 0], values=[record / 7, 0.1])
        if record % 2:
            await self._client.clock("w")
            await self._client.barrier()
            read = await self._client.get("w", rows=[0, 1])
            out.emit((self._client.worker, self._client.clock_of("w"), read.tolist()))


def adds_and_clocks(how: str, kind: str, workers: int, flow: Flow) -> dict[str, Any]:
    server = ParameterServer(shards=2)
    numbers = fed(flow, [number // workers for number in range(8 * workers)], parallelism=workers)
    emitted: Stream = numbers.process(
        lambda: AddsAndClocks(how, sparse=kind == "sparse"), name="work", parallelism=workers, parameter_server=server
    )
    return {"emitted": emitted}


STATE = (Shard, MatrixShard, Arrivals, ConsistencyModel, ProgressTracker)

CASES = [
    *(
        Case(functools.partial(adds_and_clocks, how, kind, 1), (*STATE, block))
        for how, kind, block in (("ASP", "dense", DenseBlock), ("SSP", "sparse", SparseBlock))
    ),
    *(
        Case(functools.partial(adds_and_clocks, "BSP", kind, 1), (*STATE, block, PendingAdds))
        for kind, block in (("dense", DenseBlock), ("sparse", SparseBlock))
    ),
    Case(functools.partial(adds_and_clocks, "BSP", "dense", 2), (*STATE, PendingAdds), turns(10, ordered=False)),
]
