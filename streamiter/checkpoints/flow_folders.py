"""The flows that a directory has checkpoints of."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from streamiter.checkpoints.flow_folder import RECORD_NAME, FlowFolder
from streamiter.checkpoints.record_file import unpack_record
from streamiter.checkpoints.snapshot_file import SnapshotFile
from streamiter.checkpoints.snapshot_format import Damage, OtherFormat
from streamiter.checkpoints.storage_errors import errors_of_reading
from streamiter.checkpoints.storage_names import checkpoint_of, is_shortened, name_of, shortened_name
from streamiter.errors import CheckpointError

__all__ = ["flows_in"]


def flows_in(root: Path) -> list[FlowFolder]:
    """The folders of flows in a directory, by the flows' names; what is none of a store is left out."""
    with errors_of_reading(root):
        folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
        flows = [flow for path in folders if (flow := _flow_of(path)) is not None]
    return [FlowFolder(root, flow) for flow in sorted(flows)]


def _flow_of(path: Path) -> str | None:
    names = sorted(os.listdir(path))
    if not any(name == RECORD_NAME or checkpoint_of(name) for name in names):
        return None
    if not is_shortened(path.name):
        return name_of(path.name)
    # The name is too long to be that of a folder; only the files in it tell.
    told = (_told_by(path / name) for name in names)
    return next((flow for flow in told if flow is not None and shortened_name(flow) == path.name), None)


def _told_by(path: Path) -> str | None:
    """The flow that a file is of; None if it does not tell."""
    with contextlib.suppress(Damage, OtherFormat, CheckpointError):
        if path.name == RECORD_NAME:
            return unpack_record(path.read_bytes()).flow
        if checkpoint_of(path.name):
            snapshot = SnapshotFile(path)
            snapshot.close_now()
            return snapshot.header.flow
    return None
