"""The coordinator of a running loop: heads and entrances report to it, and it posts decisions to them.

``LoopProgress`` decides. The coordinator keeps decisions back during a checkpoint, and throttles new input while much
feedback waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from streamiter.iteration.progress import Completed, Decision, Ended, EndReason, LoopProgress, ReleasedEpoch
from streamiter.records import Control
from streamiter.runtime.feedback import FeedbackChannel
from streamiter.runtime.gate_epochs import EpochsAside
from streamiter.runtime.statistics import LoopStatistics, RoundStatistics

if TYPE_CHECKING:
    from streamiter.checkpoints.disk_queue import ReplayCache

Post = Callable[[Control], None]

_log = logging.getLogger("streamiter.job")

# While feedback waits on disk, an entrance admits one batch of new input for this many batches of feedback. The loop
# empties at this ratio, and input is never stopped, so that the job still sees its input end.
_FEEDBACK_FOR_ONE_INPUT: Final = 16


@final
class Advance(Control):
    """Posted to heads and entrances: ``epoch`` is complete, and the iteration continues.

    A head passes on the feedback that it holds for the next epoch, then the watermark.
    """

    __slots__ = ("epoch",)

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch


@final
class Release(Control):
    """Posted to heads: they pass on held feedback of ``epoch``, as far as staleness allows, before it is complete."""

    __slots__ = ("epoch",)

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch


@final
class Terminate(Control):
    """Posted to all members: the iteration ends in ``epoch``, whose held feedback is still passed on."""

    __slots__ = ("epoch",)

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch


@final
class Admit(Control):
    """Posted to an entrance: it may admit a batch again."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RestoredEpochs:
    """The state of a head or an entrance at the snapshot that it resumes from."""

    post: Post
    """Posts a control record to the member."""
    advanced: int
    """The last complete epoch that it was told of."""
    ended_in: int | None
    """The epoch in which it was told that the iteration ends, or None."""
    report: Callable[[], None]
    """Makes it repeat the reports that were not acknowledged."""
    released: int | None = None
    """The last epoch that was released to it; None for an entrance."""


class LoopCoordinator:
    """The one coordinator of an iteration in a running job; heads and entrances call it, in one event loop.

    The *members* of the loop are the subtasks of its heads, criteria heads and entrances. Only the coordinator changes
    the loop's progress.
    """

    def __init__(
        self, heads: int, entrances: int, criteria_heads: int = 0, *, releases_early: bool = True, where: str = ""
    ) -> None:
        """``heads``, ``entrances`` and ``criteria_heads`` are the numbers of their subtasks.

        ``releases_early``: feedback of an epoch need not wait until the data of the epoch has passed. ``where`` is the
        user's line that made the iteration.
        """
        self._releases_early = releases_early
        self._where = where
        self._progress = LoopProgress(heads, entrances, criteria_heads)
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
        """The number of members that have begun the current checkpoint and have not ended it."""
        self._checkpointed = 0
        """The number of members that have ended the current checkpoint."""
        self._abandoned = 0
        """The last checkpoint that was given up."""
        self._undecided: list[Decision] = []
        """Decisions that are kept back during a checkpoint."""

    @property
    def last_released(self) -> int:
        """The last epoch that every head has received."""
        return self._progress.last_released

    @property
    def last_complete(self) -> int:
        """The last complete epoch; heads and entrances may not have been told of it."""
        return self._progress.last_complete

    # -- reports -----------------------------------------------------------------------------------------

    def register_head(
        self, post: Post, feedback: Iterable[FeedbackChannel], held: EpochsAside | None = None, *, name: str = ""
    ) -> int:
        """Register a head and the feedback that it holds for later; return the number of the head."""
        self._heads.append(post)
        self._head_names.append(name)
        self._feedback += feedback
        if held is not None:
            self._held.append(held)
        return len(self._heads) - 1

    def register_criteria_head(self, post: Post, feedback: Iterable[FeedbackChannel]) -> int:
        """Register a head of the criteria; return its number, which follows the numbers of the other heads."""
        self._criteria_heads.append(post)
        self._criteria += feedback
        return self._heads_expected + len(self._criteria_heads) - 1

    def register_entrance(self, post: Post, *, name: str = "") -> int:
        """Register an entrance; return its number."""
        self._entrances.append(post)
        self._entrance_names.append(name)
        return len(self._entrances) - 1

    def register_replay(self, cache: ReplayCache) -> None:
        """Register the cache in which an entrance keeps the data that it replays."""
        self._replays.append(cache)

    def head_received(self, head: int, epoch: int, count: int) -> None:
        """See :meth:`LoopProgress.head_received`."""
        self._tell(self._progress.head_received(head, epoch=epoch, count=count))

    def head_finished(self, head: int) -> None:
        """See :meth:`LoopProgress.head_finished`."""
        self._tell(self._progress.head_finished(head))

    def entrance_passed(self, entrance: int, epoch: int) -> None:
        """See :meth:`LoopProgress.entrance_passed`."""
        self._tell(self._progress.entrance_passed(entrance, epoch))

    def entrance_ended(self, entrance: int) -> None:
        """See :meth:`LoopProgress.entrance_ended`."""
        self._tell(self._progress.entrance_ended(entrance))

    def _tell(self, decisions: Iterable[Decision]) -> None:
        if self._in_checkpoint or self._checkpointed:
            self._undecided += decisions
            return
        # A head that is told of a complete epoch also releases it: one turn of each head instead of two.
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
        """Log an end that the user may not expect: often a data stream should be replayed."""
        if self._progress.end_reason is EndReason.NO_FEEDBACK_DESPITE_CRITERIA:
            _log.warning(
                "the iteration at %s ended in epoch %d: %s; to send its data in every epoch, pass replayed(stream)",
                self._where,
                epoch,
                self._progress.end_reason.value,
            )

    def end_soon(self) -> None:
        """End the iteration at the next complete epoch in which it may end, because the job is drained."""
        self._progress.end_soon()

    def _post(self, posts: Iterable[Post], control: Control) -> None:
        for post in posts:
            post(control)

    # -- checkpoints ---------------------------------------------------------------------------------------

    def checkpoint_begins(self, checkpoint: int) -> None:
        """Keep decisions back, because a member takes its snapshot, until all members have taken theirs.

        Otherwise an epoch could be complete in the snapshot of one member because of feedback that another member
        receives again after a restore.
        """
        if checkpoint > self._abandoned:
            self._in_checkpoint += 1

    def checkpoint_ends(self, checkpoint: int) -> None:
        """Note that a member has taken its snapshot, with the feedback that belongs to it."""
        if checkpoint <= self._abandoned:
            return
        self._in_checkpoint -= 1
        self._checkpointed += 1
        if self._checkpointed == self._members:
            self._resume()

    def checkpoint_abandoned(self, checkpoint: int) -> None:
        """Stop waiting for a checkpoint that is given up."""
        if checkpoint > self._abandoned:
            self._abandoned = checkpoint
            self._resume()

    def _resume(self) -> None:
        self._in_checkpoint = self._checkpointed = 0
        decisions, self._undecided = self._undecided, []
        self._tell(decisions)

    def restore(self, member: RestoredEpochs) -> None:
        """Note that a member resumes from a snapshot. When all members have done so, the loop resumes."""
        self._restored.append(member)
        if len(self._restored) < self._members:
            return
        members, self._restored = self._restored, []
        released = max(member.released for member in members if member.released is not None)
        complete = max(member.advanced for member in members)
        ended_in = next((member.ended_in for member in members if member.ended_in is not None), None)
        self.told_complete = complete
        self._progress.resume_after(released=released, complete=complete, ended_in=ended_in)
        for member in members:
            self._repeat(member, released, complete, ended_in)
        for member in members:
            member.report()
        self._tell(self._progress.all_reported())

    def _repeat(self, member: RestoredEpochs, released: int, complete: int, ended_in: int | None) -> None:
        """Post to a member the decisions that other members received before the snapshot, and this one did not."""
        if member.released is not None and member.released < released:
            member.post(Release(released))
        for epoch in range(member.advanced + 1, complete + 1):
            member.post(Advance(epoch))
        if ended_in is not None and member.ended_in is None:
            member.post(Terminate(ended_in))

    # -- fairness between feedback and new input -----------------------------------------------------------

    @property
    def is_overloaded(self) -> bool:
        """Whether feedback waits on disk, because it needs more memory than its limit."""
        return any(channel.is_spilling for channel in self._feedback)

    def throttle(self, post: Post) -> None:
        """Note that an entrance waits until it may admit a batch again."""
        self._throttled[post] = None

    def feedback_handled(self) -> None:
        """Note that a head has handled a batch of feedback; waiting entrances may be admitted."""
        if not self._throttled:
            return
        self._feedback_handled += 1
        if self._feedback_handled >= _FEEDBACK_FOR_ONE_INPUT or not self.is_overloaded:
            self._feedback_handled = 0
            throttled, self._throttled = self._throttled, {}
            self._post(throttled, Admit())

    def awaited(self) -> str:
        """Return a text that names the members that the current epoch waits for."""
        heads, entrances = self._progress.awaited()
        named = [self._head_names[head] for head in heads if head < len(self._head_names)]
        missing = [f"feedback to {', '.join(named)}"] if named else []
        if entrances:
            silent = ", ".join(self._entrance_names[entrance] for entrance in entrances)
            missing.append(f"data at {silent} (a silent source needs idle_timeout= of epochs_every)")
        return " and ".join(missing) or "the end of the epoch"

    # -- statistics ----------------------------------------------------------------------------------------

    def statistics(self, heads: Sequence[str]) -> LoopStatistics:
        """Return how far the loop has come; ``heads`` are the names of its head steps."""
        waiting = [channel.statistics() for channel in self._feedback]
        criteria = [channel.statistics() for channel in self._criteria]
        held = [queue for aside in self._held for queue in aside.statistics()]
        return LoopStatistics(
            heads=tuple(heads),
            epoch_reached=max([self._progress.last_released, 0, *(channel.last_epoch for channel in waiting)]),
            epoch_received=self._progress.last_released,
            epoch_complete=self._progress.last_complete,
            ended_in=self._progress.ended_in,
            end_reason=None if self._progress.end_reason is None else self._progress.end_reason.value,
            fed_back_records=sum(channel.total_records for channel in waiting),
            criteria_records=sum(channel.total_records for channel in criteria),
            rounds=tuple(RoundStatistics(*run) for run in self._progress.rounds.runs),
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
