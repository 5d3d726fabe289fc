"""The loop's coordinator: between its pure progress and the tasks that report to it and are told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from streamiter.iteration.progress import Completed, Decision, Ended, EndReason, LoopProgress, Released
from streamiter.records import Control
from streamiter.runtime.epochs_aside import EpochsAside
from streamiter.runtime.feedback import FeedbackChannel
from streamiter.runtime.statistics import LoopStatistics, RoundStatistics

if TYPE_CHECKING:
    from streamiter.checkpoints.replay_cache import ReplayCache

__all__ = ["Admit", "Advance", "LoopCoordinator", "Release", "Restored", "Terminate"]

Post = Callable[[Control], None]

_log = logging.getLogger("streamiter.job")

# While feedback waits on disk, one batch of new input is let in for this many batches of feedback: few
# enough that the loop empties, never none, so that the job still sees its input end.
_FEEDBACK_FOR_ONE_INPUT: Final = 16


@final
class Advance(Control):
    """``epoch`` is complete, and the iteration goes on: held feedback goes on, then the watermark."""

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
class Restored:
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
        self._restored: list[Restored] = []
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
            if isinstance(decision, Released):
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

    def restore(self, member: Restored) -> None:
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

    def _repeat(self, member: Restored, released: int, complete: int, ended_in: int | None) -> None:
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
