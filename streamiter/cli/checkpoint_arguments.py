"""Arguments that the commands on checkpoints share, and what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from streamiter.checkpoints.flow_folder import FlowFolder
from streamiter.checkpoints.flow_folders import flows_in
from streamiter.checkpoints.snapshot import CheckpointId, SnapshotHeader
from streamiter.cli.failures import print_error
from streamiter.errors import CheckpointError

__all__ = [
    "Directory",
    "FlowName",
    "ListedCheckpoint",
    "Number",
    "all_folders",
    "listed_checkpoints",
    "numbered",
    "one_folder",
]

Directory = Annotated[
    Path,
    typer.Argument(metavar="DIRECTORY", help="Where the flow keeps them.", show_default=False),
]
FlowName = Annotated[
    str | None, typer.Option("--flow", metavar="NAME", help="Those of this flow.", show_default=False)
]
Number = Annotated[
    int | None,
    typer.Option(
        "--checkpoint",
        metavar="N",
        min=0,
        help="The one of this number, as list shows it.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One checkpoint in a directory, by the name of its file."""

    folder: FlowFolder
    id: CheckpointId
    size_bytes: int
    header: SnapshotHeader | None
    """None where the file cannot be read."""
    committed: CheckpointId | None
    """The one of its flow that is committed; None where none is, or nobody knows."""

    @property
    def created(self) -> str:
        """When it was taken, in local time."""
        if self.header is None:
            return ""
        return (
            datetime.fromtimestamp(self.header.created_at_ms / 1000)
            .astimezone()
            .isoformat(timespec="seconds")
        )

    @property
    def state(self) -> str:
        """What is special about it."""
        states = {
            "unreadable": self.header is None,
            "committed": self.id == self.committed,
            "perhaps committed": self.is_perhaps_committed,
            "not committed": self._is_newer and not self.is_perhaps_committed,
            "ended": self.header is not None and self.header.job_ended,
        }
        return ", ".join(state for state, holds in states.items() if holds)

    @property
    def _is_newer(self) -> bool:
        return self.committed is None or self.id.number > self.committed.number

    @property
    def is_perhaps_committed(self) -> bool:
        """Whether a topic may say so: a job that was killed could not tell the store any more."""
        return self._is_newer and self.header is not None and "commits in" in self.header.notes

    def document(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "flow": self.folder.flow,
            "checkpoint": self.id.number,
            "run": self.id.run,
            "created_at_ms": self.header.created_at_ms if self.header else None,
            "size_bytes": self.size_bytes,
            "committed": self.id == self.committed,
            "ended": self.header.job_ended if self.header else None,
            "readable": self.header is not None,
        }


def all_folders(directory: Path, flow: str | None) -> list[FlowFolder]:
    """Those of all flows, or of the one that is named."""
    if not directory.is_dir():
        given = "a file" if directory.exists() else "none of that name"
        raise typer.BadParameter(
            f"expected a directory, given {directory}: {given}", param_hint="'DIRECTORY'"
        )
    folders = flows_in(directory)
    if flow is None:
        return folders
    chosen = [folder for folder in folders if folder.flow == flow]
    if not chosen:
        raise typer.BadParameter(f"expected {_one_of(folders)}, given {flow!r}", param_hint="'--flow'")
    return chosen


def one_folder(directory: Path, flow: str | None) -> FlowFolder:
    """That of the flow that is named, or of the only one."""
    folders = all_folders(directory, flow)
    if not folders:
        raise typer.BadParameter(f"expected checkpoints in {directory}, given none", param_hint="'DIRECTORY'")
    if len(folders) > 1:
        raise typer.BadParameter(f"expected {_one_of(folders)}, given none", param_hint="'--flow'")
    return folders[0]


def _one_of(folders: Sequence[FlowFolder]) -> str:
    names = ", ".join(repr(folder.flow) for folder in folders)
    return f"one of {names}" if names else "a directory with checkpoints"


def listed_checkpoints(folder: FlowFolder) -> list[ListedCheckpoint]:
    """All checkpoints of a flow, oldest first; those that a job removes meanwhile are left out."""
    committed = _committed(folder)
    found: list[ListedCheckpoint] = []
    for checkpoint in folder.snapshots():
        try:
            header = folder.header(checkpoint)
        except CheckpointError:
            header = None
        try:
            size_bytes = folder.path_of(checkpoint).stat().st_size
        except FileNotFoundError:
            continue
        found.append(ListedCheckpoint(folder, checkpoint, size_bytes, header, committed))
    return found


def numbered(listed: Sequence[ListedCheckpoint], number: int) -> list[ListedCheckpoint]:
    """Those of a number: one, or where a run did not come to commit its own, those of two runs."""
    found = [each for each in listed if each.id.number == number]
    if not found:
        there = ", ".join(dict.fromkeys(str(each.id.number) for each in listed)) or "none"
        raise typer.BadParameter(f"expected one of {there}, given {number}", param_hint="'--checkpoint'")
    return found


def _committed(folder: FlowFolder) -> CheckpointId | None:
    """What is committed; where that cannot be read it is said, and all else is shown."""
    try:
        record = folder.record()
    except CheckpointError as error:
        print_error(str(error))
        return None
    return record.committed if record else None
