"""``streamiter checkpoints list``."""

from __future__ import annotations

import sys

import orjson
import typer

from streamiter.cli.checkpoint_arguments import (
    Directory,
    FlowName,
    ListedCheckpoint,
    all_folders,
    listed_checkpoints,
)
from streamiter.cli.tables import print_table
from streamiter.cli.topic_arguments import AsJson

__all__ = ["list_checkpoints"]


def list_checkpoints(directory: Directory, flow: FlowName = None, as_json: AsJson = False) -> None:
    """List the checkpoints in a directory, oldest first.

    Each with its flow, number, run, time and size in bytes; a flow goes on from the one that is committed. Where the
    job was killed, a newer one may be committed, too: the next run asks the topic that show calls “commits in”.
    """
    found = [listed for folder in all_folders(directory, flow) for listed in listed_checkpoints(folder)]
    if as_json:
        for listed in found:
            typer.echo(orjson.dumps(listed.document()).decode())
    elif not found:
        typer.echo(f"no checkpoints in {directory}", err=True)
    elif sys.stdout.isatty():
        print_table(
            ("flow", "checkpoint", "run", "time", "bytes", ""),
            [_row(listed, f"{listed.size_bytes:,}") for listed in found],
            numbers=("checkpoint", "bytes"),
        )
    else:
        for listed in found:
            typer.echo("\t".join(_row(listed, str(listed.size_bytes))))


def _row(listed: ListedCheckpoint, size: str) -> tuple[str, ...]:
    flow = listed.folder.flow
    shown_flow = flow if flow.isprintable() else repr(flow)
    return (shown_flow, str(listed.id.number), listed.id.run, listed.created, size, listed.state)
