"""The border of a loop: the operators through which records enter the body of an iteration.

A *head* is before each variable stream: it passes on the initial variables, then the feedback. A *criteria head*
receives the termination criteria. An *entrance* is before each data stream. They are boundary operators, which see
control records themselves; they report to the loop's coordinator, and it tells them when an epoch is complete and when
the iteration ends. Each keeps the decisions that it was told, because the coordinator may be in another process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

from streamiter.engine.graph.feedback import AttachedBoundary, FeedbackStatistics
from streamiter.engine.inbox.port_progress import InputEnded
from streamiter.engine.storage.disk_queue import SpillStatistics
from streamiter.errors import CheckpointError
from streamiter.iteration.coordinator import FEEDBACK_FOR_ONE_INPUT, LoopCoordinator, LoopDecisions, RestoredMember
from streamiter.iteration.progress import EpochCounts
from streamiter.operators.declared_state import (
    COPIED,
    EVERY,
    GREATEST,
    LEAST,
    NESTED,
    DeclaredState,
    SharedOperator,
    declared,
    for_all,
    of_nested,
)
from streamiter.operators.definitions import Definition
from streamiter.operators.operator import BoundaryOutput, Context
from streamiter.values.records import Batch, Control, EndOfData, EndOfInput, EpochWatermark

INITIAL = "initial"
"""The input of a head for the initial variables."""
FEEDBACK = "feedback"
"""The input of a head, or of a criteria head, for records that come back."""

_NO_EPOCH: Final = -1


class ReceivedEpochs(DeclaredState):
    """The feedback that one head has received of each epoch, and the epochs that it has reported to the coordinator."""

    counts = declared(made=EpochCounts, form=NESTED)
    """The counts of epochs that are not received completely."""
    _unacknowledged: dict[int, int] = declared(made=dict, form=COPIED)
    """The counts of reported epochs, at least of those behind ``complete``; a state has no others."""
    _reported = declared(_NO_EPOCH)
    _has_ended = declared(False)
    complete = _NO_EPOCH
    """The last epoch that some member was told of as complete: its count, and those before it, need not be kept."""

    def report_to(self, reports: LoopCoordinator, head: int) -> None:
        """Report to the coordinator from now on, as the head of this number."""
        self._reports, self._head = reports, head

    def report_up_to(self, epoch: int) -> None:
        """Report that all feedback of the epochs up to ``epoch`` has arrived: any number of new epochs, or none."""
        unacknowledged = self._unacknowledged  # In the order of their epochs.
        while unacknowledged and (first := next(iter(unacknowledged))) <= self.complete:
            del unacknowledged[first]
        if self._has_ended:
            return
        for received in range(self._reported + 1, epoch + 1):
            unacknowledged[received] = count = self.counts.take(received)
            self._reported = received
            self._reports.received(self._head, received, count)

    def state(self) -> dict[str, Any]:
        # Complete epochs are forgotten with the next report.
        kept = {epoch: count for epoch, count in self._unacknowledged.items() if epoch > self.complete}
        return {**super().state(), "unacknowledged": kept}

    def report_following(self, epoch: int) -> None:
        """Report the same, where an epoch is received only after some member was told of the epoch before it."""
        self.complete = epoch - 1
        self.report_up_to(epoch)

    def end(self) -> None:
        """Report that no more feedback will arrive."""
        self.report_up_to(self.counts.last_epoch or 0)
        self._has_ended = True
        self._reports.ended(self._head)

    def report_restored(self, told: RestoredMember) -> None:
        """Report that the head resumes, with everything again that the coordinator may not know."""
        counts = tuple(self._unacknowledged.items())
        state = told._replace(reported=self._reported, counts=counts, has_ended=self._has_ended)
        self._reports.restored(self._head, state)

    @classmethod
    def redistribute(cls, states: Sequence[Mapping[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Give the counts of all heads to the first new head; the others have reported the same epochs with count 0."""
        reported = min(state["reported"] for state in states)
        has_ended = all(state["has ended"] for state in states)
        known = [state["unacknowledged"] for state in states]
        sums = {epoch: sum(of_head.get(epoch, 0) for of_head in known) for epoch in sorted(set(chain(*known)))}
        again = [(epoch, epoch, count) for epoch, count in sums.items() if epoch > reported and count]
        runs = EpochCounts.added([again, *(state["counts"]["runs"] for state in states)])
        return [
            {
                "counts": {"runs": [] if head else runs},
                "unacknowledged": {epoch: 0 if head else count for epoch, count in sums.items() if epoch <= reported},
                "reported": reported,
                "has ended": has_ended,
            }
            for head in range(parallelism)
        ]


def _end_of_all(ended_in: Sequence[int | None]) -> int | None:
    if len(set(ended_in)) > 1:
        raise CheckpointError("the iteration was about to end, and only some of them had been told")
    return ended_in[0]


JoinLoop = Callable[[Context, "LoopMember"], tuple[LoopCoordinator, int]]
"""Connects a member with the coordinator of its loop; returns where it reports, and its number."""


class LoopMember(SharedOperator, AttachedBoundary, LoopDecisions):
    """Base of the members of a loop. Its task handles a decision, which is a notice, before the next batch."""

    outlives_inputs = True
    ended_in: int | None = declared(None, share=for_all(_end_of_all))
    """The epoch in which the member was told that the iteration ends; None if it was not."""

    def __init__(self, join: JoinLoop) -> None:
        self._join = join

    def open(self, context: Context) -> None:
        self.context = context
        self.reports, self.number = self._join(context, self)

    def statistics(self) -> Mapping[str, int]:
        """Return its share of the statistics of the loop."""
        return {}

    def checkpoint_begins(self, checkpoint: int) -> None:
        self.reports.checkpoint_begins(self.number, checkpoint)


class ReceivingHead(LoopMember):
    """Base of the heads: they report the records that come back, and end with the iteration."""

    received = declared(made=ReceivedEpochs, form=NESTED, share=of_nested(ReceivedEpochs.redistribute))

    def __init__(self, join: JoinLoop) -> None:
        super().__init__(join)
        self._in_checkpoint = False
        self._postponed_end: int | None = None
        """The epoch of the end of the iteration, postponed until the feedback of a checkpoint is complete."""

    def open(self, context: Context) -> None:
        super().open(context)
        self.received.report_to(self.reports, self.number)

    def terminate(self, epoch: int) -> None:
        self.context.post(partial(self._end, epoch))

    async def _end(self, epoch: int, out: BoundaryOutput) -> None:
        """End with the iteration: pass on the records that are held, then the end."""
        if self._in_checkpoint:
            self._postponed_end = epoch
            return
        await self.emit_last(epoch, out)
        self.ended_in = epoch
        await out.control(EndOfInput(epoch))

    async def emit_last(self, epoch: int, out: BoundaryOutput) -> None:
        """Emit the records that are held of the epoch in which the iteration ends."""

    def checkpoint_begins(self, checkpoint: int) -> None:
        self._in_checkpoint = True
        super().checkpoint_begins(checkpoint)

    def checkpoint_ends(self, checkpoint: int) -> None:
        self._in_checkpoint = False
        if self._postponed_end is not None:
            self.terminate(self._postponed_end)


class Head(ReceivingHead):
    """Passes on the initial variables and the feedback of a variable stream, and admits feedback epoch by epoch.

    With ``max_epochs_ahead`` None all feedback is admitted.
    """

    _released = declared(_NO_EPOCH, share=LEAST)
    _advanced = declared(_NO_EPOCH, share=LEAST)
    """The last complete epoch that it was told of."""
    _complete = declared(_NO_EPOCH, share=GREATEST)
    """The last complete epoch that it, or any head that it replaces, was told of."""
    _passed_watermark = declared(_NO_EPOCH, share=LEAST)
    _initial_ended = declared(False, share=EVERY)
    _feedback_ended = declared(False, share=EVERY)

    def __init__(self, join: JoinLoop, max_epochs_ahead: int | None) -> None:
        super().__init__(join)
        self._max_epochs_ahead = max_epochs_ahead
        self._is_overloaded = False
        """Whether some of its feedback waits on disk."""
        self._handled = 0
        """The number of batches of feedback that were handled since it began to wait on disk, or since the last
        report."""

    def open(self, context: Context) -> None:
        super().open(context)
        self.surroundings.inbox.hand_over_feedback(self.received.report_up_to)
        if self._max_epochs_ahead is not None:
            self.surroundings.inbox.aside.begin(self._receive)
            self._admit()
        for channel in self.surroundings.feedback_channels:
            channel.call_at_limit(self._report_overload)

    def _report_overload(self) -> None:
        is_overloaded = any(channel.is_spilling for channel in self.surroundings.feedback_channels)
        if is_overloaded is not self._is_overloaded:
            self._is_overloaded, self._handled = is_overloaded, 0
            self.reports.overloaded(self.number, is_overloaded)

    def statistics(self) -> Mapping[str, int]:
        waiting = [channel.statistics() for channel in self.surroundings.feedback_channels]
        held = self.surroundings.inbox.aside.statistics()
        queues: list[FeedbackStatistics | SpillStatistics] = [*waiting, *held]
        return {
            "epoch_reached": max((channel.last_epoch for channel in waiting), default=0),
            "fed_back_records": sum(channel.total_records for channel in waiting),
            "waiting_records": sum(channel.records for channel in waiting),
            "held_records": sum(queue.records for queue in held),
            "bytes_in_memory": sum(queue.bytes_in_memory for queue in queues),
            "bytes_on_disk": sum(queue.bytes_on_disk for queue in queues),
        }

    # -- decisions ---------------------------------------------------------------------------------------

    def advance(self, epoch: int) -> None:
        self.context.post(partial(self._release, epoch, True))

    def release(self, epoch: int) -> None:
        self.context.post(partial(self._release, epoch, False))

    def stop(self, epoch: int) -> None:
        self.ended_in = epoch
        self.reports.stopped(self.number, epoch)

    # -- records -----------------------------------------------------------------------------------------

    def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        if input_name == INITIAL:
            out.emit_batch(records, 0)
            return
        if self._receive(epoch, len(records)):
            out.emit_batch(records, epoch)

    def _receive(self, epoch: int, records: int) -> bool:
        """Count feedback that has arrived, and while feedback waits on disk, the batches of it.

        Return whether it is kept: feedback behind the epoch in which the iteration ends is dropped.
        """
        if self.ended_in is not None and epoch > self.ended_in:
            return False
        self.received.counts.add(epoch, records)
        if self._is_overloaded:
            self._handled = (self._handled + 1) % FEEDBACK_FOR_ONE_INPUT
            if not self._handled:
                self.reports.handled(self.number)
        return True

    def _admit(self) -> None:
        # Initial variables have epoch 0, and feedback has epochs from 1 on.
        self.surroundings.inbox.admit_up_to(max(0, self._released + (self._max_epochs_ahead or 0)))

    async def _release(self, epoch: int, is_complete: bool, out: BoundaryOutput) -> None:
        """Emit the feedback that may follow ``epoch``; then its watermark, if it is complete."""
        if epoch > self._released:
            self._released = epoch
            if (ahead := self._max_epochs_ahead) is not None:
                self.surroundings.inbox.admit_up_to(epoch + ahead)
                await self._emit_set_aside(epoch + ahead, out)
        if is_complete:
            self._advanced = self._complete = self.received.complete = epoch
            if epoch > self._passed_watermark:
                self._passed_watermark = epoch
                await out.control(EpochWatermark(epoch))

    async def _emit_set_aside(self, up_to_epoch: int, out: BoundaryOutput) -> None:
        """Emit the batches that were set aside, one by one: all together may need far more memory than the limit."""
        take, more = self.surroundings.inbox.aside.take, True
        while more:
            batch, more = take(up_to_epoch)
            if batch is not None:
                out.emit_batch(batch.records, batch.epoch)
            if more:
                await out.room()

    # -- control records ---------------------------------------------------------------------------------

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, InputEnded):
            self._input_ended(control.input_name)
            if control.input_name == INITIAL and self._max_epochs_ahead == 0 and self._passed_watermark < 0:
                # Epoch 0 brings no feedback and never ends the iteration, so the watermark need not wait for data.
                # Steps that merge in order then handle the data of epoch 0 as it arrives.
                self._passed_watermark = 0
                await out.control(EpochWatermark(0))
        elif isinstance(control, EpochWatermark):
            self.received.report_up_to(control.epoch)

    def _input_ended(self, input_name: str) -> None:
        if input_name == INITIAL:
            self._initial_ended = True
            self.received.report_up_to(0)
        else:
            self._feedback_ended = True
        if self._initial_ended and self._feedback_ended:
            self.received.end()

    async def emit_last(self, epoch: int, out: BoundaryOutput) -> None:
        await self._emit_set_aside(epoch, out)

    # -- state -------------------------------------------------------------------------------------------

    def definition(self) -> Definition:
        """Without a limit there is no place for feedback that is set aside."""
        return {**super().definition(), "max_epochs_ahead": None if self._max_epochs_ahead is None else "a number"}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if self._max_epochs_ahead is not None:
            self._admit()
        self.received.report_restored(RestoredMember(self.ended_in, self._advanced, self._complete, self._released))

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        """Begin again: the iteration has ended, so no feedback is left. The initial variables end once more."""
        return self.at_start()


class CriteriaHead(ReceivingHead):
    """Counts the termination criteria of each epoch and drops them: only whether there are any matters."""

    def open(self, context: Context) -> None:
        super().open(context)
        self.surroundings.inbox.hand_over_feedback(self.received.report_following)
        self.surroundings.inbox.aside.begin(self.received.counts.add)  # It returns None, so none is kept.
        self.surroundings.inbox.admit_up_to(-math.inf)
        self.received.report_up_to(0)

    def statistics(self) -> Mapping[str, int]:
        return {"criteria_records": sum(channel.total_records for channel in self.surroundings.feedback_channels)}

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, EpochWatermark):
            self.received.report_following(control.epoch)
        elif isinstance(control, InputEnded):
            self.received.end()

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.received.report_restored(RestoredMember(self.ended_in))


# If the body wants data before feedback, a head is blocked, and no handled feedback can admit data. After this time an
# entrance admits a batch anyway; otherwise head and entrance would wait for each other.
_ADMIT_AFTER_S: Final = 0.05


class Entrance(LoopMember):
    """Passes on the data of a data stream, and reports its progress.

    While too much feedback waits, the entrance admits a batch only now and then. Stamped data of epochs too far ahead
    stays in its inbox. When the data has ended, the entrance stays until the iteration ends.
    """

    last_complete = declared(_NO_EPOCH, share=LEAST)
    """The last complete epoch that it was told of."""
    known_complete = declared(_NO_EPOCH, share=GREATEST)
    """The last complete epoch that it, or any entrance that it replaces, was told of."""
    _arrived_watermark = declared(_NO_EPOCH, share=GREATEST)
    """The last watermark that has arrived, behind the data of its epochs."""
    _passed_watermark = declared(_NO_EPOCH, share=GREATEST)
    _end_arrived = declared(False, share=EVERY)
    _data_ended = declared(False, share=EVERY)

    def __init__(self, join: JoinLoop, *, stamped: bool, max_epochs_ahead: int | None) -> None:
        super().__init__(join)
        self._stamped = stamped
        self._max_epochs_ahead = max_epochs_ahead
        # While the next batch is too far ahead, no channel is read. So all channels must have brought the epochs before
        # it. In a synchronous loop the inbox merges in order, and sees to that itself.
        self.epochs_in_order = stamped and bool(max_epochs_ahead)
        self._is_overloaded = False
        self._throttled = False
        self._awaited = "the end of the epoch"

    def open(self, context: Context) -> None:
        super().open(context)
        self._admit()

    def advance(self, epoch: int) -> None:
        self.context.post(lambda _: self._advance(epoch))

    def terminate(self, epoch: int) -> None:
        self.context.post(partial(self._terminate, epoch))

    def admit(self) -> None:
        self.context.post(self._admit_batch)

    def overload(self, is_overloaded: bool) -> None:
        self._is_overloaded = is_overloaded
        self.admit()

    def awaits(self, text: str) -> None:
        self._awaited = text

    def wanted_inputs(self) -> Iterable[str] | None:
        return () if self._throttled else None

    def held_for(self) -> str | None:
        if not self.surroundings.inbox.is_ahead:
            return None
        self.reports.asks_awaited(self.number)  # In another process the answer is there at the next look.
        return f"its data is ahead of epoch {self.last_complete + 1}, which waits for {self._awaited}"

    def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        if not self._stamped:
            epoch = 0
        out.emit_batch(records, epoch)
        if self._is_overloaded:
            self._throttled = True
            self.context.clock.call_later(_ADMIT_AFTER_S, self.admit)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, EpochWatermark):
            self._arrived_watermark = control.epoch
            await self._pass(out)
        elif isinstance(control, InputEnded):
            self._end_arrived = True
            self.admit()  # The last watermark may follow this end, and the data ends behind it.

    async def _admit_batch(self, out: BoundaryOutput) -> None:
        self._throttled = False
        await self._pass(out)

    async def _terminate(self, epoch: int, out: BoundaryOutput) -> None:
        self.ended_in = epoch
        await out.control(EndOfInput(epoch))

    def _advance(self, epoch: int) -> None:
        self.last_complete = self.known_complete = epoch
        self._admit()

    def _admit(self) -> None:
        """Let data of epochs too far ahead stay in the inbox, if there is a limit."""
        if self._stamped and self._max_epochs_ahead is not None:
            self.surroundings.inbox.admit_up_to(self.last_complete + 1 + self._max_epochs_ahead)

    async def _pass(self, out: BoundaryOutput) -> None:
        """Pass on the watermark that has arrived last, and the end of the data."""
        covered = self._arrived_watermark
        if self._stamped and covered > self._passed_watermark:
            self._passed_watermark = covered
            await out.control(EpochWatermark(covered))
            self.reports.passed(self.number, covered)
        if self._end_arrived and not self._data_ended:
            self._data_ended = True
            await self.data_has_ended(out)
            self.reports.ended(self.number)

    async def data_has_ended(self, out: BoundaryOutput) -> None:
        """Tell the body that the data has ended."""
        await out.control(EndOfData(max(0, self._passed_watermark)))

    def definition(self) -> Definition:
        return {**super().definition(), "data": "with epochs" if self._stamped else "without epochs"}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._admit()
        # The data that the entrance waited for may belong to another subtask now.
        self.admit()
        told = RestoredMember(self.ended_in, self.last_complete, self.known_complete)
        told = told._replace(reported=self._passed_watermark, has_ended=self._data_ended)
        self.reports.restored(self.number, told)

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        return self.at_start()

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Let all new entrances have passed the epochs that every old one with more data had passed."""
        shares = super().redistribute(states, parallelism)
        furthest = shares[0]["arrived watermark"]
        arrived = (state["arrived watermark"] for state in states if not state["end arrived"])
        passed = (state["passed watermark"] for state in states if not state["data ended"])
        least = {"arrived watermark": min(arrived, default=furthest), "passed watermark": min(passed, default=furthest)}
        return [share | least for share in shares]
