"""The work of a child process in a store of checkpoints, for tests that kill or measure the process.

``store_child.py <work> <folder or URL> <run>``; it prints its results on stdout.
"""

import asyncio
import resource
import sys
from collections.abc import Iterator

from checkpoints.snapshots import Frames, header

from streamiter.engine.storage.snapshot import CheckpointId, SnapshotPart
from streamiter.engine.storage.store import store_at
from streamiter.errors import ProducerFenced
from streamiter.values.deferred import Deferred

MIB = 1 << 20


class Large(Deferred):
    """Frames of a megabyte that are made when they are taken."""

    def __init__(self, count: int) -> None:
        self._count = count

    def frames(self) -> Iterator[bytes]:
        for number in range(self._count):
            yield number.to_bytes(4, "little") * (MIB // 4)

    def release(self) -> None:
        pass


def parts(number: int) -> list[SnapshotPart]:
    """Return more parts than are written at once, different ones for each number."""
    frames = [b"%d" % number * 20_000 for _ in range(10)]
    return [SnapshotPart("p", b"%d" % number, (Frames(frames * 3),)), SnapshotPart("q", b"", (Frames(frames),))]


async def take_checkpoints(place: str, run: str) -> None:
    """Take checkpoints without end, and print the number of each commit."""
    store = store_at(place)
    before = await store.claim("clicks", run)
    number = before.committed.number if before and before.committed else 0
    print(number, flush=True)
    while True:
        number += 1
        checkpoint = header(number, run)
        await store.save(checkpoint, parts(number))
        await store.commit("clicks", checkpoint.id)
        print(number, flush=True)
        await store.prune("clicks", keep=2)


async def compete(place: str, run: str) -> None:
    """Claim the flow after a line on stdin; take checkpoints until another run claims it; print the last commit."""
    store = store_at(place)
    sys.stdin.readline()
    committed = 0
    await store.claim("clicks", run)
    print("claimed", flush=True)
    try:
        for number in range(1, 10**6):
            checkpoint = CheckpointId(number, run)
            await store.save(header(number, run), [SnapshotPart("p", b"")])
            await store.commit("clicks", checkpoint)
            committed = number
    except ProducerFenced as error:
        print(f"fenced {committed} {error}", flush=True)


async def save_large(place: str, run: str, frames: str) -> None:
    """Save a large snapshot, and print the peak growth of the memory in bytes."""
    store = store_at(place)
    await store.claim("clicks", run)
    await store.save(header(1, run), parts(1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await store.save(header(2, run), [SnapshotPart("p", b"", (Large(int(frames)),))])
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, flush=True)
    snapshot = await store.open("clicks", CheckpointId(2, run))
    snapshot.verify()
    assert sum(1 for _ in snapshot.frames("p", 0)) == int(frames)
    snapshot.close()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, flush=True)


if __name__ == "__main__":
    asyncio.run(
        {"take_checkpoints": take_checkpoints, "compete": compete, "save_large": save_large}[sys.argv[1]](*sys.argv[2:])
    )
