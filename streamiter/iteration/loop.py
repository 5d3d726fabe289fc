"""The loop of an iteration while the graph is built, and ``for_each_round``.

``Loop`` knows the steps at the border of the body and checks the steps inside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from streamiter.engine.graph.feedback import FeedbackDeparture, FeedbackLimits
from streamiter.engine.graph.graph import Edge, Step
from streamiter.engine.graph.statistics import LoopStatistics
from streamiter.engine.plan.messages import shared_object
from streamiter.errors import GraphError, shortened
from streamiter.flow.building import RoundScope, check_round_scope
from streamiter.flow.stream import Stream
from streamiter.iteration.border import LoopMember
from streamiter.iteration.coordinator import LoopCoordinator
from streamiter.operators.functions import asynchronous_kind, misfit
from streamiter.operators.operator import Context, IterationListener, JobScope, Operator

_CALLBACKS: Final = ("on_epoch_watermark_incremented", "on_iteration_terminated")


class Loop:
    """One iteration of a flow: its settings, and the steps at the border of its body."""

    def __init__(
        self,
        *,
        bounded: bool,
        has_plain_endless_data: bool,
        limits: FeedbackLimits,
        max_epochs_ahead: int | None = None,
        has_stamped_data: bool = False,
    ) -> None:
        """``limits`` are those of each channel of feedback, and of each queue of records whose epoch is not due."""
        self.bounded = bounded
        """Whether it ends when nothing is fed back, or the criteria say so."""
        self.limits = limits
        self.max_epochs_ahead = max_epochs_ahead
        self.has_stamped_data = has_stamped_data
        self._has_plain_endless_data = has_plain_endless_data
        self._heads: list[Step] = []
        self._criteria_heads: list[Step] = []
        self._entrances: list[Step] = []
        self._plain_entrances: set[Step] = set()
        """The entrances of data that is neither replayed nor stamped: a step that reads only such data ends with it."""
        self._feedback: dict[Step, Sequence[Edge]] = {}
        """The edges that bring feedback, by head."""

    # -- while the body is built ---------------------------------------------------------------------------

    def add_head(self, step: Step) -> None:
        """Add the head of a variable stream."""
        self._heads.append(step)

    def add_criteria_head(self, step: Step) -> None:
        """Add the head of the termination criteria."""
        self._criteria_heads.append(step)

    def add_entrance(self, step: Step, *, is_plain: bool) -> None:
        """Add the entrance of a data stream, which is plain if its data is neither replayed nor stamped."""
        self._entrances.append(step)
        if is_plain:
            self._plain_entrances.add(step)

    def close(self, head: Step, feedback: Sequence[Edge]) -> None:
        """Close the loop: these edges bring feedback to a head."""
        self._feedback[head] = feedback

    def feedback_to(self, step: Step) -> Sequence[Edge]:
        """Return the edges that bring feedback to a step; none unless the step is a head."""
        return self._feedback.get(step, ())

    @property
    def heads(self) -> Sequence[Step]:
        """The heads of the variable streams, in the order of the streams."""
        return self._heads

    @property
    def members(self) -> Sequence[Step]:
        """The steps at the border, which report to the coordinator: heads, heads of the criteria, entrances."""
        return [*self._heads, *self._criteria_heads, *self._entrances]

    # -- in a running job ----------------------------------------------------------------------------------

    def join(self, context: Context, member: LoopMember) -> tuple[LoopCoordinator, int]:
        """Connect a member with the coordinator; return where it reports, and its number."""
        number = member.surroundings.member
        reports = self.reports(context.scope)
        reports.join(number, member)
        self._members(context.scope).append(member)
        return reports, number

    def reports(self, scope: JobScope) -> LoopCoordinator:
        """Return where members report: the coordinator or, in another process, what sends the reports to it."""
        return scope.get(
            (self, "reports"),
            lambda: shared_object(scope, f"loop of {self._heads[0].name}", lambda: self.coordinator(scope)),
        )

    def _members(self, scope: JobScope) -> list[LoopMember]:
        return scope.get((self, "members"), list)

    def coordinator(self, scope: JobScope) -> LoopCoordinator:
        """Return the coordinator of this loop in the job that owns ``scope``.

        In another process than 0 it has no members, so no call has an effect.
        """
        return scope.get(
            self,
            lambda: LoopCoordinator(
                heads=_subtasks(self._heads),
                entrances=_subtasks(self._entrances),
                criteria_heads=_subtasks(self._criteria_heads),
                # Only unbounded iterations have stamped data, and synchronous feedback must not wait for it.
                releases_early=not self.bounded,
                where=self._heads[0].where,
            ),
        )

    def checkpoint_abandoned(self, scope: JobScope, checkpoint: int) -> None:
        """Let the loop continue, because a checkpoint is given up."""
        self.coordinator(scope).checkpoint_abandoned(checkpoint)

    def drain(self, scope: JobScope, *, again: bool) -> None:
        """End the iteration early, because the job is drained.

        A bounded iteration ends with the current epoch, because it might never end otherwise. An unbounded iteration
        continues until nothing is fed back: this feedback belongs to input that was read. With ``again`` it also ends
        with the current epoch.
        """
        if self.bounded or again:
            self.coordinator(scope).end_soon()

    def shares(self, scope: JobScope) -> list[Mapping[str, int]]:
        """Return what this process adds to the statistics: its members, and the feedback that has not left it."""
        departures = [half for head in self._heads for half in scope.get((head, "departures"), list[FeedbackDeparture])]
        return [
            *(member.statistics() for member in self._members(scope)),
            *(departure.waiting() for departure in departures),
        ]

    def statistics(self, scope: JobScope, shares: Sequence[Mapping[str, int]] = ()) -> LoopStatistics:
        """Return how far this loop has come; ``shares`` is what the other processes add."""
        return self.coordinator(scope).statistics([step.name for step in self._heads], [*self.shares(scope), *shares])

    # -- checks of a job that starts -----------------------------------------------------------------------

    def check_wanted(self, step: Step, names: Collection[str] | None) -> None:
        """Raise GraphError if a step wants only inputs whose records arrive at its end: both would wait.

        ``names`` are the inputs that the operator wants before any record has arrived.
        """
        wanted = [edge for edge in step.inputs if names is not None and edge.input_name in names]
        if not wanted or not all(edge.upstream.emits_at_end for edge in wanted):
            return
        border = self._steps_before(wanted) & {*self._heads, *self._entrances}
        ends_with_data = border <= self._plain_entrances
        # The steps that must finish an epoch before its feedback and its criteria are complete.
        waited_for = self._steps_before(edge for edges in self._feedback.values() for edge in edges)
        if ends_with_data or step not in waited_for:
            return
        raise GraphError(
            f"step {step.name!r}: expected wanted_inputs() to name an input that receives records while the iteration "
            f"runs, given only {wanted[0].input_name!r}, whose records arrive only when it has ended; "
            f"{for_each_epoch(bounded=self.bounded)}",
            where=step.where,
        )

    def _steps_before(self, edges: Iterable[Edge]) -> set[Step]:
        """Return the steps of the body whose records reach these edges."""
        found: set[Step] = set()
        waiting = [edge.upstream for edge in edges]
        while waiting:
            step = waiting.pop()
            if step.loop is self and step not in found:
                found.add(step)
                waiting += [edge.upstream for edge in step.edges]
        return found

    def check_operator(self, step: Step, operator: Operator | type[Operator]) -> None:
        """Raise GraphError for an operator, or its class, that cannot work in this loop."""
        kind = operator if isinstance(operator, type) else type(operator)
        _check_callbacks(step, kind)
        if not issubclass(kind, IterationListener):
            _check_does_not_listen(step, kind)
        if operator.epochs_in_order and self._has_plain_endless_data:
            raise GraphError(
                f"step {step.name!r}: epochs_in_order expected data with epochs, given endless "
                "data without epochs, which stays in epoch 0 for ever; stamp it with epochs_every(stream, records=…)",
                where=step.where,
            )


def _subtasks(steps: Iterable[Step]) -> list[str]:
    return [f"{step.name}[{subtask}]" for step in steps for subtask in range(step.parallelism)]


def _check_callbacks(step: Step, kind: type[Operator]) -> None:
    """Raise GraphError for a misspelt callback, which is never called."""
    for method in dir(kind):
        if (
            method.startswith(("on_epoch_", "on_iteration_"))
            and method not in _CALLBACKS
            and callable(getattr(kind, method))
        ):
            from difflib import get_close_matches  # Imported here: only this error needs it.

            [nearest] = get_close_matches(method, _CALLBACKS, n=1, cutoff=0.0)
            raise GraphError(
                f"step {step.name!r}: expected the callbacks of {kind.__name__} to be those of an IterationListener, "
                f"given {method}, which is never called; write {nearest}",
                where=step.where,
            )


def _check_does_not_listen(step: Step, kind: type[Operator]) -> None:
    """Raise GraphError for the callbacks of a class that is no IterationListener: they are never called."""
    for method in _CALLBACKS:
        if hasattr(kind, method):
            raise GraphError(
                f"step {step.name!r}: {method} expected an IterationListener, given {kind.__name__}, which is none, so "
                f"it is never called; write class {kind.__name__}(Operator, IterationListener)",
                where=step.where,
            )


# -- for_each_round ----------------------------------------------------------------------------------------


def for_each_round(streams: Sequence[Stream], sub_body: Callable[[list[Stream]], Sequence[Stream]]) -> list[Stream]:
    """Give each epoch of a bounded iteration its own operators of the steps that ``sub_body`` adds.

    The operators are made for the first record of an epoch and finish at its end. So steps for bounded input work
    inside a loop: ``reduce_all``, ``sort``, ``join``. Data that is not replayed arrives in epoch 0 only.
    ``sub_body(streams)`` is called once and returns a list of streams, which this function returns. Source: FLIP-176's
    ``forEachRound``.

    Raises GraphError outside the body of a bounded iteration, and for streams of the body that are not in ``streams``.

    >>> from streamiter import Flow, IterationBodyResult, iterate_bounded_streams_until_termination, replayed
    >>> flow = Flow("sums")
    >>> def body(variables, data):
    ...     [sums] = for_each_round([*data], lambda streams: [streams[0].reduce_all(lambda a, b: a + b)])
    ...     rounds = variables[0].map(lambda n: n + 1).filter(lambda n: n < 3)
    ...     return IterationBodyResult([rounds], [sums])
    >>> [sums] = iterate_bounded_streams_until_termination(
    ...     [flow.from_items([0])], [replayed(flow.from_items([10, 20]))], body
    ... )
    >>> collected = sums.collect()
    >>> flow.run().state, collected.items
    ('finished', [30, 30, 30])
    """
    given = _listed(streams, "expected a list of streams")
    if not given:
        raise GraphError("for_each_round: expected at least one stream, given none; write for_each_round([stream], …)")
    if not callable(sub_body) or (kind := asynchronous_kind(sub_body)):
        shown = shortened(sub_body) if not callable(sub_body) else f"a {kind}"
        raise GraphError(
            f"for_each_round: expected the sub-body to be a plain function, given {shown}; write def "
            "sub_body(streams) that returns a list of streams"
        )
    if reason := misfit(sub_body, ["streams"]):
        raise GraphError(
            f"for_each_round: expected the sub-body to take one argument, the list of streams, given {reason}; write "
            "def sub_body(streams)"
        )
    flow, loop = given[0].flow, given[0].flow.graph.loop
    if loop is None:
        raise GraphError(
            f"for_each_round: expected to be called in the body of an iteration, given {given[0].name!r} outside; "
            "outside an iteration a step has only one round"
        )
    if not loop.bounded:
        raise GraphError(
            "for_each_round: expected the body of a bounded iteration, given an unbounded one, whose operators live "
            "until it ends; keep a state for each epoch in an IterationListener"
        )
    around = flow.graph.round_scope
    if around is not None and around.whole_body:  # Each round has its own operators of the whole body.
        with flow.graph.all_or_nothing():
            return _result(sub_body(given))
    if around is not None:
        raise GraphError(
            "for_each_round: expected no for_each_round inside another, given one; leave the inner one out"
        )
    for stream in given:
        check_round_scope("for_each_round", stream, None)
    scope = RoundScope(given)
    with flow.graph.all_or_nothing():
        with flow.graph.body_of(loop, scope):
            result = _result(sub_body(given))
        for stream in result:
            check_round_scope("for_each_round", stream, scope)
    scope.give_back(result)
    return result


def for_each_epoch(*, bounded: bool) -> str:
    """Return the advice for a user whose step waits for the end of the iteration."""
    sub_body = "for_each_round([stream], lambda streams: [streams[0].reduce_all(f)]), or "
    return f"for a result of each epoch write {sub_body if bounded else ''}all_reduce(stream, f)"


def _result(streams: object) -> list[Stream]:
    return _listed(streams, "expected the sub-body to return a list of streams")


def _listed(streams: object, expected: str) -> list[Stream]:
    if not isinstance(streams, (list, tuple)) or not all(isinstance(stream, Stream) for stream in streams):
        raise GraphError(f"for_each_round: {expected}, given {shortened(streams)}; write [stream]")
    return list(streams)
