"""Workers in several processes: they wait for each other, and one that dies is let go."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from parameter_server.ray.other_process import OtherProcess

from streamiter.errors import ParameterServerError, UnknownWorker
from streamiter.parameter_server import BSP, SSP, psf
from streamiter.parameter_server.ray.host import RayAddress
from streamiter.parameter_server.server import ParameterServer


def in_another_process(address: RayAddress) -> Any:
    """An actor that ends with the test's last use of it."""
    import ray

    return ray.remote(OtherProcess).options(num_cpus=0).remote(address)


async def test_workers_of_a_process_leave_though_one_of_them_was_replaced(shared_address: RayAddress) -> None:
    """The others stayed, and were waited for; the program ended with an error about a worker that was gone."""
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
        await server.client(worker=20).join()  # Its number is free again.


async def test_reads_wait_for_clocks_of_another_process(shared_address: RayAddress) -> None:
    """A worker that reads what others have not written yet, because their clocks went another way."""
    there = in_another_process(shared_address)
    async with ParameterServer.connect(shared_address) as server:
        await server.create_matrix("bsp", rows=1, columns=4, consistency=BSP())
        await server.create_matrix("ssp", rows=1, columns=4, consistency=SSP(staleness=1))
        here = server.client(worker=10)
        await here.join()
        await there.join.remote(11)

        for iteration in range(2):  # BSP: both see what both added in the iterations before, and no more
            await here.add("bsp", row=0, values=np.ones(4))
            await here.clock("bsp")
            read = await here.start_get("bsp", row=0)
            await there.call.remote(11, "add", "bsp", row=0, values=np.full(4, 10.0))
            seen_there = await there.call.remote(11, "get", "bsp", row=0)
            assert not read.is_done
            await there.call.remote(11, "clock", "bsp")
            assert seen_there.tolist() == [11.0 * iteration] * 4
            assert (await read).tolist() == [11.0 * (iteration + 1)] * 4

        for _ in range(3):  # SSP: two clocks ahead of the slowest is one too many
            await here.clock("ssp")
        read = await here.start_get("ssp", row=0)
        await there.call.remote(11, "clock", "ssp")
        await here.aggregate(psf.Sum("ssp", row=0))  # a reply from after that clock
        assert not read.is_done
        await there.call.remote(11, "add", "ssp", row=0, values=np.ones(4))
        await there.call.remote(11, "clock", "ssp")
        assert (await read).tolist() == [1.0] * 4

        await here.clock("ssp")  # a worker that leaves holds nobody back any more
        read = await here.start_get("ssp", row=0)
        await there.call.remote(11, "leave")
        assert (await read).tolist() == [1.0] * 4


@pytest.mark.usefixtures("ray_cluster")
async def test_a_worker_whose_process_is_killed_leaves_and_releases_the_others() -> None:
    """A cluster that waits for ever for a worker that the kernel has killed."""
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
        # What the lost worker has added stays. This one has waited for longer than the timeout, and is still there.
        assert (await read).tolist() == [2.0] * 4
        await here.clock("w")
        again = server.client(worker=1)
        await again.join()
        await again.add("w", row=0, values=np.ones(4))
        await here.clock("w")
        read = await here.start_get("w", row=0)
        await here.aggregate(psf.Sum("w", row=0))  # a reply from after that get
        assert not read.is_done  # it is waited for again
        await again.clock("w")
        assert (await read).tolist() == [3.0] * 4
        await again.leave()
        with pytest.raises(UnknownWorker):
            await again.get("w", row=0)
