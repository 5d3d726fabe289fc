"""Which checkpoint a run goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from streamiter.checkpoints.snapshot import CheckpointId, SnapshotHeader
from streamiter.checkpoints.store import CommitPointer
from streamiter.errors import CheckpointError, ConfigurationError
from streamiter.runtime.checkpointing.commit_record import CommitRecord

__all__ = ["Restore", "check_restore_option", "chosen_checkpoint", "numbers_of"]

Restore = Literal["last"] | int | None
"""The last checkpoint that was committed (none, if this is the first run), one by its number, or none."""


def check_restore_option(flow: str, restore: object) -> None:
    """Raise ConfigurationError for anything else."""
    if restore in ("last", None) or (isinstance(restore, int) and not isinstance(restore, bool)):
        return
    raise ConfigurationError(
        f'flow {flow!r}: expected restore="last", None or the number of a checkpoint, given {restore!r}; '
        "None begins anew"
    )


def chosen_checkpoint(
    flow: str,
    restore: Restore,
    *,
    record: CommitRecord | None,
    pointer: CommitPointer | None,
    stored: Sequence[SnapshotHeader],
    commits_in: str | None,
) -> CheckpointId | None:
    """The checkpoint to go on from, None to begin anew.

    ``record`` is the last commit record of ``commits_in``, the topic that is the truth where there are
    transactional outputs; otherwise it is the store's ``pointer``. ``stored`` is what the store has of the flow.
    """
    if restore is None:
        return None
    if isinstance(restore, int):
        return _by_number(flow, restore, record, pointer, stored)
    return _committed(flow, record, pointer, stored, commits_in)


def _committed(
    flow: str,
    record: CommitRecord | None,
    pointer: CommitPointer | None,
    stored: Sequence[SnapshotHeader],
    commits_in: str | None,
) -> CheckpointId | None:
    if commits_in is None:
        if pointer is None and stored:
            raise CheckpointError(
                f"flow {flow!r}: the store has checkpoints ({numbers_of(stored)}), but does not say which one is "
                "committed; choose one with restore=<number>, or begin anew with restore=None"
            )
        return None if pointer is None else pointer.committed
    if record is not None:
        return record.checkpoint
    if stored:
        raise CheckpointError(
            f"flow {flow!r}: the store has checkpoints ({numbers_of(stored)}), but {commits_in} has no commit record "
            "of this flow, so nobody knows what was committed: is it another server, or was the topic deleted? Go on "
            "from one with restore=<number> (outputs since then come twice), or begin anew with restore=None"
        )
    return None


def _by_number(
    flow: str,
    number: int,
    record: CommitRecord | None,
    pointer: CommitPointer | None,
    stored: Sequence[SnapshotHeader],
) -> CheckpointId:
    found = [header.id for header in stored if header.id.number == number]
    if not found:
        raise CheckpointError(
            f"flow {flow!r}: expected a checkpoint {number} in the store, given {numbers_of(stored)}; choose "
            "one of these"
        )
    last = record.checkpoint if record is not None else None
    # Two runs may have used a number: one of them was never committed.
    committed = [each for each in found if _was_committed(each, last, pointer)]
    if not committed:
        raise CheckpointError(
            f"flow {flow!r}: checkpoint {number} was never committed: its run ended before, and what it had written "
            'was taken back, so outputs would be missing; go on with restore="last", or from one that was committed'
        )
    return committed[-1]


def _was_committed(
    checkpoint: CheckpointId, last: CheckpointId | None, pointer: CommitPointer | None
) -> bool:
    """``last`` is what the last commit record names; where nobody knows what was committed, all may be."""
    if last is not None and checkpoint.run == last.run and checkpoint.number <= last.number:
        return True
    return pointer is None or checkpoint == pointer.committed or pointer.has_led_to_commit(checkpoint)


def numbers_of(stored: Sequence[SnapshotHeader]) -> str:
    """For messages: which checkpoints there are."""
    return ", ".join(str(header.id.number) for header in stored) or "none"
