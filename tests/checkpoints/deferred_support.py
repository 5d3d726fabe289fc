"""Deferred state as a store returns it, and the files that hold it."""

import os
from collections.abc import Iterator
from typing import Any

from streamiter.values.deferred import Deferred
from streamiter.values.plain_data import PlainData

__all__ = ["decoded_frames", "unnamed_files"]


def decoded_frames(deferred: Deferred, plain_data: PlainData | None = None) -> Iterator[Any]:
    """Return each frame, decoded from its bytes when it is requested; release the state at the end."""
    plain = plain_data or PlainData()
    yield from map(plain.decode, deferred.frames())
    deferred.release()


def unnamed_files() -> list[str]:
    """Return the paths below /proc of the deleted files that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            if "(deleted)" in os.readlink(path):
                found.append(path)
        except OSError:
            continue  # the listing's own
    return found
