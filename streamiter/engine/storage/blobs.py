"""Blobs: the protocol of what keeps the bytes of a checkpoint store, and blobs in memory.

A blob is bytes with a name such as ``clicks/record.json``. ``folder_blobs`` has blobs that are files, ``object_blobs``
those in an object store. All rules of checkpoints are in ``store``, above this protocol.
"""

from __future__ import annotations

import abc
import contextlib
import io
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, BinaryIO, ClassVar, Final, ParamSpec, TypeVar

from streamiter.errors import CheckpointError
from streamiter.values.helpers.files import in_thread

COPIED_BYTES: Final = 8 << 20
"""Files are copied in pieces of this size: over a network, each has the delay of an answer."""


class BlobChanged(Exception):
    """Another writer has replaced the blob since it was read."""


@dataclass(frozen=True, slots=True)
class Blob:
    """The content of a small blob."""

    content: bytes
    version: str
    """A text that changes with each replacement, unless the content is the same."""


class BlobReader(abc.ABC):
    """A blob that is open for reading. It stays readable if the blob is deleted."""

    is_instant: ClassVar[bool] = False

    def __init__(self, place: str, size_bytes: int) -> None:
        self.place = place
        """The path or the URL of the blob, for messages."""
        self.size_bytes = size_bytes

    @abc.abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes; none at the end. Raises ``CheckpointError``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close it. May be called more than once."""


def missing(place: str) -> CheckpointError:
    """Return the error for a blob that was removed after it was found."""
    return CheckpointError(
        f"{place}: expected a checkpoint that can be read, given none: it was removed meanwhile; start from another one"
    )


class Blobs(abc.ABC):
    """Blobs in folders: one folder for each flow. Calls block, so they are made with :func:`run_call`.

    A blob gets its name when it is complete and durable, so a reader never sees half of one. ``replace`` depends on the
    version that was read; with it alone, writers that exclude each other in no other way stay in order.
    """

    is_instant: ClassVar[bool] = False
    """Whether its calls do not block, and need no thread."""
    place: str
    """The path or the URL of all blobs, for messages; without secrets."""

    def place_of(self, name: str) -> str:
        """Return the path or the URL of a blob, for messages."""
        return f"{self.place}/{name}"

    @abc.abstractmethod
    def folders(self) -> list[str]:
        """Return the folders in the order of their names, also folders of other programs."""

    @abc.abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names of the blobs in a folder, without the folder, in order; none if it does not exist."""

    @abc.abstractmethod
    def size(self, name: str) -> int | None:
        """Return the size of a blob in bytes; None if there is none."""

    @abc.abstractmethod
    def read(self, name: str) -> Blob | None:
        """Return a small blob; None if there is none."""

    @abc.abstractmethod
    def replace(self, name: str, content: bytes, version: str | None) -> None:
        """Store a small blob in place of that version; None: of no blob. Raises ``BlobChanged`` for another version."""

    @abc.abstractmethod
    def create(self, name: str) -> BinaryIO:
        """Return a file to write a large blob into; ``publish`` gives it the name, or ``abandon`` removes it."""

    def complete(self, file: BinaryIO) -> None:  # noqa: B027 only the bytes of a disk are not durable yet
        """Make the bytes of the file durable; called before ``publish``, which is fast then."""

    @abc.abstractmethod
    def publish(self, file: BinaryIO, name: str) -> None:
        """Make a blob of the file that ``create`` returned."""

    @abc.abstractmethod
    def abandon(self, file: BinaryIO, name: str, *, is_published: bool) -> None:
        """Close and remove the file that ``create`` returned, or the blob that ``publish`` made of it."""

    @abc.abstractmethod
    def open(self, name: str) -> BlobReader:
        """Open a large blob. Raises ``CheckpointError`` if it cannot be read."""

    def peek(self, name: str) -> BlobReader:
        """Open a large blob to read only its start and its end."""
        return self.open(name)

    def adopt(self, path: Path, name: str) -> None:
        """Make a blob of a file that nobody changes any more: a copy, or another name of the file.

        The content of the file is durable. The name is, when the next blob is published in the same folder.
        """
        file, is_published = self.create(name), False
        try:
            with open(path, "rb") as source:
                shutil.copyfileobj(source, file, COPIED_BYTES)
            self.complete(file)
            self.publish(file, name)
            is_published = True
            file.close()
        except BaseException:
            self.abandon(file, name, is_published=is_published)
            raise

    def fetch(self, name: str, path: Path) -> None:
        """Make ``path`` a copy of a blob, or another name of it, which nobody may change."""
        with contextlib.closing(self.peek(name)) as reader, open(path, "wb") as file:
            while piece := reader.read(file.tell(), COPIED_BYTES):
                file.write(piece)

    @abc.abstractmethod
    def delete(self, name: str) -> None:
        """Delete a blob, if it exists."""

    def explained(self, what: str) -> AbstractContextManager[None]:
        """Convert errors of the system to errors that say what to do; ``what`` (the flow) begins the message."""
        return contextlib.nullcontext()

    # ---- several processes

    def make(self, folder: str) -> None:  # noqa: B027 only folders of files are made
        """Make a folder, if it does not exist."""

    def alone(self, folder: str) -> AbstractContextManager[None]:
        """Exclude other processes that change the folder. Files need this for ``replace``; objects have no locks."""
        return contextlib.nullcontext()

    def check_versions(self, name: str) -> None:  # noqa: B027 only servers may ignore versions
        """Raise ``ConfigurationError`` unless ``replace`` of this blob depends on the version."""

    def enter(self, folder: str) -> IO[bytes] | None:
        """Return a handle which shows, until it is closed, that a run is alive; None where this is impossible."""
        return None

    def living_run(self, folder: str) -> str | None:
        """Return the end of the message that a run may be alive; None if no run is alive."""
        return None

    def remove_remains(self, folder: str, is_ours: Callable[[str], bool]) -> None:  # noqa: B027 most leave none
        """Remove what dead writers of the blobs that are ``is_ours`` have left."""


P = ParamSpec("P")
T = TypeVar("T")


async def run_call(of: Blobs | BlobReader, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that uses blobs: in a thread, uninterrupted; or at once, if it does not block.

    In simulations nothing runs in threads, so that a seed gives the same order of events.
    """
    if of.is_instant:
        return call(*args, **kwargs)
    return await in_thread(call, *args, **kwargs)


class BytesReader(BlobReader):
    """Reads bytes in memory."""

    is_instant: ClassVar[bool] = True

    def __init__(self, place: str, content: bytes) -> None:
        super().__init__(place, len(content))
        self._content = content

    def read(self, offset: int, length: int) -> bytes:
        return self._content[offset : offset + length]

    def close(self) -> None:
        """Do nothing: no file is open."""


class MemoryBlobs(Blobs):
    """Blobs in a dict, for simulations and tests; lost with the process.

    >>> blobs = MemoryBlobs()
    >>> blobs.replace("clicks/record.json", b"1", None)
    >>> blobs.folders(), blobs.names("clicks"), blobs.read("clicks/record.json")
    (['clicks'], ['record.json'], Blob(content=b'1', version='0'))
    """

    is_instant: ClassVar[bool] = True
    place = "memory"

    def __init__(self) -> None:
        self._blobs: dict[str, Blob] = {}
        self._versions: Final = map(str, count())

    def folders(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self._blobs})

    def names(self, folder: str) -> list[str]:
        return sorted(name.removeprefix(f"{folder}/") for name in self._blobs if name.startswith(f"{folder}/"))

    def size(self, name: str) -> int | None:
        return len(self._blobs[name].content) if name in self._blobs else None

    def read(self, name: str) -> Blob | None:
        return self._blobs.get(name)

    def replace(self, name: str, content: bytes, version: str | None) -> None:
        if version != (self._blobs[name].version if name in self._blobs else None):
            raise BlobChanged
        self._blobs[name] = Blob(content, next(self._versions))

    def create(self, name: str) -> BinaryIO:
        return io.BytesIO()

    def publish(self, file: BinaryIO, name: str) -> None:
        file.seek(0)
        self._blobs[name] = Blob(file.read(), next(self._versions))

    def abandon(self, file: BinaryIO, name: str, *, is_published: bool) -> None:
        if is_published:
            self.delete(name)

    def open(self, name: str) -> BlobReader:
        if name not in self._blobs:
            raise missing(self.place_of(name))
        return BytesReader(self.place_of(name), self._blobs[name].content)

    def delete(self, name: str) -> None:
        self._blobs.pop(name, None)
