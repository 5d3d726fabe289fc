"""The worker that trains a network."""

from __future__ import annotations

from typing import Any

from streamiter.learn.on_parameter_server.learner import Computed
from streamiter.learn.on_parameter_server.worker import ParameterServerWorker
from streamiter.networks.diverging import Diverged
from streamiter.networks.learner import NetworkLearner, PulledParameters
from streamiter.networks.mini_batches import MiniBatch
from streamiter.operators.output import Output

__all__ = ["NetworkWorker"]


class NetworkWorker(ParameterServerWorker):
    """Makes its mini-batch of what comes: the number of a step over bounded data, or prepared rows of a stream."""

    learner: NetworkLearner

    async def compute(self, mini_batch: MiniBatch, pulled: PulledParameters) -> Computed:
        """With a number that no other mini-batch has, and the same one after a restart: dropout goes by it."""
        number = self._clocks * self.context.parallelism + self.context.subtask_index
        return self.learner.compute(mini_batch, pulled, number)

    async def process(self, record: Any, out: Output) -> None:
        """One clock, also where the step has no row for this worker: the others are in step with it."""
        subtask = self.context.subtask_index
        mini_batch = self.learner.mini_batch(record, subtask)
        if mini_batch is not None:
            try:
                await super().process(mini_batch, out)
            except Diverged as error:
                raise error.within(self._place(record)) from error
            return
        await self.learner.settle(self.client)  # As a read would: nobody runs ahead of the others.
        await self.learner.clock(self.client)
        self._clocks += 1
        out.emit({"worker": subtask, "clock": self._clocks, "loss": 0.0, "records": 0, "waited_s": 0.0})

    def _place(self, record: Any) -> str:
        steps = self.learner.steps
        if steps is None:
            return f"mini-batch {self._clocks + 1} of worker {self.context.subtask_index}"
        epoch, step = divmod(record, steps.per_epoch)
        return f"epoch {epoch + 1}, step {step + 1} of {steps.per_epoch}"
