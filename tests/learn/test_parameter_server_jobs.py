"""Training on a parameter server is a job with slow workers and stops."""

import asyncio
from typing import Any

import pytest
from learn.parameter_server_support import ALL, WORKERS, made_up_rows
from support.waiting import PATIENCE_S, until

from streamiter import Flow
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.learn import ParameterServerWorker, train_on_parameter_server
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer
from streamiter.testing import VirtualClock

EVERY = pytest.mark.parametrize("how", ALL)


# -- stragglers ------------------------------------------------------------------------------------------------


class SlowThird(ParameterServerWorker):
    """Spends 1 virtual second on a mini-batch; the third worker spends 5."""

    async def compute(self, mini_batch: Any, pulled: Any) -> Any:
        await self.context.clock.sleep(5.0 if self.context.subtask_index == 2 else 1.0)
        return await super().compute(mini_batch, pulled)


@pytest.mark.parametrize(("how", "ahead"), [(BSP(), 0), (SSP(staleness=0), 0), (SSP(staleness=3), 3), (ASP(), None)])
async def test_workers_wait_for_a_slow_worker_as_the_consistency_requires(how: Any, ahead: int | None) -> None:
    """No worker may start a mini-batch more clocks ahead of the slowest worker than the consistency allows."""
    flow, clock = Flow("stragglers"), VirtualClock()
    training = train_on_parameter_server(
        flow.from_items(made_up_rows(240)),
        ParameterServer(),
        features=40,
        consistency=how,
        workers=WORKERS,
        batch=5,
        worker=SlowThird,
    )
    losses = training.losses.collect()
    job = await flow.start(clock=clock)
    done = asyncio.ensure_future(job.wait())
    while not done.done():
        await clock.advance(5.0)
    reports = losses.items
    # The losses arrive in the order of their clocks.
    lead, clocks = 0, dict.fromkeys(range(WORKERS), 0)
    for each in reports:
        clocks[each["worker"]] = each["clock"]
        lead = max(lead, max(clocks.values()) - min(clocks.values()))
    waited = [sum(each["waited_s"] for each in reports if each["worker"] == worker) for worker in range(WORKERS)]
    if ahead is None:
        assert lead >= 8
        assert waited == [0.0] * WORKERS
    else:
        # A mini-batch that starts at most `ahead` clocks ahead ends one clock later.
        assert lead == ahead + 1
        assert waited[2] == 0.0
        # The fast workers start mini-batch 12 after the slow worker has made 11 − `ahead`, in 5 s each.
        assert [waited[0], waited[1], waited[3]] == [5.0 * (11 - ahead) - 11.0] * 3


# -- stops -----------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("mode", ["drain", "suspend"])
async def test_a_job_can_be_stopped_in_the_middle(how: str, mode: Any) -> None:
    """A drained training returns its current model; a worker that waits for an ended worker must not delay the stop."""
    flow = Flow("stopped")
    training = train_on_parameter_server(
        flow.from_items(made_up_rows(201)),
        ParameterServer(),
        features=40,
        consistency=ALL[how],
        workers=WORKERS,
        batch=10,
        epochs=10_000,
        worker=GivesWay,
    )
    models, losses = training.models.collect(), training.losses.collect()
    job = await flow.start(channel_limits=ChannelLimits(records=5))
    await until(lambda: len(losses.items) >= 50)
    statistics = await asyncio.wait_for(job.stop(mode), PATIENCE_S)
    if mode == "drain":
        assert statistics.state == "finished"
        assert [model.records for model in models.items] == [sum(each["records"] for each in losses.items)]
    else:
        assert (statistics.state, models.items) == ("suspended", [])
    assert len(losses.items) < 500


class GivesWay(ParameterServerWorker):
    """Lets other tasks run in each mini-batch, so that a job can be stopped in the middle."""

    async def compute(self, mini_batch: Any, pulled: Any) -> Any:
        await asyncio.sleep(0)
        return await super().compute(mini_batch, pulled)
