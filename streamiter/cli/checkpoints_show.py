"""``streamiter checkpoints show``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import orjson
import typer

from streamiter.checkpoints.snapshot import StepState
from streamiter.checkpoints.snapshot_file import SnapshotFile
from streamiter.cli.checkpoint_arguments import (
    Directory,
    FlowName,
    ListedCheckpoint,
    Number,
    listed_checkpoints,
    numbered,
    one_folder,
)
from streamiter.cli.tables import print_fields
from streamiter.cli.topic_arguments import AsJson

__all__ = ["show"]


def show(
    directory: Directory, flow: FlowName = None, checkpoint: Number = None, as_json: AsJson = False
) -> None:
    """Show what is in a checkpoint: the one that is committed, unless another is named.

    Its notes, its steps with their parallelism, and its parts with their sizes.
    """
    folder = one_folder(directory, flow)
    listed = _chosen(folder.flow, listed_checkpoints(folder), checkpoint)
    snapshot = listed.folder.open(listed.id)
    try:
        document, fields = _document(listed, snapshot), _fields(listed, snapshot)
    finally:
        snapshot.close_now()
    if as_json:
        typer.echo(orjson.dumps(document).decode())
    elif sys.stdout.isatty():
        print_fields(fields)
    else:
        for name, value in fields:
            typer.echo(f"{name}\t{value}")


def _chosen(flow: str, found: Sequence[ListedCheckpoint], number: int | None) -> ListedCheckpoint:
    """Of two with a number the committed one; without a number that, or the newest."""
    if not found:
        raise typer.BadParameter(
            f"expected checkpoints of flow {flow!r}, given none: it has not taken one yet",
            param_hint="'DIRECTORY'",
        )
    among = found if number is None else numbered(found, number)
    return next((each for each in among if each.id == each.committed), among[-1])


def _document(listed: ListedCheckpoint, snapshot: SnapshotFile) -> dict[str, Any]:
    return {
        **listed.document(),
        "notes": dict(snapshot.header.notes),
        "steps": {name: asdict(step) for name, step in snapshot.header.steps.items()},
        "parts": {name: snapshot.part_bytes(name) for name in snapshot.part_names()},
    }


def _fields(listed: ListedCheckpoint, snapshot: SnapshotFile) -> list[tuple[str, str]]:
    """Pairs, for a note may be called as something else, too."""
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
