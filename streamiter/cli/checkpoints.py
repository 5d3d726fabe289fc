"""The commands ``streamiter checkpoints list · show · verify · prune`` on checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import typer

from streamiter.cli.figures import print_error, print_fields, print_json, print_rows, say
from streamiter.cli.run import command_group
from streamiter.cli.topics import AsJson
from streamiter.engine.storage.flow_checkpoints import FlowCheckpoints, flows_in
from streamiter.engine.storage.folder_blobs import FolderBlobs
from streamiter.engine.storage.snapshot import CheckpointId, SnapshotHeader, StepState
from streamiter.engine.storage.snapshot_file import StoredSnapshot
from streamiter.engine.storage.store import blobs_at
from streamiter.errors import CheckpointError

Store = Annotated[
    str,
    typer.Argument(
        metavar="STORE", help="The folder of the checkpoints, or a URL such as s3://bucket/prefix.", show_default=False
    ),
]
FlowName = Annotated[
    str | None, typer.Option("--flow", metavar="NAME", help="Only the checkpoints of this flow.", show_default=False)
]
CheckpointOption = Annotated[
    int | None,
    typer.Option(
        "--checkpoint", metavar="N", min=0, help="The number of a checkpoint, as list shows it.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A checkpoint in a store."""

    folder: FlowCheckpoints
    """The checkpoints of its flow."""
    id: CheckpointId
    """Its number and run."""
    size_bytes: int
    """The size of its files."""
    header: SnapshotHeader | None
    """The header of its file; None if one of its files cannot be read."""
    committed: CheckpointId | None
    """The committed checkpoint of its flow; None if there is none, or it is not known."""

    @property
    def created(self) -> str:
        """Return when the checkpoint was taken, in local time."""
        if self.header is None:
            return ""
        return datetime.fromtimestamp(self.header.created_at_ms / 1000).astimezone().isoformat(timespec="seconds")

    @property
    def state(self) -> str:
        """Return the special states of the checkpoint as text."""
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
        """Whether a topic may hold its commit record: a killed job could not write it to the store."""
        return self._is_newer and self.header is not None and "commits in" in self.header.notes

    def document(self) -> dict[str, object]:
        """Return the checkpoint as a JSON object."""
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


def all_folders(store: str, flow: str | None) -> list[FlowCheckpoints]:
    """Return the folders of all flows, or of the named one."""
    blobs = blobs_at(store)
    if isinstance(blobs, FolderBlobs) and not blobs.root.is_dir():
        given = "a file" if blobs.root.exists() else "none of that name"
        raise typer.BadParameter(f"expected a folder or a URL, given {store}: {given}", param_hint="'STORE'")
    folders = flows_in(blobs)
    if flow is None:
        return folders
    chosen = [folder for folder in folders if folder.flow == flow]
    if not chosen:
        raise typer.BadParameter(f"expected {_one_of(folders)}, given {flow!r}", param_hint="'--flow'")
    return chosen


def one_folder(store: str, flow: str | None) -> FlowCheckpoints:
    """Return the folder of the named flow, or of the only one."""
    folders = all_folders(store, flow)
    if not folders:
        raise typer.BadParameter(f"expected checkpoints in {store}, given none", param_hint="'STORE'")
    if len(folders) > 1:
        raise typer.BadParameter(f"expected {_one_of(folders)}, given none", param_hint="'--flow'")
    return folders[0]


def _one_of(folders: Sequence[FlowCheckpoints]) -> str:
    names = ", ".join(repr(folder.flow) for folder in folders)
    return f"one of {names}" if names else "a store with checkpoints"


def listed_checkpoints(folder: FlowCheckpoints) -> list[ListedCheckpoint]:
    """Return all checkpoints of a flow, oldest first, without those that a job removes meanwhile."""
    committed = _committed(folder)
    found: list[ListedCheckpoint] = []
    for checkpoint in folder.snapshots():
        header, size_bytes = None, folder.size_of(checkpoint)
        with contextlib.suppress(CheckpointError):
            snapshot = folder.peek(checkpoint)
            snapshot.close()
            header, size_bytes = snapshot.header, snapshot.size_bytes
        if size_bytes is not None:
            found.append(ListedCheckpoint(folder, checkpoint, size_bytes, header, committed))
    return found


def numbered(listed: Sequence[ListedCheckpoint], number: int) -> list[ListedCheckpoint]:
    """Return the checkpoints with a number: one, or several if a run did not commit its own."""
    found = [each for each in listed if each.id.number == number]
    if not found:
        there = ", ".join(dict.fromkeys(str(each.id.number) for each in listed)) or "none"
        raise typer.BadParameter(f"expected one of {there}, given {number}", param_hint="'--checkpoint'")
    return found


def _committed(folder: FlowCheckpoints) -> CheckpointId | None:
    """Return the committed checkpoint; if that cannot be read, print the error and return None."""
    try:
        record = folder.record()
    except CheckpointError as error:
        print_error(str(error))
        return None
    return record.committed if record else None


def list_checkpoints(store: Store, flow: FlowName = None, as_json: AsJson = False) -> None:
    """List the checkpoints in a store, oldest first, with flow, number, run, time and size in bytes.

    A flow resumes from the committed checkpoint. If the job was killed, a newer one may be committed, too: the next run
    asks the topic that show calls “commits in”.
    """
    found = [listed for folder in all_folders(store, flow) for listed in listed_checkpoints(folder)]
    if as_json:
        for listed in found:
            print_json(listed.document())
    elif not found:
        typer.echo(f"no checkpoints in {store}", err=True)
    else:
        headings = ("flow", "checkpoint", "run", "time", "bytes", "")
        print_rows(headings, map(_row, found), numbers=("checkpoint", "bytes"))


def _row(listed: ListedCheckpoint) -> tuple[str | int, ...]:
    flow = listed.folder.flow
    shown_flow = flow if flow.isprintable() else repr(flow)
    number, size_bytes = str(listed.id.number), listed.size_bytes
    return shown_flow, number, listed.id.run, listed.created, size_bytes, listed.state


def prune(
    store: Store,
    flow: FlowName = None,
    keep: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="The number of checkpoints to keep: the committed one and those before it."
        ),
    ] = 3,
    orphans: Annotated[
        bool,
        typer.Option(
            "--orphans",
            help="Also remove checkpoints newer than the committed one. Refused while the flow runs, and if one is "
            "perhaps committed, as list shows.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints of a flow, and incomplete files.

    The committed checkpoint stays, and so do newer ones: a job may be about to commit them. A running job is not
    disturbed.
    """
    folder = one_folder(store, flow)
    record = folder.record()
    if orphans and record is not None and record.committed is not None:
        _check_that_none_may_be_committed(folder)
    removed = folder.prune(keep=keep, newer=orphans)
    for checkpoint in removed:
        if as_json:
            print_json({"flow": folder.flow, "checkpoint": checkpoint.number, "run": checkpoint.run})
        else:
            typer.echo(f"removed\t{folder.flow}\t{checkpoint.number}\t{checkpoint.run}")
    if record is None or record.committed is None:
        say(f"flow {folder.flow!r}: it is not known what is committed, so no checkpoint is removed", err=True)
    elif not removed:
        say(f"flow {folder.flow!r}: there is nothing to remove", err=True)


def _check_that_none_may_be_committed(folder: FlowCheckpoints) -> None:
    """Raise CheckpointError if a killed job may have committed a checkpoint in a topic, unknown to the store."""
    for listed in listed_checkpoints(folder):
        if listed.is_perhaps_committed:
            raise CheckpointError(
                f"flow {folder.flow!r}: --orphans expected no checkpoint that may be committed, given {listed.id}: the "
                "next run may resume from it; run the flow until it has taken a checkpoint, which removes those that "
                "no run needs"
            )


def show(store: Store, flow: FlowName = None, checkpoint: CheckpointOption = None, as_json: AsJson = False) -> None:
    """Show a checkpoint, by default the committed one.

    It prints its notes, its steps with their parallelism, and its parts with their sizes.
    """
    folder = one_folder(store, flow)
    listed = _chosen(folder.flow, listed_checkpoints(folder), checkpoint)
    snapshot = listed.folder.peek(listed.id)
    with contextlib.closing(snapshot):
        document, fields = _document(listed, snapshot), _fields(listed, snapshot)
    if as_json:
        print_json(document)
    else:
        print_fields(fields)


def _chosen(flow: str, found: Sequence[ListedCheckpoint], number: int | None) -> ListedCheckpoint:
    """Return the checkpoint with this number (None: any): the committed one if possible, else the newest."""
    if not found:
        raise typer.BadParameter(
            f"expected checkpoints of flow {flow!r}, given none: it has not taken one yet", param_hint="'STORE'"
        )
    among = found if number is None else numbered(found, number)
    return next((each for each in among if each.id == each.committed), among[-1])


def _document(listed: ListedCheckpoint, snapshot: StoredSnapshot) -> dict[str, object]:
    return {
        **listed.document(),
        "notes": dict(snapshot.header.notes),
        "steps": dict(snapshot.header.steps),
        "parts": {name: snapshot.part_bytes(name) for name in snapshot.part_names()},
    }


def _fields(listed: ListedCheckpoint, snapshot: StoredSnapshot) -> list[tuple[str, str]]:
    """Return names and values as pairs, because a note may have the name of another field."""
    header = snapshot.header
    return [
        ("flow", header.flow),
        ("checkpoint", str(header.id.number)),
        ("run", header.id.run),
        ("time", listed.created),
        ("bytes", f"{listed.size_bytes:,}"),
        ("state", listed.state),
        *header.notes.items(),
        *((f"step {name}", _described(step)) for name, step in header.steps.items()),
        *((f"part {name}", f"{snapshot.part_bytes(name):,} bytes") for name in snapshot.part_names()),
    ]


def _described(step: StepState) -> str:
    source = ", a source" if step.is_source else ""
    return f"{step.operator}, parallelism {step.parallelism}{source}"


def verify(store: Store, flow: FlowName = None, checkpoint: CheckpointOption = None, as_json: AsJson = False) -> None:
    """Read checkpoints completely and compare all checksums.

    The exit code is 1 if a file is damaged or missing; each such file is named.
    """
    listed = [each for folder in all_folders(store, flow) for each in listed_checkpoints(folder)]
    sound = [_verify(each, as_json) for each in (listed if checkpoint is None else numbered(listed, checkpoint))]
    complete = [_verify_record(folder) for folder in all_folders(store, flow)]
    if not sound:
        typer.echo(f"no checkpoints in {store}", err=True)
    if not all(sound + complete):
        raise typer.Exit(1)


def _verify(listed: ListedCheckpoint, as_json: bool) -> bool:
    problem = _problem(listed)
    if as_json:
        print_json({**listed.document(), "problem": problem})
    elif problem is None:
        typer.echo(f"ok\t{listed.folder.flow}\t{listed.id.number}\t{listed.id.run}")
    if problem is not None:
        print_error(problem)
    return problem is None


def _problem(listed: ListedCheckpoint) -> str | None:
    try:
        snapshot = listed.folder.open(listed.id)
    except CheckpointError as error:
        return str(error)
    try:
        snapshot.verify()
    except CheckpointError as error:
        return str(error)
    finally:
        snapshot.close()
    return None


def _verify_record(folder: FlowCheckpoints) -> bool:
    """Whether the committed checkpoint is known and exists; an unreadable record was reported before."""
    try:
        record = folder.record()
    except CheckpointError:
        return False
    if record is None or record.committed is None or record.committed in folder.snapshots():
        return True
    print_error(
        f"{folder.place_of(record.committed)}: expected the committed checkpoint, given no such file; put it back from "
        "a backup, or resume from another one (restore=<number>)"
    )
    return False


checkpoints_app = command_group(
    "List, show, verify and remove checkpoints of flows.",
    list=(
        list_checkpoints,
        "streamiter checkpoints list checkpoints",
        "streamiter checkpoints list /var/lib/clicks --flow clicks --json | jq .checkpoint",
    ),
    show=(
        show,
        "streamiter checkpoints show checkpoints",
        "streamiter checkpoints show checkpoints --flow clicks --checkpoint 17 --json | jq .steps",
    ),
    verify=(
        verify,
        "streamiter checkpoints verify checkpoints",
        "streamiter checkpoints verify /var/lib/clicks --flow clicks --checkpoint 17",
    ),
    prune=(
        prune,
        "streamiter checkpoints prune checkpoints --keep 1",
        "streamiter checkpoints prune /var/lib/clicks --flow clicks --orphans",
    ),
)
