"""The worker: for each mini-batch pull, compute, push, clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from streamiter.learn.on_parameter_server.learner import Computed, Learner
from streamiter.operators.context import Context
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output

if TYPE_CHECKING:
    from streamiter.parameter_server.client import Client

__all__ = ["ParameterServerWorker", "WorkerOptions"]


class WorkerOptions(NamedTuple):
    """What every worker of one training is given."""

    learner: Learner
    publish_every: int
    """The first worker gives the parameters for a version after every so many of its clocks."""


class ParameterServerWorker(Operator):
    """Trains on the mini-batches that come to it, and leaves when there are no more, so that nobody waits for it.

    Derive from it, and give the class as ``worker=``, where more is to happen for a mini-batch than to compute.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self.learner = options.learner
        self._publish_every = options.publish_every
        self._clocks = 0

    async def open(self, context: Context) -> None:
        self.context = context
        self.client: Client = context.parameter_server
        await self.learner.create(self.client)

    def wanted_inputs(self) -> None:
        """All there is; but asked record by record, so that what is told of each goes on before the next."""
        return

    async def compute(self, mini_batch: Any, pulled: Any) -> Computed:
        """What to push of a mini-batch, with the parameters pulled for it."""
        return self.learner.compute(mini_batch, pulled)

    async def process(self, mini_batch: Any, out: Output) -> None:
        """One clock."""
        clock = self.context.clock
        asked_s = clock.monotonic_s()
        pulled = await self.learner.pull(self.client, mini_batch)
        waited_s = clock.monotonic_s() - asked_s
        if self.context.subtask_index == 0 and self._clocks and self._clocks % self._publish_every == 0:
            # Now rather than right after the clock: there, where all go in step, it would have to wait for the others.
            out.emit({"parameters": await self.learner.parameters(self.client), "clock": self._clocks})
        computed = await self.compute(mini_batch, pulled)
        if computed.contribution is not None:
            await self.learner.push(self.client, mini_batch, computed.contribution)
        await self.learner.clock(self.client)
        self._clocks += 1
        out.emit(
            {
                "worker": self.context.subtask_index,
                "clock": self._clocks,
                "loss": computed.loss,
                "records": computed.records,
                "waited_s": waited_s,
            }
        )

    async def finish(self, out: Output) -> None:
        # It leaves when this returns. What it has added may still wait for the others.
        await self.learner.settle(self.client)
        out.emit({"worker": self.context.subtask_index, "ended": True})

    def snapshot(self) -> int:
        return self._clocks

    def restore(self, state: int) -> None:
        self._clocks = state
