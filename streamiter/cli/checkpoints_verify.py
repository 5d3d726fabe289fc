"""``streamiter checkpoints verify``."""

from __future__ import annotations

import orjson
import typer

from streamiter.checkpoints.flow_folder import FlowFolder
from streamiter.cli.checkpoint_arguments import (
    Directory,
    FlowName,
    ListedCheckpoint,
    Number,
    all_folders,
    listed_checkpoints,
    numbered,
)
from streamiter.cli.failures import print_error
from streamiter.cli.topic_arguments import AsJson
from streamiter.errors import CheckpointError

__all__ = ["verify"]


def verify(
    directory: Directory, flow: FlowName = None, checkpoint: Number = None, as_json: AsJson = False
) -> None:
    """Read checkpoints as a whole and compare all checksums.

    Exit code 1 where something is damaged or missing; each such file is named.
    """
    listed = [each for folder in all_folders(directory, flow) for each in listed_checkpoints(folder)]
    sound = [
        _verify(each, as_json) for each in (listed if checkpoint is None else numbered(listed, checkpoint))
    ]
    complete = [_verify_record(folder) for folder in all_folders(directory, flow)]
    if not sound:
        typer.echo(f"no checkpoints in {directory}", err=True)
    if not all(sound + complete):
        raise typer.Exit(1)


def _verify(listed: ListedCheckpoint, as_json: bool) -> bool:
    problem = _problem(listed)
    if as_json:
        typer.echo(orjson.dumps({**listed.document(), "problem": problem}).decode())
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
        snapshot.verify_now()
    except CheckpointError as error:
        return str(error)
    finally:
        snapshot.close_now()
    return None


def _verify_record(folder: FlowFolder) -> bool:
    """Whether it is known what is committed, and that is there; listing has told already where it is not readable."""
    try:
        record = folder.record()
    except CheckpointError:
        return False
    if record is None or record.committed is None or record.committed in folder.snapshots():
        return True
    print_error(
        f"{folder.path_of(record.committed)}: expected the committed checkpoint, given no such file; put it back from "
        "a backup, or go on from another one (restore=<number>)"
    )
    return False
