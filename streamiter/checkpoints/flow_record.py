"""What a store knows of a flow: its runs, what is committed, and so what may be removed. Without any I/O.

>>> record = FlowRecord("clicks").claimed_by("a").with_commit(CheckpointId(7, "a")).claimed_by("b")
>>> record.pointer
CommitPointer(run='b', committed=CheckpointId(number=7, run='a'), committed_by_run={'a': 7})
>>> record = record.with_commit(CheckpointId(9, "b"))
>>> ids = [CheckpointId(6, "a"), CheckpointId(7, "a"), CheckpointId(8, "a"), CheckpointId(9, "b")]
>>> record.removable(ids, keep=2, newer=True)  # 8 of run a was never committed: run b went on from 7
[CheckpointId(number=6, run='a'), CheckpointId(number=8, run='a')]
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from streamiter.checkpoints.snapshot import CheckpointId
from streamiter.checkpoints.store import CommitPointer
from streamiter.errors import ProducerFenced

__all__ = ["FlowRecord", "RunRecord"]

# A run that was superseded a hundred runs ago and still lives would not be told from a new one; and snapshots of
# such a run are no longer kept. The record stays below 10 kB.
_RUNS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run that has claimed the flow."""

    run: str
    committed: int | None = None
    """The highest number that was committed of those it took."""


@dataclass(frozen=True, slots=True)
class FlowRecord:
    """The runs of a flow in the order of their claims, and what was committed last."""

    flow: str
    runs: tuple[RunRecord, ...] = ()
    committed: CheckpointId | None = None
    is_lost: bool = False
    """Whether there were snapshots but no record of what is committed: nobody knows until something is."""

    @property
    def run(self) -> str | None:
        """The run that owns the flow."""
        return self.runs[-1].run if self.runs else None

    @property
    def pointer(self) -> CommitPointer | None:
        """The same for the job; None where it is not known what is committed."""
        if self.run is None or self.is_lost:
            return None
        committed = {each.run: each.committed for each in self.runs if each.committed is not None}
        return CommitPointer(self.run, self.committed, committed)

    def claimed_by(self, run: str, *, begin_anew: bool = False) -> FlowRecord:
        """The record with ``run`` as the owner. ``ProducerFenced`` where a newer one has claimed the flow."""
        record = self
        if any(earlier.run == run for earlier in self.runs[:-1]):
            record.check_owner(run, "claim the flow again")
        if run != self.run:
            record = replace(record, runs=(*record.runs, RunRecord(run))[-_RUNS_MAX:])
        if begin_anew:
            runs = tuple(RunRecord(earlier.run) for earlier in record.runs)
            record = replace(record, runs=runs, committed=None, is_lost=False)
        return record

    def check_owner(self, run: str, wanted: str) -> None:
        """Raise ``ProducerFenced`` where the flow is another run's."""
        if run != self.run:
            raise ProducerFenced(
                f"flow {self.flow!r}: run {run} cannot {wanted}: run {self.run} has claimed the flow since; only one "
                f"run of a flow may go on, so run {run} must end"
            )

    def with_commit(self, checkpoint: CheckpointId) -> FlowRecord:
        """The record with this as what to go on from."""
        runs = [
            replace(each, committed=max(checkpoint.number, each.committed or 0))
            if each.run == checkpoint.run
            else each
            for each in self.runs
        ]
        if checkpoint.run not in [each.run for each in runs]:
            runs.insert(0, RunRecord(checkpoint.run, checkpoint.number))
        return replace(self, runs=tuple(runs), committed=checkpoint, is_lost=False)

    def removable(self, ids: Collection[CheckpointId], *, keep: int, newer: bool) -> list[CheckpointId]:
        """Which of these snapshots nobody needs, in order; ``newer``: also what is newer than the committed one.

        Nothing where what is committed is not known, or not among them: then it is not certain what is needed.
        """
        committed = self.committed
        if committed is None or committed not in ids:
            return []
        before = sorted(each for each in ids if each.number < committed.number and self._led_to_commit(each))
        kept = {committed, *before[max(0, len(before) - (keep - 1)) :]}
        return sorted(each for each in ids if each not in kept and (newer or each.number <= committed.number))

    def _led_to_commit(self, checkpoint: CheckpointId) -> bool:
        """Whether its run went on from it to something committed; if not, a later run has begun before it."""
        return any(
            each.run == checkpoint.run and each.committed is not None and checkpoint.number <= each.committed
            for each in self.runs
        )
