"""From what the workers tell to versions of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from streamiter.errors import ModelError
from streamiter.learn.on_parameter_server.learner import Learner
from streamiter.models.update import ModelSnapshot
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.records import OutputTag

if TYPE_CHECKING:
    from streamiter.parameter_server.server import ParameterServer

__all__ = ["LOSSES", "Versions"]

LOSSES: Final = OutputTag("losses")
"""The side output: for each mini-batch its mean loss, and who has learned from it."""


class Versions(Operator):
    """Makes a ``ModelSnapshot`` of all parameters that come, and at the end one of what the server holds then.

    By then every worker has left, so nothing is added any more; a worker whose own data has ended cannot know what
    the others still add. Parallelism 1.

    Where workers go in step, parameters are those after a clock of all of them, and wait here until each worker has
    told what it learned from up to that clock, so that the counts do not depend on who is heard first. Otherwise they
    count what has been heard so far.
    """

    def __init__(self, learner: Learner, server: ParameterServer, workers: int, owner: str) -> None:
        self._learner = learner
        self._server = server
        self._workers = workers
        self._owner = owner
        self._records = 0
        self._told: dict[int, tuple[int, float]] = {}
        """What was learned from since the last version: records and the sum of their losses, by clock."""
        self._clocks: dict[int, int] = {}
        """How far each worker has told."""
        self._ended = 0
        """Workers that have nothing more to tell."""
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        """Clocks and parameters of versions to be made; workers that go in step are a clock apart at most."""

    def process(self, told: dict[str, Any], out: Output) -> None:
        """Count what a worker has learned from; make the versions that are due."""
        if "parameters" in told:
            self._waiting.append((told["clock"], told["parameters"]))
        elif "ended" in told:
            self._ended += 1
            self._clocks.pop(told["worker"], None)
        else:
            self._count(told, out)
        while self._waiting and self._is_due(self._waiting[0][0]):
            clock, parameters = self._waiting.pop(0)
            out.emit(self._version(parameters, clock if self._learner.is_in_step else None))

    def _count(self, told: dict[str, Any], out: Output) -> None:
        self._clocks[told["worker"]] = told["clock"]
        records, loss = self._told.get(told["clock"], (0, 0.0))
        self._told[told["clock"]] = records + told["records"], loss + told["loss"]
        if told["records"]:
            out.emit({**told, "loss": told["loss"] / told["records"]}, tag=LOSSES)

    def _is_due(self, clock: int) -> bool:
        if not self._learner.is_in_step:
            return True
        return self._ended + sum(reached >= clock for reached in self._clocks.values()) == self._workers

    def _version(self, parameters: dict[str, Any], up_to: int | None) -> ModelSnapshot:
        clocks = [clock for clock in self._told if up_to is None or clock <= up_to]
        told = [self._told.pop(clock) for clock in clocks]
        records = sum(records for records, _ in told)
        self._records += records
        metrics = {self._learner.metric: sum(loss for _, loss in told) / records} if records else {}
        return ModelSnapshot(parameters, self._records, metrics)

    async def finish(self, out: Output) -> None:
        if not self._records and not any(records for records, _ in self._told.values()):
            raise ModelError(
                f"{self._owner}: expected examples to learn from, given none; look at what was read"
            )
        reader = self._server.client(worker=max(self._server.workers, default=-1) + 1)
        parameters = await self._learner.parameters(reader)
        await reader.leave()
        out.emit(self._version(parameters, None))

    def snapshot(self) -> dict[str, Any]:
        return {
            "records": self._records,
            "told": [(clock, *told) for clock, told in self._told.items()],
            "clocks": list(self._clocks.items()),
            "ended": self._ended,
            "waiting": self._waiting.copy(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._records, self._ended = state["records"], state["ended"]
        self._told = {clock: (records, loss) for clock, records, loss in state["told"]}
        self._clocks = dict(state["clocks"])
        self._waiting = [(clock, parameters) for clock, parameters in state["waiting"]]
