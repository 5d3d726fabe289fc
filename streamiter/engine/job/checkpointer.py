"""The checkpoints of a job, seen from its coordinator: it chooses the first, takes others, and commits them.

A checkpoint has these steps: a barrier collects the state of all tasks; the store saves it; the transaction commits the
outputs; the store commits the checkpoint and removes old ones. A job without checkpoints only sends barriers: to be
suspended, or for a snapshot in memory. The barriers are those of :mod:`~streamiter.engine.job.barriers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, final

import numpy as np

from streamiter.engine.checkpointing.checkpoint_follower import ALL_ENDED, ALL_OPEN, BEGUN, CHOSEN, GIVEN_UP, OVER
from streamiter.engine.checkpointing.commit import (
    JobSnapshot,
    JobTransaction,
    output_to_commit_with,
    snapshot_in_memory,
)
from streamiter.engine.checkpointing.committed import (
    PositionsByStep,
    SourcePositions,
    check_one_source_of_each_topic,
    id_of,
    join_commit_domains,
    joined_positions,
)
from streamiter.engine.checkpointing.reading_on import ENDLESS
from streamiter.engine.checkpointing.restore import JobRestore, stateful_steps
from streamiter.engine.graph.statistics import CheckpointStatistics, Histogram
from streamiter.engine.job.barriers import CheckpointTimedOut, JobBarriers, SentBarrier, WorkersApart
from streamiter.engine.job.follower import JobFollower
from streamiter.engine.plan.job_settings import JobOptions
from streamiter.engine.storage.snapshot import CheckpointId, SnapshotHeader, StepState
from streamiter.engine.storage.store import Checkpoints, CheckpointStore, store_at
from streamiter.engine.tasks.failures import reason_in
from streamiter.engine.tasks.task_barriers import release_taken
from streamiter.errors import CheckpointError, ProducerFenced, StorageFull, StoreUnavailable, StreamiterError
from streamiter.topics.source_and_sink import Outputs
from streamiter.values.helpers.closing import close_all, undone_on_failure
from streamiter.values.plain_data import PlainData

_log = logging.getLogger("streamiter.job")


class JobIsOver(CheckpointError):
    """The last checkpoint of the job is taken."""


# After these errors the job continues without the checkpoint.
_GIVEN_UP: Final = (CheckpointTimedOut, *GIVEN_UP)

# A run without input finds out that it was replaced at a checkpoint, or after this time if that is far away.
_OWNER_S: Final = 10.0

# Shorter delays are not noticed by readers of the outputs.
_SLOW_S: Final = 2.0

# From a checkpoint of small state on a local disk to one that is given up (``alignment_timeout_s``).
_DURATION_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@final
class Checkpointer:
    """Takes the checkpoints of one job; ``conduct`` is an asyncio task of the coordinator."""

    def __init__(
        self,
        flow: str,
        settings: Checkpoints | None,
        options: JobOptions,
        *,
        follower: JobFollower,
        plain_data: PlainData,
    ) -> None:
        """``follower`` is the follower of process 0, which has a subtask of each step."""
        self._flow = flow
        self.settings = settings
        """None for a job without checkpoints."""
        self._options = options
        self._follower = follower
        self._tasks = follower.tasks
        self._exchange = follower.exchange
        self._barriers = JobBarriers(follower, options.clock)
        self._one_at_a_time = asyncio.Lock()
        """Held from the barrier until the collected state is committed or dropped."""
        self._plain_data = plain_data
        self._clock = options.clock
        self._run_id = options.new_id()
        self._steps: dict[str, StepState] = {}
        self._store: CheckpointStore | None = None
        self._store_knows_commit = True
        """Whether the last commit is in the store. Otherwise a prune would remove its snapshot as an orphan."""
        self._job_restore: JobRestore | None = None
        self._transaction: JobTransaction | None = None
        self._positions: SourcePositions | None = None
        """Of a job without state: they are committed instead of a snapshot in the store."""
        self._ends_at: PositionsByStep | None = None
        """Where the inputs had ended before this run, while it has read nothing."""
        self._is_over = False
        self._failure: Exception | None = None
        """The error of a checkpoint after which the job must fail."""
        self._has_failed = asyncio.Event()
        self._has_warned_of_slowness = False
        self._durations_s = Histogram(_DURATION_BOUNDS_S)
        self._started_at_s = self._clock.monotonic_s()
        self._statistics = CheckpointStatistics(self._run_id, self._durations_s.statistics())

    # -- start -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Shut out older runs, choose a checkpoint, and let the followers restore their tasks."""
        self._steps = {**stateful_steps(self._tasks), **self._follower.services.steps()}
        await join_commit_domains(self._tasks)
        output = output_to_commit_with(self._flow, self._tasks)
        if self._checkpoints.store is None:
            check_one_source_of_each_topic(self._tasks)
            self._positions = SourcePositions(self._flow, self._tasks, run=self._run_id, clock=self._clock)
            # Without transactional outputs, the transaction of the positions shuts out older runs.
            output = output or self._positions.first_topic
        else:
            self._store = store_at(self._checkpoints.store)
        if output is not None:
            self._checkpoints.check_transactions(self._flow)
            self._transaction = JobTransaction(
                self._flow,
                output,
                clock=self._clock,
                timeout_s=self._checkpoints.transaction_timeout_s,
                plain_data=self._plain_data,
                is_newest_run=self._is_newest_run,
                positions=self._positions,
            )
            self._follower.scope.put(Outputs, self._transaction)
        if self._positions is not None and self._transaction is not None:
            await self._transaction.open()
            await self._positions.open_others(self._transaction.commit_domain, self._checkpoints.transaction_timeout_s)
            self._follower.meeting.open(CHOSEN, None, None, {})
            return
        self._job_restore = JobRestore(
            self._flow,
            self._opened_store,
            self._transaction,
            options=self._options,
            steps=self._steps,
            run_id=self._run_id,
        )
        self._follower.checkpoints.snapshot, dropped = await self._job_restore.choose(self._tasks)
        self._barriers.next_number = max(self._barriers.next_number, self._job_restore.highest_number + 1)
        chosen = self._job_restore.checkpoint
        self._follower.meeting.open(
            CHOSEN, self._run_id, None if chosen is None else [chosen.number, chosen.run], dropped
        )

    async def _is_newest_run(self) -> bool:
        try:
            return {*await self._owners()} == {self._run_id}
        except StreamiterError:  # It is unknown.
            return False

    async def _owners(self) -> Sequence[str | None]:
        """Return the runs that have claimed the flow, or the positions of its sources, last."""
        if self._positions is not None:  # A run commits where it begins, so its successor is seen at once.
            return await self._positions.runs()
        pointer = await self._opened_store.pointer(self._flow)
        return [None if pointer is None else pointer.run]

    async def restored(self, found: Sequence[tuple[PositionsByStep, int]]) -> None:
        """All tasks have restored their states: confirm the chosen checkpoint, or commit where the sources begin.

        ``found`` is where the sources of each process begin, and what a job whose inputs had ended has to read.
        """
        # The operators may have adopted the order of a state.
        self._steps = {**stateful_steps(self._tasks), **self._follower.services.steps()}
        begun, positions = None, joined_positions(of_process for of_process, _ in found)
        to_read = max(to_read for _, to_read in found)
        if self._job_restore is not None:
            await self._job_restore.confirm(to_read)
            begun = self._job_restore.checkpoint
            self._ends_at = positions if to_read == ENDLESS else None
        elif self._positions is not None and self._transaction is not None:
            self._positions.now = positions
            await self._transaction.begin_with(None)
            await self._positions.commit_others()
            _log.info("flow %r: commits the positions of its sources to the group %r", self._flow, id_of(self._flow))
        number = None if begun is None else begun.number
        after_s = self._clock.monotonic_s() - self._started_at_s
        self._statistics = replace(self._statistics, restored=number, committed=number, committed_after_s=after_s)

    # -- while the job runs ----------------------------------------------------------------------------

    async def conduct(self) -> None:
        """Choose a checkpoint, let the run begin, take checkpoints, and let it end after the last one.

        Raises the error of any checkpoint that ends the job.
        """
        meeting = self._follower.meeting
        await self.open()
        await self.restored(await meeting.until(ALL_OPEN))
        meeting.open(BEGUN)
        async with asyncio.TaskGroup() as group:
            interval = group.create_task(self._take_every_interval(), name=f"interval of {self._flow}")
            failure = group.create_task(self._raise_failure(), name=f"failure of {self._flow}")
            await meeting.until(ALL_ENDED)
            await self.finish()
            interval.cancel()
            failure.cancel()
        meeting.open(OVER)

    async def _raise_failure(self) -> None:
        await self._has_failed.wait()
        assert self._failure is not None
        raise self._failure

    async def _take_every_interval(self) -> None:
        interval_s = self._checkpoints.interval_s
        began_s = self._clock.monotonic_s()
        while True:
            rest_s = interval_s - (self._clock.monotonic_s() - began_s)
            while rest_s > _OWNER_S:
                await self._clock.sleep(_OWNER_S)
                await self._check_owner()
                rest_s = interval_s - (self._clock.monotonic_s() - began_s)
            await self._clock.sleep(max(0.0, rest_s))
            began_s = self._clock.monotonic_s()
            try:
                await self.take()
                self._warn_if_slow()
            except _GIVEN_UP as error:
                _log.warning("%s. The next one is tried in %g s", error, interval_s)
            except JobIsOver:
                return

    async def _check_owner(self) -> None:
        """Raise ProducerFenced if a newer run has claimed the flow, or its positions; unknown is no reason."""
        runs: Sequence[str | None] = ()
        with contextlib.suppress(StreamiterError):
            runs = await self._owners()
        if newer := next((run for run in runs if run and run != self._run_id), None):
            raise ProducerFenced(f"another run of the flow, {newer}, has taken over, so this one must end")

    def _warn_if_slow(self) -> None:
        """Warn once if a checkpoint takes longer than the interval: outputs are delayed, and a crash costs more."""
        took_s, aligned_s = self._statistics.last_duration_s, self._statistics.last_alignment_s
        if took_s <= max(self._checkpoints.interval_s, _SLOW_S) or self._has_warned_of_slowness:
            return
        self._has_warned_of_slowness = True
        _log.warning(
            "flow %r: a checkpoint took %.1f s, longer than the interval of %g s: %.1f s until all steps had handled "
            "the records before it, the rest to store and commit it",
            self._flow,
            took_s,
            self._checkpoints.interval_s,
            aligned_s,
        )

    async def take(self, *, suspend: bool = False, is_last: bool = False) -> int:
        """Take a checkpoint and commit it; return its number. Raises JobIsOver after the last one."""
        async with self._one_at_a_time:
            if self._failure is not None:
                # Records that sinks held for that checkpoint would be missing in this one.
                raise self._failure
            if self._is_over:
                raise JobIsOver(
                    f"flow {self._flow!r}: expected a running job, given one that has ended; its last checkpoint "
                    f"is {self._statistics.committed}"
                )
            self._is_over = is_last or suspend
            try:
                taken = await self._take_or_give_up(suspend=suspend, is_last=is_last)
            except Exception as error:
                self._failure = error
                self._has_failed.set()
                raise
            if isinstance(taken, int):
                return taken
            raise taken

    async def _take_or_give_up(
        self, *, suspend: bool, is_last: bool
    ) -> int | CheckpointTimedOut | StorageFull | StoreUnavailable:
        try:
            return await self._take(suspend=suspend, is_last=is_last)
        except _GIVEN_UP as error:
            self._statistics = replace(self._statistics, given_up=self._statistics.given_up + 1)
            if self._is_over:
                self._failure = error
                if isinstance(error, WorkersApart):
                    # Tasks are still running, and nothing else would end them.
                    self._has_failed.set()
            elif self._transaction is not None:
                await self._transaction.checkpoint_over()
            return type(error)(f"flow {self._flow!r}: {reason_in(self._flow, error)}")

    async def _take(self, *, suspend: bool, is_last: bool) -> int:
        began_s = self._clock.monotonic_s()
        timeout_s = None if suspend or is_last else self._checkpoints.alignment_timeout_s
        sent = await self._barriers.send(
            suspend=suspend,
            timeout_s=timeout_s,
            stand_still_timeout_s=self._checkpoints.alignment_timeout_s,
            seal_sinks=self._seal_sinks,
        )
        if self.waits_at_end and await self._still_waits(sent):
            assert self._statistics.committed is not None
            return self._statistics.committed
        checkpoint = CheckpointId(sent.checkpoint, self._run_id)
        aligned_s = self._clock.monotonic_s()
        size_bytes = await self._save(checkpoint, sent)
        await self._commit(checkpoint, continues=not (suspend or is_last))
        committed_s = self._clock.monotonic_s()
        self._durations_s.observe(committed_s - began_s)
        self._statistics = replace(
            self._statistics,
            committed=checkpoint.number,
            taken=self._statistics.taken + 1,
            last_duration_s=committed_s - began_s,
            last_alignment_s=aligned_s - began_s,
            last_size_bytes=size_bytes,
            durations_s=self._durations_s.statistics(),
            committed_at_ms=self._clock.now_ms(),
            committed_after_s=committed_s - self._started_at_s,
        )
        if self._positions is None:  # Otherwise they are committed already.
            self._exchange.tell("checkpoint committed", checkpoint.number)
        return checkpoint.number

    @property
    def waits_at_end(self) -> bool:
        """Whether the inputs had ended before this run, and it has read nothing more up to the last barrier."""
        return self._ends_at is not None

    async def _still_waits(self, sent: SentBarrier) -> bool:
        """Return whether nothing was read up to this barrier: then the last checkpoint, which knows the end, stays."""
        with undone_on_failure(lambda: release_taken(sent.parts)):
            is_same = await self._barriers.positions_at(sent) == self._ends_at
        if not is_same:
            self._ends_at = None
            return False
        release_taken(sent.parts)
        if self._transaction is not None:
            await self._transaction.checkpoint_over()
        after_s = self._clock.monotonic_s() - self._started_at_s
        self._statistics = replace(self._statistics, committed_at_ms=self._clock.now_ms(), committed_after_s=after_s)
        return True

    def _seal_sinks(self) -> None:
        if self._transaction is not None:
            self._transaction.checkpoint_begins()

    async def _save(self, checkpoint: CheckpointId, sent: SentBarrier) -> int:
        header = SnapshotHeader(
            flow=self._flow,
            id=checkpoint,
            created_at_ms=self._clock.now_ms(),
            steps=self._steps,
            job_ended=not sent.runs,
            notes=self._notes(),
        )
        parts = [part for of_task in sent.parts.values() for part in of_task]
        try:
            if self._positions is not None:
                self._positions.now = await self._barriers.positions_at(sent)
            if self._store is None:
                return 0
            return await self._store.save(
                header, parts, partial(self._barriers.files_of, sent) if self._exchange.processes > 1 else None
            )
        finally:
            release_taken(sent.parts)

    async def _commit(self, checkpoint: CheckpointId, *, continues: bool) -> None:
        if self._transaction is not None:
            try:
                await self._transaction.commit(checkpoint, continues=continues)
            except StorageFull:  # So the checkpoint is known not to be committed.
                if self._store is not None and self._store_knows_commit:
                    await self._store.prune(self._flow, keep=self._checkpoints.keep)
                raise
        if self._positions is not None:
            await self._positions.commit_others()
            return
        # With a transaction the commit record decides; the store's own pointer is updated with the next checkpoint.
        is_committed = self._transaction is not None
        self._store_knows_commit = False
        try:
            await self._opened_store.commit(self._flow, checkpoint)
            is_committed = self._store_knows_commit = True
            await self._opened_store.prune(self._flow, keep=self._checkpoints.keep)
        except (StorageFull, StoreUnavailable) as error:
            if not is_committed:
                raise
            _log.warning("flow %r: %s", self._flow, reason_in(self._flow, error))

    # -- without checkpoints ---------------------------------------------------------------------------

    async def snapshot(self) -> JobSnapshot:
        """Send a barrier through a job of one process; return the state of its tasks."""
        async with self._one_at_a_time:
            return snapshot_in_memory((await self._barriers.send()).parts, self._plain_data)

    async def suspend(self) -> None:
        """End all tasks at a barrier, and keep nothing of their state."""
        async with self._one_at_a_time:
            release_taken((await self._barriers.send(suspend=True, keeps_state=False)).parts)

    # -- end -------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """All tasks have ended: take the last checkpoint; after a suspension, wait for the one that is being taken."""
        if not self._barriers.any_suspended:
            # A suspension after the end of all tasks has taken the last checkpoint already.
            with contextlib.suppress(JobIsOver):
                await self.take(is_last=True)
                return
        async with self._one_at_a_time:
            if self._failure is not None:  # The caller of stop() gets the same error.
                raise self._failure

    async def close(self) -> None:
        """Abort the open transaction, and close the store. May be called more than once."""
        store, self._store = self._store, None
        owned = (self._transaction, self._positions, store)
        await close_all(each.close for each in owned if each is not None)

    def statistics(self) -> CheckpointStatistics | None:
        """Return the numbers of the checkpoints; None for a job without them."""
        return None if self.settings is None else self._statistics

    def _notes(self) -> dict[str, str]:
        notes = {"python": platform.python_version(), "numpy": np.__version__}
        if self._transaction is not None:
            notes["commits in"] = self._transaction.commits_in
        return notes

    @property
    def _checkpoints(self) -> Checkpoints:
        assert self.settings is not None
        return self.settings

    @property
    def _opened_store(self) -> CheckpointStore:
        assert self._store is not None
        return self._store
