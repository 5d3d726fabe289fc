"""Snapshots to store, and their content when it is read."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamiter.engine.storage.snapshot import CheckpointId, SnapshotHeader, SnapshotPart, StepState
from streamiter.engine.storage.snapshot_file import StoredSnapshot
from streamiter.engine.storage.store import CheckpointStore
from streamiter.values.deferred import Deferred

FRAMES = [b"first", b"", b"third" * 20]


class Frames(Deferred):
    """Deferred state of these frames; it counts taken frames and releases."""

    def __init__(self, frames: Sequence[bytes] = FRAMES) -> None:
        self._frames = frames
        self.taken = 0
        self.released = 0

    def frames(self) -> Iterator[bytes]:
        for frame in self._frames:
            self.taken += 1
            yield frame

    def release(self) -> None:
        self.released += 1


def header(number: int, run: str = "a", *, flow: str = "clicks", **more: Any) -> SnapshotHeader:
    fields = {
        "created_at_ms": 1_700_000_000_000 + number,
        "steps": {
            "read": StepState(parallelism=2, operator="TopicSource", is_source=True),
            "größe": StepState(parallelism=1, operator="Count"),
        },
        "notes": {"streamiter": "0.1.0", "commits in": 'kafka://"x"'},
    }
    return SnapshotHeader(flow=flow, id=CheckpointId(number, run), **(fields | more))


def parts() -> list[SnapshotPart]:
    """Return parts of every kind: without content, without deferred state, with many frames."""
    return [
        SnapshotPart("read/0", b"positions"),
        SnapshotPart("read/1", b""),
        SnapshotPart("größe/0", b"counts", (Frames(), Frames([]), Frames([b"alone"]))),
    ]


CONTENT: Mapping[str, tuple[bytes, list[list[bytes]]]] = {
    "read/0": (b"positions", []),
    "read/1": (b"", []),
    "größe/0": (b"counts", [FRAMES, [], [b"alone"]]),
}


async def content_of(snapshot: StoredSnapshot) -> dict[str, tuple[bytes, list[list[bytes]]]]:
    """Return the whole content of a snapshot with :func:`parts`, as in ``CONTENT``."""
    return {
        name: (
            await snapshot.content(name),
            [list(snapshot.frames(name, number)) for number in range(len(CONTENT[name][1]))],
        )
        for name in snapshot.part_names()
    }


async def save(
    store: CheckpointStore, number: int, run: str = "a", *, flow: str = "clicks", **more: Any
) -> CheckpointId:
    """Store a snapshot, not committed; ``more`` is for its header."""
    stored = header(number, run, flow=flow, **more)
    await store.save(stored, parts())
    return stored.id


async def save_and_commit(
    store: CheckpointStore, *numbers: int, run: str = "a", flow: str = "clicks"
) -> list[CheckpointId]:
    """Store and commit snapshots, one after another."""
    committed = []
    for number in numbers:
        committed.append(await save(store, number, run, flow=flow))
        await store.commit(flow, committed[-1])
    return committed


async def ids(store: CheckpointStore, flow: str | None = "clicks") -> list[CheckpointId]:
    """Return the ids that the store lists."""
    return [each.id for each in await store.list(flow)]
