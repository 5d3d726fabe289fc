"""The worker: which of the processes that share a loop this one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from streamiter.errors import ConfigurationError, GraphError
from streamiter.operators.mini_batch import MiniBatch
from streamiter.operators.operator import IterationListener, Operator
from streamiter.runtime.graph import Step

__all__ = ["RUN_ID_CHARACTERS", "Worker", "check_shared", "check_shared_operator", "worker_of"]

# Room for a UUID or a name with a date; it lies in every record of the topic.
RUN_ID_CHARACTERS: Final = 64


@final
@dataclass(frozen=True, slots=True)
class Worker:
    """One of ``count`` processes that run the same flow. A job that shares nothing is the only one."""

    index: int = 0
    count: int = 1
    run_id: str | None = None
    """What all of them call this run; None where nothing is shared."""

    @property
    def shares(self) -> bool:
        """Whether its loops may have heads elsewhere."""
        return self.run_id is not None

    def number(self, subtask: int, parallelism: int) -> int:
        """The number of one of its subtasks among those of all workers."""
        return self.index * parallelism + subtask


def worker_of(worker: Any, run_id: Any, snapshot: object) -> Worker | None:
    """The worker that ``flow.start(worker=…, run_id=…)`` names; None if it names none."""
    if worker is None and run_id is None:
        return None
    if worker is None or run_id is None:
        raise ConfigurationError(
            f"flow.start: expected worker and run_id together, given worker={worker!r} and run_id={run_id!r}; "
            'write worker=(0, 2), run_id="…", with the same run_id for all workers and a new one for each run'
        )
    if snapshot is not None:
        raise ConfigurationError(
            "flow.start: expected no snapshot for a worker, given one; it would not hold what was on its way to the "
            "others: start all workers without"
        )
    if not _is_place(worker):
        raise ConfigurationError(
            f"flow.start: expected worker=(index, count) with an index below the count, given {worker!r}; the "
            "first of two workers is (0, 2)"
        )
    if not isinstance(run_id, str) or not 0 < len(run_id.encode()) <= RUN_ID_CHARACTERS:
        raise ConfigurationError(
            f"flow.start: expected run_id to be a text of 1 to {RUN_ID_CHARACTERS} bytes, given {run_id!r}; any "
            "will do that no run of this flow has had"
        )
    return Worker(worker[0], worker[1], run_id)


def _is_place(worker: Any) -> bool:
    return (
        isinstance(worker, (tuple, list))
        and len(worker) == 2
        and all(isinstance(number, int) and not isinstance(number, bool) for number in worker)
        and 0 <= worker[0] < worker[1]
    )


def check_shared(flow: str, steps: Sequence[Step]) -> None:
    """Raise GraphError unless all that the workers share are loops that work so."""
    if not any(step.loop is not None for step in steps):
        raise GraphError(
            f"flow {flow!r}: expected an iteration that its workers share, given none; start it without worker"
        )
    for step in steps:
        if step.loop is not None:
            step.loop.check_shared(step)
        for edge in step.inputs:
            if edge.feedback is not None and edge.feedback_topic is None:
                raise GraphError(
                    f"step {step.name!r}: expected feedback through a topic that the workers share, given "
                    f"{edge.upstream.name!r} fed back in memory; write feedback_through(stream, topic(…))",
                    where=step.where,
                )


def check_shared_operator(step: Step, operator: Operator) -> None:
    """Raise GraphError for an operator that waits for epochs: those of a shared loop are never complete."""
    # Mini-batches go out when they are full; the rest waits as in any loop whose data does not end.
    listens = isinstance(operator, IterationListener) and not isinstance(operator, MiniBatch)
    if step.loop is not None and (listens or operator.epochs_in_order):
        kind = "an IterationListener" if listens else "one with epochs_in_order"
        raise GraphError(
            f"step {step.name!r}: expected no operator that waits for epochs in a loop that workers share, given "
            f"{kind}; epochs are complete in the loop of a single process only",
            where=step.where,
        )
