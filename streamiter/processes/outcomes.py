"""What a process reports to the supervisor at its end, as plain data: an error, statistics, and collected results."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from streamiter import errors
from streamiter.errors import GraphError, InternalError, JobFailed, StreamiterError, user_line
from streamiter.operators.operator import Operator
from streamiter.operators.source import Collect
from streamiter.runtime.graph import Step
from streamiter.runtime.statistics import JobStatistics


class Failure(msgspec.Struct, frozen=True):
    """The error that has ended the job of a process."""

    kind: str
    """The name of its class."""
    message: str
    step: str = ""
    """The step that has failed, if a step has."""
    where: str | None = None
    """The line of the user, for errors of the graph; None: the line that has started the run."""
    notes: tuple[str, ...] = ()
    """The notes of the error, and the traceback of its cause."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return an error as plain data."""
        notes = list(getattr(error, "__notes__", ()))
        if not isinstance(error, StreamiterError):
            notes.append("".join(traceback.format_exception(error)).rstrip())
        elif error.__cause__ is not None:
            notes.append("".join(traceback.format_exception(error.__cause__)).rstrip())
        message, where = str(error), None
        if isinstance(error, GraphError):
            message = str(error.args[0])
            # Not the line of the program of this process, which is none of the user's.
            where = None if _file(error.where) == _file(user_line()) else error.where
        step = error.step if isinstance(error, JobFailed) else ""
        return cls(type(error).__name__, message, step, where, tuple(notes))

    def error(self, place: str) -> StreamiterError:
        """Return an error of the same class and message; a note says in which process it arose."""
        error = self._error()
        error.add_note(f"in {place}")
        for note in self.notes:
            error.add_note(note)
        return error

    def _error(self) -> StreamiterError:
        if self.kind == "JobFailed":
            return JobFailed(self.message, step=self.step)
        if self.kind == "GraphError":
            return GraphError(self.message, where=self.where)
        known = getattr(errors, self.kind, None)
        if not (isinstance(known, type) and issubclass(known, StreamiterError)):
            return InternalError(f"{self.kind}: {self.message}")
        # Some classes have more arguments, which are only for those who catch them inside of a step.
        return known(self.message) if known.__init__ is Exception.__init__ else StreamiterError(self.message)


def _file(line: str) -> str:
    return line.rpartition(":")[0]


def collected_parts(operators: Mapping[Step, Operator]) -> Iterator[tuple[str, int, list[object]]]:
    """Give what the steps of ``stream.collect()`` have collected: the name of the step, a subtask and its records."""
    for step, operator in operators.items():
        if isinstance(operator, Collect):
            for subtask, items in operator.into.parts().items():
                yield step.name, subtask, items


def put_collected(steps: Sequence[Step], name: str, subtask: int, items: list[object]) -> None:
    """Put the records of a subtask into the result of ``stream.collect()`` in this process."""
    step = next(step for step in steps if step.name == name)
    operator = step.factory()
    assert isinstance(operator, Collect)
    operator.into.begin(subtask, step.parallelism)[:] = items


def merged(steps: Sequence[Step], parts: Mapping[int, JobStatistics]) -> JobStatistics:
    """Return the statistics of the jobs of all processes as those of one job, with its tasks in their usual order."""
    places = {step.name: place for place, step in enumerate(steps)}
    tasks = {task.name: task for number in sorted(parts, reverse=True) for task in parts[number].tasks}
    states = {part.state for part in parts.values()}
    first = parts[min(parts)]
    return replace(
        first,
        state=next((state for state in ("aborted", "suspended") if state in states), first.state),
        tasks=tuple(sorted(tasks.values(), key=lambda task: (places[task.steps[0].step], task.steps[0].subtask))),
    )
