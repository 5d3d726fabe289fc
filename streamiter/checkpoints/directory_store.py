"""The store in a directory, of a local disk or one that all machines see."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from streamiter.checkpoints.files import in_thread
from streamiter.checkpoints.flow_folder import FlowFolder, flows_in
from streamiter.checkpoints.snapshot import CheckpointId, SnapshotHeader, SnapshotPart, frames_of
from streamiter.checkpoints.snapshot_file import BATCH_BYTES, SnapshotWriter
from streamiter.checkpoints.store import CheckpointStore, CommitPointer, StoredSnapshot
from streamiter.errors import CheckpointError, InternalError

__all__ = ["DirectoryStore"]


class DirectoryStore(CheckpointStore):
    """Keeps the snapshots of flows in a directory, which is made when a flow is claimed: a folder for each flow.

    A snapshot is one file (docs/checkpoint-format.md), written under another name, synced, and renamed: also
    after ``kill -9`` or a power failure it is there as a whole or not at all. Flows may share the directory.
    Processes keep out of each other's way by ``flock``; a directory on a network must support that.

    Besides the errors of :class:`CheckpointStore`: ``ConfigurationError`` for a directory that cannot be
    written to, ``InternalError`` for saving, committing or pruning without a claim.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._root = Path(directory)
        self._runs: dict[str, str] = {}
        self._in_use: dict[str, IO[bytes]] = {}

    async def claim(self, flow: str, run: str, *, begin_anew: bool = False) -> CommitPointer | None:
        claiming = _Claiming(FlowFolder(self._root, flow), run, begin_anew=begin_anew)
        try:
            await in_thread(claiming)
        finally:
            if claiming.in_use is not None:
                self._let_go(flow)
                self._in_use[flow] = claiming.in_use
                self._runs[flow] = run
        return claiming.before

    async def pointer(self, flow: str) -> CommitPointer | None:
        record = await in_thread(FlowFolder(self._root, flow).record)
        return record.pointer if record else None

    async def save(self, header: SnapshotHeader, parts: Iterable[SnapshotPart]) -> int:
        self._claimed_by(header.flow)
        folder = FlowFolder(self._root, header.flow)
        writer = folder.writer(header.id)
        try:
            await in_thread(folder.begin, header.id, writer)
            await _write(folder, writer, parts)
            size_bytes = await in_thread(folder.publish, header, writer)
        except BaseException:
            await in_thread(writer.abandon)
            raise
        writer.close()
        return size_bytes

    async def commit(self, flow: str, checkpoint: CheckpointId) -> None:
        await in_thread(FlowFolder(self._root, flow).commit, self._claimed_by(flow), checkpoint)

    async def prune(self, flow: str, *, keep: int) -> list[CheckpointId]:
        run = self._claimed_by(flow)
        return await in_thread(FlowFolder(self._root, flow).prune, keep=keep, newer=True, run=run)

    async def list(self, flow: str | None = None) -> Sequence[SnapshotHeader]:
        return await in_thread(self._headers, flow)

    async def open(self, flow: str, checkpoint: CheckpointId) -> StoredSnapshot:
        return await in_thread(FlowFolder(self._root, flow).open, checkpoint)

    async def close(self) -> None:
        for flow in [*self._in_use]:
            self._let_go(flow)
        self._runs.clear()

    def _claimed_by(self, flow: str) -> str:
        try:
            return self._runs[flow]
        except KeyError:
            raise InternalError(f"flow {flow!r}: it was not claimed before something was stored") from None

    def _let_go(self, flow: str) -> None:
        handle = self._in_use.pop(flow, None)
        if handle is not None:
            handle.close()

    def _headers(self, flow: str | None) -> Sequence[SnapshotHeader]:
        folders = flows_in(self._root) if flow is None else [FlowFolder(self._root, flow)]
        headers: list[SnapshotHeader] = []
        for folder in folders:
            for checkpoint in folder.snapshots():
                try:
                    headers.append(folder.header(checkpoint))
                except CheckpointError:
                    continue  # open and verify tell what is wrong with it
        return headers


class _Claiming:
    """A claim in a thread; what it has got is known also where whoever waited for it was cancelled."""

    def __init__(self, folder: FlowFolder, run: str, *, begin_anew: bool) -> None:
        self._folder = folder
        self._run = run
        self._begin_anew = begin_anew
        self.before: CommitPointer | None = None
        self.in_use: IO[bytes] | None = None

    def __call__(self) -> None:
        record, self.in_use = self._folder.claim(self._run, begin_anew=self._begin_anew)
        self.before = record.pointer if record else None


async def _write(folder: FlowFolder, writer: SnapshotWriter, parts: Iterable[SnapshotPart]) -> None:
    """Takes the frames one at a time, with other work in between; a thread for each megabyte of them."""
    for part in parts:
        writer.add_part(part.name, part.content)
        for frames in frames_of(part):
            writer.begin_deferred()
            for frame in frames:
                writer.add_frame(frame)
                await _write_if_enough(folder, writer)
        await _write_if_enough(folder, writer)


async def _write_if_enough(folder: FlowFolder, writer: SnapshotWriter) -> None:
    if writer.pending_bytes >= BATCH_BYTES:
        await in_thread(folder.write, writer)
    else:
        await asyncio.sleep(0)
