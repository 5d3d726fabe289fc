"""Blobs as files in a folder, on a local disk or on one that all machines share.

A process that is killed at any point leaves nothing incomplete under the name of a blob: files are written under
another name, synced and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import IO, BinaryIO, Final

from streamiter.engine.storage.blobs import Blob, BlobReader, Blobs, missing
from streamiter.errors import CheckpointError
from streamiter.values.helpers.closing import undone_on_failure
from streamiter.values.helpers.files import (
    NOT_ALLOWED,
    advice_for,
    alone,
    errors_of_writing,
    is_free,
    shared,
    sync_folder,
)

_LOCK: Final = "lock"
_IN_USE: Final = "in-use"
_PARTIAL: Final = ".partial"

_BUFFER_BYTES: Final = 1 << 20

# Another disk, a file system without hard links, one that links only the user's own files, too many links.
_NO_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


class FolderBlobs(Blobs):
    """Files in the folders of the directory ``root``, which is created when a run claims a flow.

    ========================  ======================================================
    ``lock``                  locked while any name in the folder is changed
    ``in-use``                locked (shared) by the runs that are alive
    ``….partial``             a file that is being written; a large one is locked then
    ========================  ======================================================

    Processes exclude each other with ``flock``; a directory on a network must support it.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.place = str(self.root)

    def folders(self) -> list[str]:
        with errors_of_reading(self.place):
            return sorted(path.name for path in self.root.iterdir() if path.is_dir()) if self.root.is_dir() else []

    def names(self, folder: str) -> list[str]:
        path = self.root / folder
        with errors_of_reading(str(path)):
            return sorted(os.listdir(path)) if path.is_dir() else []

    def size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, name: str) -> Blob | None:
        path = self.root / name
        with errors_of_reading(str(path)):
            if not path.exists():
                return None
            content = path.read_bytes()
        return Blob(content, hashlib.sha256(content).hexdigest())

    def replace(self, name: str, content: bytes, version: str | None) -> None:
        # Its caller holds the lock of the folder, so the version is the one that was read.
        path, partial = self.root / name, self.root / f"{name}{_PARTIAL}"
        try:
            with open(partial, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    def create(self, name: str) -> BinaryIO:
        import fcntl  # Windows does not have it; everything else works there

        # Emptied only after it is locked, so that the file of another writer is not changed.
        handle = os.open(self.root / f"{name}{_PARTIAL}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with undone_on_failure(lambda: os.close(handle)):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
        return open(handle, "wb", buffering=_BUFFER_BYTES)  # It closes the handle if there is no memory.

    def complete(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())

    def publish(self, file: BinaryIO, name: str) -> None:
        path = self.root / name
        os.rename(self.root / f"{name}{_PARTIAL}", path)
        sync_folder(path.parent)

    def abandon(self, file: BinaryIO, name: str, *, is_published: bool) -> None:
        with contextlib.suppress(OSError):
            (self.root / (name if is_published else f"{name}{_PARTIAL}")).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a full disk, for the bytes in the buffer
            file.close()

    def open(self, name: str) -> BlobReader:
        return FileReader(str(self.root / name), self.root / name)

    def adopt(self, path: Path, name: str) -> None:
        try:
            os.link(path, self.root / name)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            super().adopt(path, name)

    def fetch(self, name: str, path: Path) -> None:
        try:
            os.link(self.root / name, path)
        except FileNotFoundError:
            raise missing(self.place_of(name)) from None
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            super().fetch(name, path)

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def explained(self, what: str) -> AbstractContextManager[None]:
        return errors_of_writing(what, self.place, f"keep fewer (`streamiter checkpoints prune {self.place}`)")

    def make(self, folder: str) -> None:
        path = self.root / folder
        missing = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync_folder(each.parent)

    def alone(self, folder: str) -> AbstractContextManager[None]:
        return alone(self.root / folder / _LOCK)

    def enter(self, folder: str) -> IO[bytes] | None:
        return shared(self.root / folder / _IN_USE)

    def living_run(self, folder: str) -> str | None:
        if is_free(self.root / folder / _IN_USE):
            return None
        return "one that is alive and may be about to commit them; stop it first"

    def remove_remains(self, folder: str, is_ours: Callable[[str], bool]) -> None:
        for name in self.names(folder):
            path = self.root / folder / name
            if name.endswith(_PARTIAL) and is_ours(name.removesuffix(_PARTIAL)) and is_free(path):
                path.unlink(missing_ok=True)
        if (self.root / folder).is_dir():
            sync_folder(self.root / folder)


class FileReader(BlobReader):
    """Reads a file, which several threads may do at the same time."""

    def __init__(self, place: str, file: Path | BinaryIO) -> None:
        with errors_of_reading(place):
            self._file = FileIO(file) if isinstance(file, Path) else file
            super().__init__(place, os.fstat(self._file.fileno()).st_size)

    def read(self, offset: int, length: int) -> bytes:
        # fileno() is called each time: the number of a closed file may belong to another file now.
        with errors_of_reading(self.place):
            return os.pread(self._file.fileno(), length, offset)

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def errors_of_reading(place: str) -> Iterator[None]:
    """Convert errors of the system to ``CheckpointError``, while a file is read."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = "check the file's owner" if error.errno in NOT_ALLOWED else advice_for(reason)
        raise CheckpointError(
            f"{place}: expected a file that can be read, given an error of the system ({reason}); "
            f"{advice}, or start from another checkpoint"
        ) from error
