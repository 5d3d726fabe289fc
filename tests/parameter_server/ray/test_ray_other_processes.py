"""Workers in several processes: they wait for each other, and a dead worker leaves."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from parameter_server.ray.other_process import RemoteChannels

from streamiter.errors import ParameterServerError, UnknownWorker
from streamiter.parameter_server import BSP, SSP, psf
from streamiter.parameter_server.ray.host import RayAddress
from streamiter.parameter_server.server import ParameterServer


def in_another_process(address: RayAddress) -> Any:
    """Return an actor that ends with the test's last reference to it."""
    import ray

    return ray.remote(RemoteChannels).options(num_cpus=0).remote(address)


async def test_workers_of_a_process_leave_though_one_of_them_was_replaced(shared_address: RayAddress) -> None:
    """The other workers of a process stayed registered, and the program ended with an error about a missing worker."""
    async with ParameterServer.connect(shared_address) as server:
        async with ParameterServer.connect(shared_address) as other:
            workers = [other.client(worker=number) for number in (20, 21)]
            for worker in workers:
                await worker.join()
            newer = server.client(worker=20)
            with pytest.raises(ParameterServerError, match="expected a worker that does not take part yet"):
                await newer.join()
        assert [worker.has_left for worker in workers] == [True, True]
        await newer.leave()
        await server.client(worker=20).join()  # The worker's number is free again.


async def test_reads_wait_for_clocks_of_another_process(shared_address: RayAddress) -> None:
    """A worker read before the adds of another process had arrived, because its clocks came by another way."""
    there = in_another_process(shared_address)
    async with ParameterServer.connect(shared_address) as server:
        await server.create_matrix("bsp", rows=1, columns=4, consistency=BSP())
        await server.create_matrix("ssp", rows=1, columns=4, consistency=SSP(staleness=1))
        here = server.client(worker=10)
        await here.join()
        await there.join.remote(11)

        for iteration in range(2):  # BSP: both see only the adds of earlier iterations
            await here.add("bsp", row=0, values=np.ones(4))
            await here.clock("bsp")
            read = await here.start_get("bsp", row=0)
            await there.call.remote(11, "add", "bsp", row=0, values=np.full(4, 10.0))
            seen_there = await there.call.remote(11, "get", "bsp", row=0)
            assert not read.is_done
            await there.call.remote(11, "clock", "bsp")
            assert seen_there.tolist() == [11.0 * iteration] * 4
            assert (await read).tolist() == [11.0 * (iteration + 1)] * 4

        for _ in range(3):  # SSP: two clocks ahead of the slowest is one clock too many
            await here.clock("ssp")
        read = await here.start_get("ssp", row=0)
        await there.call.remote(11, "clock", "ssp")
        await here.aggregate(psf.Sum("ssp", row=0))  # a reply from after that clock
        assert not read.is_done
        await there.call.remote(11, "add", "ssp", row=0, values=np.ones(4))
        await there.call.remote(11, "clock", "ssp")
        assert (await read).tolist() == [1.0] * 4

        await here.clock("ssp")  # a worker that has left blocks no other
        read = await here.start_get("ssp", row=0)
        await there.call.remote(11, "leave")
        assert (await read).tolist() == [1.0] * 4


@pytest.mark.usefixtures("ray_cluster")
async def test_a_worker_whose_process_is_killed_leaves_and_releases_the_others() -> None:
    """All workers waited forever for a worker whose process had been killed."""
    async with ParameterServer(shards=1, on="ray", heartbeat_timeout_s=5.0) as server:
        await server.create_matrix("w", rows=1, columns=4, consistency=BSP())
        here = server.client(worker=0)
        await here.join()
        there = in_another_process(server.address())
        await there.join.remote(1)
        await there.call.remote(1, "add", "w", row=0, values=np.ones(4))
        await here.add("w", row=0, values=np.ones(4))
        await here.clock("w")
        read = await here.start_get("w", row=0)
        os.kill(await there.process_id.remote(), signal.SIGKILL)
        # The adds of the lost worker remain. Worker 0 waited for longer than the timeout and still takes part.
        assert (await read).tolist() == [2.0] * 4
        await here.clock("w")
        again = server.client(worker=1)
        await again.join()
        await again.add("w", row=0, values=np.ones(4))
        await here.clock("w")
        read = await here.start_get("w", row=0)
        await here.aggregate(psf.Sum("w", row=0))  # a reply from after that get
        assert not read.is_done  # the read waits for the new worker 1
        await again.clock("w")
        assert (await read).tolist() == [3.0] * 4
        await again.leave()
        with pytest.raises(UnknownWorker):
            await again.get("w", row=0)
