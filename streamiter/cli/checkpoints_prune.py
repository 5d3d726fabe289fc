"""``streamiter checkpoints prune``."""

from __future__ import annotations

from typing import Annotated

import orjson
import typer

from streamiter.checkpoints.flow_folder import FlowFolder
from streamiter.cli.checkpoint_arguments import Directory, FlowName, listed_checkpoints, one_folder
from streamiter.cli.topic_arguments import AsJson
from streamiter.cli.wrapping import say
from streamiter.errors import CheckpointError

__all__ = ["prune"]


def prune(
    directory: Directory,
    flow: FlowName = None,
    keep: Annotated[
        int,
        typer.Option(
            "--keep", metavar="N", min=1, help="How many to keep: the committed one and those before it."
        ),
    ] = 3,
    orphans: Annotated[
        bool,
        typer.Option(
            "--orphans",
            help="Remove those newer than the committed one, too. Refused while the flow runs, and where one "
            "is perhaps committed, as list shows.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints of a flow, and what was written in part.

    The one that is committed always stays, and so do newer ones: a job may be about to commit them. A job that is
    running is not disturbed.
    """
    folder = one_folder(directory, flow)
    record = folder.record()
    if orphans and record is not None and record.committed is not None:
        _check_that_none_may_be_committed(folder)
    removed = folder.prune(keep=keep, newer=orphans)
    for checkpoint in removed:
        if as_json:
            document = {"flow": folder.flow, "checkpoint": checkpoint.number, "run": checkpoint.run}
            typer.echo(orjson.dumps(document).decode())
        else:
            typer.echo(f"removed\t{folder.flow}\t{checkpoint.number}\t{checkpoint.run}")
    if record is None or record.committed is None:
        say(f"flow {folder.flow!r}: it is not known what is committed, so no checkpoint is removed", err=True)
    elif not removed:
        say(f"flow {folder.flow!r}: there is nothing to remove", err=True)


def _check_that_none_may_be_committed(folder: FlowFolder) -> None:
    """A job that was killed may have committed in a topic what the store does not know of yet."""
    for listed in listed_checkpoints(folder):
        if listed.is_perhaps_committed:
            raise CheckpointError(
                f"flow {folder.flow!r}: --orphans expected no checkpoint that may be committed, given {listed.id}: the "
                "next run may go on from it; run the flow until it has taken a checkpoint, which removes what "
                "nobody needs"
            )
