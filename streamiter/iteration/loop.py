"""The loop: what an iteration is while the graph is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

from streamiter.errors import GraphError
from streamiter.flow.stream import Stream
from streamiter.iteration.feedback_through import check_can_be_shared
from streamiter.iteration.progress import Completed, Decision, Ended, EndReason, LoopProgress, ReleasedEpoch
from streamiter.iteration.rounds import RoundScope, for_each_epoch
from streamiter.operators.operator import IterationListener, JobScope, Operator
from streamiter.records import Control
from streamiter.runtime.feedback import FeedbackChannel
from streamiter.runtime.gate_epochs import EpochsAside
from streamiter.runtime.graph import Edge, FeedbackLimits, Step
from streamiter.runtime.statistics import LoopStatistics, RoundStatistics

if TYPE_CHECKING:
    from streamiter.checkpoints.replay_cache import ReplayCache

__all__ = [
    "Admit",
    "Advance",
    "Loop",
    "LoopCoordinator",
    "Release",
    "RestoredEpochs",
    "Terminate",
]


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


Post = Callable[[Control], None]

_log = logging.getLogger("streamiter.job")

# While feedback waits on disk, one batch of new input is let in for this many batches of feedback: few
# enough that the loop empties, never none, so that the job still sees its input end.
_FEEDBACK_FOR_ONE_INPUT: Final = 16


@final
class Advance(Control):
    """``epoch`` is complete, and the iteration goes on: held feedback goes on, then the watermark.

    The loop's coordinator: between its pure progress and the tasks that report to it and are told.
    """

    __slots__ = ("epoch",)

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch


@final
class Release(Control):
    """Held feedback of ``epoch`` (as far as staleness allows) goes on before the epoch is complete."""

    __slots__ = ("epoch",)

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch


@final
class Terminate(Control):
    """The iteration ends in ``epoch``, whose held feedback still goes on."""

    __slots__ = ("epoch",)

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch


@final
class Admit(Control):
    """An entrance may let in a batch again."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RestoredEpochs:
    """What a head or an entrance had been told before the snapshot it goes on from.

    ``report`` makes it report again what it had reported and what was not yet acknowledged.
    """

    post: Post
    advanced: int
    """The last epoch that it was told is complete."""
    ended_in: int | None
    report: Callable[[], None]
    released: int | None = None
    """The last epoch that was released to it; None for an entrance."""


class LoopCoordinator:
    """One for each iteration of a running job; called by its heads and entrances, in one event loop."""

    def __init__(
        self,
        heads: int,
        entrances: int,
        criteria_heads: int = 0,
        *,
        releases_early: bool = True,
        where: str = "",
    ) -> None:
        """``releases_early``: feedback of an epoch need not wait for the data of it to pass.

        ``where`` is the user's line that made the iteration.
        """
        self._releases_early = releases_early
        self._where = where
        self.progress = LoopProgress(heads, entrances, criteria_heads)
        self._members = heads + entrances + criteria_heads
        self._heads_expected = heads
        self._heads: list[Post] = []
        self._criteria_heads: list[Post] = []
        self._entrances: list[Post] = []
        self._head_names: list[str] = []
        self._entrance_names: list[str] = []
        self._feedback: list[FeedbackChannel] = []
        self._criteria: list[FeedbackChannel] = []
        self._held: list[EpochsAside] = []
        self._throttled: dict[Post, None] = {}
        self._feedback_handled = 0
        self.told_complete = -1
        """The last complete epoch that heads and entrances have been told of."""
        self._replays: list[ReplayCache] = []
        self._restored: list[RestoredEpochs] = []
        self._in_checkpoint = 0
        """Members that a checkpoint has begun at but not ended."""
        self._checkpointed = 0
        """Members that the checkpoint under way has ended at."""
        self._abandoned = 0
        """The last checkpoint that was given up."""
        self._undecided: list[Decision] = []
        """Decisions kept back while a checkpoint is under way."""

    # -- reports -----------------------------------------------------------------------------------------

    def register_head(
        self,
        post: Post,
        feedback: Iterable[FeedbackChannel],
        held: EpochsAside | None = None,
        *,
        name: str = "",
    ) -> int:
        """A head is there, with what it keeps of its feedback for later; gives its number."""
        self._heads.append(post)
        self._head_names.append(name)
        self._feedback += feedback
        if held is not None:
            self._held.append(held)
        return len(self._heads) - 1

    def register_criteria_head(self, post: Post, feedback: Iterable[FeedbackChannel]) -> int:
        """A head of the criteria stream is there; gives its number, which lies behind those of the others."""
        self._criteria_heads.append(post)
        self._criteria += feedback
        return self._heads_expected + len(self._criteria_heads) - 1

    def register_entrance(self, post: Post, *, name: str = "") -> int:
        """An entrance is there; gives its number."""
        self._entrances.append(post)
        self._entrance_names.append(name)
        return len(self._entrances) - 1

    def register_replay(self, cache: ReplayCache) -> None:
        """An entrance keeps its data here, to send it again."""
        self._replays.append(cache)

    def head_received(self, head: int, epoch: int, count: int) -> None:
        """See :meth:`LoopProgress.head_received`."""
        self._tell(self.progress.head_received(head, epoch=epoch, count=count))

    def head_finished(self, head: int) -> None:
        """See :meth:`LoopProgress.head_finished`."""
        self._tell(self.progress.head_finished(head))

    def entrance_passed(self, entrance: int, epoch: int) -> None:
        """See :meth:`LoopProgress.entrance_passed`."""
        self._tell(self.progress.entrance_passed(entrance, epoch))

    def entrance_ended(self, entrance: int) -> None:
        """See :meth:`LoopProgress.entrance_ended`."""
        self._tell(self.progress.entrance_ended(entrance))

    def _tell(self, decisions: Iterable[Decision]) -> None:
        if self._in_checkpoint or self._checkpointed:
            self._undecided += decisions
            return
        # What is complete is released by that, too: one turn of each head instead of two.
        released: int | None = None
        for decision in decisions:
            if isinstance(decision, ReleasedEpoch):
                released = decision.epoch
            elif isinstance(decision, Completed):
                released = None
                self.told_complete = decision.epoch
                advance = Advance(decision.epoch)
                self._post(self._heads, advance)
                self._post(self._entrances, advance)
            else:
                assert isinstance(decision, Ended)
                released = None
                self._log_end(decision.epoch)
                everyone = (*self._heads, *self._criteria_heads, *self._entrances)
                self._post(everyone, Terminate(decision.epoch))
        if released is not None and self._releases_early:
            self._post(self._heads, Release(released))

    def _log_end(self, epoch: int) -> None:
        """Tell of an end that may be none that was wanted: often a data stream should have been replayed."""
        if self.progress.end_reason is EndReason.NO_FEEDBACK_DESPITE_CRITERIA:
            _log.warning(
                "the iteration at %s ended in epoch %d: %s; if its data is to be seen in every epoch, pass replayed(…)",
                self._where,
                epoch,
                self.progress.end_reason.value,
            )

    def end_soon(self) -> None:
        """End at the next complete epoch in which that is possible: the job is drained."""
        self.progress.end_soon()

    def _post(self, posts: Iterable[Post], control: Control) -> None:
        for post in posts:
            post(control)

    # -- checkpoints ---------------------------------------------------------------------------------------

    def checkpoint_begins(self, checkpoint: int) -> None:
        """A head or entrance takes its snapshot: what is decided from now on waits until all have.

        Otherwise one of them would have an epoch complete in its snapshot, because of feedback that
        another one gets again after a restore.
        """
        if checkpoint > self._abandoned:
            self._in_checkpoint += 1

    def checkpoint_ends(self, checkpoint: int) -> None:
        """It has taken it, with the feedback that belongs to it."""
        if checkpoint <= self._abandoned:
            return
        self._in_checkpoint -= 1
        self._checkpointed += 1
        if self._checkpointed == self._members:
            self._go_on()

    def checkpoint_abandoned(self, checkpoint: int) -> None:
        """It is given up: nothing waits for it any more."""
        if checkpoint > self._abandoned:
            self._abandoned = checkpoint
            self._go_on()

    def _go_on(self) -> None:
        self._in_checkpoint = self._checkpointed = 0
        decisions, self._undecided = self._undecided, []
        self._tell(decisions)

    def restore(self, member: RestoredEpochs) -> None:
        """A head or entrance goes on from a snapshot. When all have said so, the loop goes on."""
        self._restored.append(member)
        if len(self._restored) < self._members:
            return
        members, self._restored = self._restored, []
        released = max(member.released for member in members if member.released is not None)
        complete = max(member.advanced for member in members)
        ended_in = next((member.ended_in for member in members if member.ended_in is not None), None)
        self.told_complete = complete
        self.progress.go_on_after(released=released, complete=complete, ended_in=ended_in)
        for member in members:
            self._repeat(member, released, complete, ended_in)
        for member in members:
            member.report()
        self._tell(self.progress.all_reported())

    def _repeat(self, member: RestoredEpochs, released: int, complete: int, ended_in: int | None) -> None:
        """Tell a member what others had heard before the snapshot, and it had not."""
        if member.released is not None and member.released < released:
            member.post(Release(released))
        for epoch in range(member.advanced + 1, complete + 1):
            member.post(Advance(epoch))
        if ended_in is not None and member.ended_in is None:
            member.post(Terminate(ended_in))

    # -- fairness between feedback and new input -----------------------------------------------------------

    @property
    def is_overloaded(self) -> bool:
        """Whether more feedback waits than memory is given to."""
        return any(channel.is_spilling for channel in self._feedback)

    def throttle(self, post: Post) -> None:
        """An entrance waits to be admitted again."""
        self._throttled[post] = None

    def feedback_handled(self) -> None:
        """A head has handled a batch of feedback."""
        if not self._throttled:
            return
        self._feedback_handled += 1
        if self._feedback_handled >= _FEEDBACK_FOR_ONE_INPUT or not self.is_overloaded:
            self._feedback_handled = 0
            throttled, self._throttled = self._throttled, {}
            self._post(throttled, Admit())

    def awaited(self) -> str:
        """Who the epoch under way waits for, for people."""
        heads, entrances = self.progress.awaited()
        named = [self._head_names[head] for head in heads if head < len(self._head_names)]
        missing = [f"what is fed back to {', '.join(named)}"] if named else []
        if entrances:
            silent = ", ".join(self._entrance_names[entrance] for entrance in entrances)
            missing.append(f"data at {silent} (a silent source needs idle_timeout= of epochs_every)")
        return " and ".join(missing) or "the end of the epoch"

    # -- statistics ----------------------------------------------------------------------------------------

    def statistics(self, heads: Sequence[str]) -> LoopStatistics:
        """How far the loop has come; ``heads`` are the names of its head steps."""
        waiting = [channel.statistics() for channel in self._feedback]
        criteria = [channel.statistics() for channel in self._criteria]
        held = [queue for aside in self._held for queue in aside.statistics()]
        return LoopStatistics(
            heads=tuple(heads),
            epoch_reached=max([self.progress.last_released, 0, *(channel.last_epoch for channel in waiting)]),
            epoch_received=self.progress.last_released,
            epoch_complete=self.progress.last_complete,
            ended_in=self.progress.ended_in,
            end_reason=None if self.progress.end_reason is None else self.progress.end_reason.value,
            fed_back_records=sum(channel.total_records for channel in waiting),
            criteria_records=sum(channel.total_records for channel in criteria),
            rounds=tuple(RoundStatistics(*run) for run in self.progress.rounds.runs),
            waiting_records=sum(channel.records for channel in waiting),
            held_records=sum(queue.records for queue in held),
            bytes_in_memory=sum(channel.bytes_in_memory for channel in waiting)
            + sum(queue.bytes_in_memory for queue in held),
            bytes_on_disk=sum(channel.bytes_on_disk for channel in waiting)
            + sum(queue.bytes_on_disk for queue in held),
            replayed_records=sum(cache.records for cache in self._replays),
            replayed_bytes_in_memory=sum(cache.bytes_in_memory for cache in self._replays),
            replayed_bytes_on_disk=sum(cache.bytes_on_disk for cache in self._replays),
        )
