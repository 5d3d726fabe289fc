"""Messages about checkpoints between process 0 and the other processes of a run.

Process 0 decides: it has the barriers, the choice of a checkpoint and the commit, as in a job of one process. Each
other process has a :class:`~streamiter.runtime.checkpointing.following_checkpointer.FollowingCheckpointer`. Messages
of one process arrive in order:

=====================  =========================================================================================
to the others          ``restore`` (the run, the checkpoint, steps whose state is dropped), ``unchanged`` (whether all
                       tasks are as in the snapshot), ``progress`` (if not), ``reads on`` (what a finished job has to
                       read), ``barrier``, ``abandoned``, ``committed``
from the others        ``found`` (whether its tasks are as in the snapshot), ``more`` (what a finished job has to read
                       there), ``restored`` (where its sources begin), ``passed`` (a barrier has passed its
                       tasks), ``stored`` (its file)
=====================  =========================================================================================
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, final

import msgspec

from streamiter.checkpoints.snapshot import CheckpointId, PartsFile
from streamiter.deferred import PlainValue
from streamiter.errors import StorageFull, StoreUnavailable
from streamiter.operators.source import Positions
from streamiter.records import CheckpointBarrier
from streamiter.runtime.checkpointing.shares import SubtaskProgress
from streamiter.runtime.messages import Messages

PositionsByStep: TypeAlias = dict[str, list[Positions]]
"""The positions of the subtasks of each source, by the name of its step."""

AllProgress: TypeAlias = Mapping[str, Sequence[SubtaskProgress]]
"""The progress of the subtasks of each step."""

# A process answers with these errors: the job continues without the checkpoint, as after those of process 0.
GIVEN_UP: Final = (StorageFull, StoreUnavailable)


class Agreement(Protocol):
    """What the processes agree on while each restores its own tasks."""

    async def is_unchanged(self, found: bool) -> bool:
        """Return whether the tasks of all processes are as in the snapshot; ``found``: those of this process."""

    async def progress(self, find: Callable[[], AllProgress]) -> AllProgress:
        """Return the progress of the restored steps, which ``find`` returns in process 0."""

    async def to_read(self, found: int) -> int:
        """Return the most that a finished job has to read in any process; ``found``: in this one."""


@dataclass
class _Answers:
    """The answers of the other processes to one question."""

    number: int = 0
    """The checkpoint that the question is about; 0 for the restore."""
    by_process: dict[int, list[PlainValue]] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


@final
class CheckpointMessages:
    """The messages about checkpoints of one process; without ``messages`` there are no other processes."""

    def __init__(self, messages: Messages | None, own: int, processes: int) -> None:
        self._messages = messages
        self._own = own
        self._others = range(1, processes) if own == 0 and messages is not None else range(0)
        self._answers = {question: _Answers() for question in ("found", "more", "restored", "stored")}
        self._on_passed: Callable[[str, int, bool], None] = lambda process, checkpoint, runs: None
        if messages is not None and own == 0:
            for question in self._answers:
                messages.handle(f"checkpoint {question}", self._answered(question))
            messages.handle("checkpoint passed", self._has_passed)

    # -- for all processes -----------------------------------------------------------------------------

    def report_passed(self, checkpoint: int, *, runs: bool) -> None:
        """Tell process 0 that a barrier has passed all tasks of this one; ``runs``: whether any has not ended."""
        if self._messages is not None and self._own:
            self._messages.send(0, "checkpoint passed", checkpoint, runs)

    # -- for process 0 ---------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._others)

    @property
    def names(self) -> list[str]:
        return [f"process {number}" for number in self._others]

    def when_passed(self, call: Callable[[str, int, bool], None]) -> None:
        """Call back with the name of each process that a barrier has passed, its number, and whether tasks run."""
        self._on_passed = call

    def send_restore(
        self, run: str | None, checkpoint: CheckpointId | None, dropped: Mapping[str, bool] | None = None
    ) -> None:
        """Tell from which checkpoint of the store the run starts; ``run`` is None if there is no store."""
        chosen = None if checkpoint is None else [checkpoint.number, checkpoint.run]
        self._tell("restore", run, chosen, dict(dropped or {}))

    async def is_unchanged(self, found: bool) -> bool:
        """Return whether the tasks of all processes are as in the snapshot, and tell the others."""
        answers = await self._all("found")
        unchanged = found and all(same for [same] in answers.values())
        self._tell("unchanged", unchanged)
        return unchanged

    async def progress(self, find: Callable[[], AllProgress]) -> AllProgress:
        """Return the progress of the restored steps, and tell the others; process 0 has a subtask of each step."""
        found = find()
        self._tell("progress", {step: list(map(list, each)) for step, each in found.items()})
        return found

    async def to_read(self, found: int) -> int:
        """Return the most that a finished job has to read in any process, and tell the others."""
        answers = await self._all("more")
        to_read: int = max([found, *(more for [more] in answers.values())])
        self._tell("reads on", to_read)
        return to_read

    async def positions_at_start(self) -> PositionsByStep:
        """Return where the sources of the other processes begin, after they have restored their tasks."""
        return _joined([positions for [positions] in (await self._all("restored")).values()])

    def send_barrier(self, barrier: CheckpointBarrier) -> None:
        self._answers["stored"] = _Answers(barrier.checkpoint)
        self._tell("barrier", barrier.checkpoint, barrier.suspend)

    def abandon(self, checkpoint: int, *, is_late: bool) -> None:
        self._tell("abandoned", checkpoint, is_late)

    def send_committed(self, checkpoint: int) -> None:
        self._tell("committed", checkpoint)

    async def files(self) -> list[PartsFile]:
        """Return the files of the last barrier's checkpoint. Raises the error of a process that had no room for it."""
        answers = await self._all("stored")
        for process, [_, _, error] in answers.items():
            if error is not None:
                kind, text = error
                raise GIVEN_UP[kind](f"process {process}: {text}")
        return [msgspec.convert(file, PartsFile) for [file, _, _] in answers.values() if file is not None]

    async def positions(self) -> PositionsByStep:
        """Return the positions of the sources of the other processes at the last barrier."""
        return _joined([positions for [_, positions, _] in (await self._all("stored")).values()])

    def _tell(self, kind: str, *contents: PlainValue) -> None:
        for process in self._others:
            assert self._messages is not None
            self._messages.send(process, f"checkpoint {kind}", *contents)

    def _answered(self, question: str) -> Callable[..., None]:
        def answered(process: int, number: int, *contents: PlainValue) -> None:
            answers = self._answers[question]
            if number == answers.number:  # Otherwise it is about an abandoned checkpoint.
                answers.by_process[process] = list(contents)
                if len(answers.by_process) == len(self._others):
                    answers.complete.set()

        return answered

    async def _all(self, question: str) -> dict[int, list[PlainValue]]:
        answers = self._answers[question]
        if self._others:
            await answers.complete.wait()
        return dict(sorted(answers.by_process.items()))

    def _has_passed(self, process: int, checkpoint: int, runs: bool) -> None:
        self._on_passed(f"process {process}", checkpoint, runs)


def _joined(all_positions: Sequence[PositionsByStep]) -> PositionsByStep:
    joined: PositionsByStep = {}
    for positions in all_positions:
        for step, of_step in positions.items():
            joined.setdefault(step, []).extend(of_step)
    return joined
