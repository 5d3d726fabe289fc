"""Owners of the parameters in online training: told where to begin, they answer with parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from streamiter.learn.linear.gradients import Gradient
from streamiter.learn.linear.model import LinearModel
from streamiter.learn.linear.parameter_owner import EpochGradients, ParameterOwner
from streamiter.learn.online.gradient_worker import MINI_BATCHES_WITH_ONE_MODEL
from streamiter.operators.context import Context
from streamiter.operators.operator import IterationListener
from streamiter.operators.output import Output

__all__ = ["AsynchronousOwner", "SynchronousOwner"]

# Half of the mini-batches that a worker makes without an answer: none ever waits for one.
_GRADIENTS_WITHOUT_ANSWER: Final = MINI_BATCHES_WITH_ONE_MODEL // 2


class _StartedOwner(ParameterOwner):
    """One that is told where to begin.

    Input ``start``: the variable stream, of which only the initial record counts (None, bare weights or a
    model's parameters); the others are the owner's own, on their way round. Input ``gradients``: what the
    workers make.
    """

    def __init__(self, make_model: Callable[[], LinearModel], publish_every: int) -> None:
        super().__init__(make_model, publish_every)
        self._started = False

    def wanted_inputs(self) -> tuple[str, ...] | None:
        """Nothing can be learned before it is known what from."""
        return None if self._started else ("start",)

    def process_start(self, parameters: Any, out: Output) -> None:
        """Take over the initial parameters."""
        if not self._started:
            self._started = True
            if parameters is not None:
                self._model.start_from(parameters)

    def process_gradients(self, record: dict[str, Any], out: Output) -> None:
        """Take in a gradient of a worker, with the sum of its rows' losses."""
        raise NotImplementedError

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"started": self._started}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._started = state["started"]


class AsynchronousOwner(_StartedOwner):
    """A step for each gradient, as it comes.

    The parameters go to all workers, once for a gradient of each: an answer to every gradient would be as
    many for every worker as there are workers, more than it takes in while it makes one. A worker that is
    silent while another makes four is not waited for.
    """

    def __init__(self, make_model: Callable[[], LinearModel], publish_every: int) -> None:
        super().__init__(make_model, publish_every)
        self._active: dict[int, None] = {}
        self._heard: dict[int, int] = {}
        """Gradients of each worker since the last answer."""

    def process_gradients(self, record: dict[str, Any], out: Output) -> None:
        self.step(Gradient.from_record(record["gradient"]), record["loss"], out)
        worker = record["worker"]
        self._active[worker] = None
        self._heard[worker] = heard = self._heard.get(worker, 0) + 1
        if heard >= _GRADIENTS_WITHOUT_ANSWER:
            self._active = dict.fromkeys(self._heard)
        if len(self._heard) == len(self._active):
            self._heard.clear()
            out.emit(self._model.parameters())

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"active": list(self._active), "heard": self._heard.copy()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._active, self._heard = dict.fromkeys(state["active"]), dict(state["heard"])


class SynchronousOwner(_StartedOwner, IterationListener):
    """A step for each epoch, with the gradients of all workers together.

    They are added in the workers' order, not in that of their arrival, so the sum is the same to the last
    bit. Parameters go out for every epoch that a worker has reported, if only that it had nothing to learn.
    """

    def __init__(self, make_model: Callable[[], LinearModel], publish_every: int) -> None:
        super().__init__(make_model, publish_every)
        self._epochs: dict[int, EpochGradients] = {}

    def process_gradients(self, record: dict[str, Any], out: Output) -> None:
        epoch = self._epochs.setdefault(self._context.epoch or 0, EpochGradients())
        if record["gradient"] is not None:
            epoch.add(record["worker"], Gradient.from_record(record["gradient"]), record["loss"])

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        if epoch_watermark in self._epochs:
            self._step_for(epoch_watermark, out)
            out.emit(self._model.parameters())

    def on_iteration_terminated(self, context: Context, out: Output) -> None:
        for epoch in sorted(self._epochs):
            self._step_for(epoch, out)

    def _step_for(self, epoch: int, out: Output) -> None:
        gradients = self._epochs.pop(epoch)
        if gradients.gradients:
            self.step(*gradients.total(), out)

    def snapshot(self) -> dict[str, Any]:
        epochs = [(epoch, gradients.to_record()) for epoch, gradients in self._epochs.items()]
        return super().snapshot() | {"epochs": epochs}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._epochs = {epoch: EpochGradients.from_record(record) for epoch, record in state["epochs"]}
