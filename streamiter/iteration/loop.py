"""The loop: what an iteration is while the graph is built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

from streamiter.errors import GraphError
from streamiter.flow.stream import Stream
from streamiter.iteration.coordinator import LoopCoordinator
from streamiter.iteration.rounds import RoundScope, for_each_epoch
from streamiter.iteration.shared_loop import check_can_be_shared
from streamiter.operators.context import JobScope
from streamiter.operators.operator import IterationListener, Operator
from streamiter.runtime.graph import Edge, FeedbackLimits, Step
from streamiter.runtime.statistics import LoopStatistics

__all__ = ["Loop"]

_CALLBACKS: Final = ("on_epoch_watermark_incremented", "on_iteration_terminated")


class LoopSavepoint(NamedTuple):
    """What of a loop changes while its body is built, at one moment."""

    leaving: int
    round_scope: RoundScope | None


class Loop:
    """The scope of one iteration body: its border steps, and what leaves it beside its outputs."""

    def __init__(
        self,
        *,
        bounded: bool,
        has_plain_endless_data: bool,
        limits: FeedbackLimits,
        max_epochs_ahead: int | None = None,
        has_stamped_data: bool = False,
    ) -> None:
        self.heads: list[Step] = []
        self.criteria_heads: list[Step] = []
        self.entrances: list[Step] = []
        self.plain_entrances: list[Step] = []
        """Those of data that is neither replayed nor stamped: what depends on it alone has ended with it."""
        self.leaving: list[tuple[Stream, Callable[[Stream], None]]] = []
        self.bounded = bounded
        """Whether it ends when nothing is fed back, or the criteria say so."""
        self.limits = limits
        """Of each channel of feedback, and of each queue of records whose epoch's turn has not come."""
        self.round_scope: RoundScope | None = None
        """Set while steps are added that begin anew in each epoch."""
        self.max_epochs_ahead = max_epochs_ahead
        self.has_stamped_data = has_stamped_data
        self._has_plain_endless_data = has_plain_endless_data

    def leave(self, stream: Stream, then: Callable[[Stream], None]) -> None:
        """Bring a stream of the body outside when the body is built, and go on with it there."""
        self.leaving.append((stream, then))

    def savepoint(self) -> LoopSavepoint:
        """What ``roll_back`` goes back to."""
        return LoopSavepoint(len(self.leaving), self.round_scope)

    def roll_back(self, savepoint: LoopSavepoint) -> None:
        """Forget what a part of the body that failed has changed."""
        del self.leaving[savepoint.leaving :]
        self.round_scope = savepoint.round_scope

    def check_streams(self, label: str, edges: Iterable[Edge]) -> None:
        """Raise GraphError where a step would read a stream across the border of a part that begins anew."""
        for edge in edges:
            scope = edge.upstream.round_scope
            if self.round_scope is not None:
                self.round_scope.check_use_inside(label, edge)
            elif scope is not None:
                scope.check_use_outside(label, edge)

    def coordinator(self, scope: JobScope) -> LoopCoordinator:
        """The coordinator of this loop in the job that the scope belongs to."""
        return scope.get(
            self,
            lambda: LoopCoordinator(
                heads=sum(step.parallelism for step in self.heads),
                entrances=sum(step.parallelism for step in self.entrances),
                criteria_heads=sum(step.parallelism for step in self.criteria_heads),
                # Stamped data, of which synchronous feedback must not wait, is in unbounded iterations only.
                releases_early=not self.bounded,
                where=self.heads[0].where,
            ),
        )

    def checkpoint_abandoned(self, scope: JobScope, checkpoint: int) -> None:
        """A checkpoint is given up: what waits for it goes on."""
        self.coordinator(scope).checkpoint_abandoned(checkpoint)

    def drain(self, scope: JobScope, *, again: bool) -> None:
        """The job is drained: a bounded iteration ends with the epoch under way, since it might never end.

        An unbounded one goes on until nothing is fed back any more, which still belongs to what was read; asked
        ``again``, it ends with the epoch under way as well.
        """
        if self.bounded or again:
            self.coordinator(scope).end_soon()

    def statistics(self, scope: JobScope) -> LoopStatistics:
        """How far this loop has come in the job that the scope belongs to."""
        return self.coordinator(scope).statistics([step.name for step in self.heads])

    def check_shared(self, step: Step) -> None:
        """Refuse to be shared by several processes, if that cannot work; ``step`` is one of its steps."""
        check_can_be_shared(self, step)

    def check_wanted(self, step: Step, names: Collection[str] | None) -> None:
        """Refuse that a step reads first what comes when the iteration has ended, where the iteration waits for it.

        ``names`` are the inputs that its operator wants before any record has come.
        """
        wanted = [edge for edge in step.inputs if names is not None and edge.input_name in names]
        if not wanted or not all(edge.upstream.emits_at_end for edge in wanted):
            return
        if self._ends_with_data(wanted) or step not in self._waited_for():
            return
        raise GraphError(
            f"step {step.name!r}: expected wanted_inputs() to name an input that brings records while the iteration "
            f"runs, given {wanted[0].input_name!r} alone, whose records come when it has ended; "
            f"{for_each_epoch(bounded=self.bounded)}",
            where=step.where,
        )

    def _waited_for(self) -> set[Step]:
        """The steps without which no feedback, and no criteria, of an epoch are complete."""
        closing = [
            edge for head in (*self.heads, *self.criteria_heads) for edge in head.inputs if edge.feedback
        ]
        return self._steps_before(closing)

    def _ends_with_data(self, edges: Iterable[Edge]) -> bool:
        """Whether plain data is all that the edges depend on."""
        border = self._steps_before(edges) & {*self.heads, *self.entrances}
        return border <= set(self.plain_entrances)

    def _steps_before(self, edges: Iterable[Edge]) -> set[Step]:
        """The steps of the body from which records come to these edges."""
        found: set[Step] = set()
        waiting = [edge.upstream for edge in edges]
        while waiting:
            step = waiting.pop()
            if step.loop is self and step not in found:
                found.add(step)
                waiting += [edge.upstream for edge in step.inputs if edge.feedback is None]
        return found

    def check_operator(self, step: Step, operator: Operator | type[Operator]) -> None:
        """Refuse what cannot work in this loop: an operator, or its class, where that is known earlier."""
        kind = operator if isinstance(operator, type) else type(operator)
        _check_callbacks(step, kind)
        if not issubclass(kind, IterationListener):
            _check_does_not_listen(step, kind)
        if operator.epochs_in_order and self._has_plain_endless_data:
            raise GraphError(
                f"step {step.name!r}: epochs_in_order expected data with epochs, given endless "
                "data without, which stays in epoch 0 for ever; stamp it with epochs_every(stream, records=…)",
                where=step.where,
            )


def _check_callbacks(step: Step, kind: type[Operator]) -> None:
    """What is misspelt would never be called."""
    for method in dir(kind):
        if (
            method.startswith(("on_epoch_", "on_iteration_"))
            and method not in _CALLBACKS
            and callable(getattr(kind, method))
        ):
            raise GraphError(
                f"step {step.name!r}: expected the callbacks of {kind.__name__} to be those of an IterationListener, "
                f"given {method}, which would not be called; write {_nearest_callback(method)}",
                where=step.where,
            )


def _check_does_not_listen(step: Step, kind: type[Operator]) -> None:
    """What only an IterationListener hears of would never be called."""
    for method in _CALLBACKS:
        if hasattr(kind, method):
            raise GraphError(
                f"step {step.name!r}: {method} expected an IterationListener, given {kind.__name__}, which is none and "
                f"would not be called; write class {kind.__name__}(Operator, IterationListener)",
                where=step.where,
            )


def _nearest_callback(method: str) -> str:
    from difflib import get_close_matches  # for this error only

    return get_close_matches(method, _CALLBACKS, n=1, cutoff=0.0)[0]
