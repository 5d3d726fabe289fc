"""Snapshots of a large table of features: base and changes, in files that several snapshots share.

A snapshot writes the features that have changed since the last one into new files, and names the older files that it
needs, too. All files together have the features in the order of their last changes: each change makes a feature the
newest one, so what has changed comes behind everything else. A feature counts in its newest file. Features that have
left were the oldest ones, so the number of all features says where they end.

Of the features in an old file, more and more are in newer files as well, or have left. Then those that are left in it,
or in two neighbours, are written again in its place. So files have at most twice as many features as the table, and a
snapshot writes at most about twice as many as have changed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import InternalError, StreamiterError
from streamiter.parameter_server.storage.feature_table import FeatureTable
from streamiter.values.deferred import FRAME_FILE, DeferredFiles, FramesInFiles, LocalFile, PlainValue
from streamiter.values.helpers.files import RunFolder, errors_of_writing
from streamiter.values.plain_data import PlainData

# Features with two experts and 8 factors take some 25 MB: a tenth of a second. Smaller tables are no files.
_FEATURES_OF_FILE: Final = 1 << 17
# A store has a look at each of them for each snapshot.
_FILES_MIN: Final = 16

_PLAIN: Final = PlainData()


class _File(NamedTuple):
    number: int
    features: int
    """The features in it, wherever they are besides."""


class FeatureFiles:
    """The files of a table that the snapshots of one run share.

    They are in a folder of the run as long as a snapshot may need them; a store links or copies them. The folder is
    deleted by :meth:`close`, or with the last reference: the last snapshot of a job is taken of closed operators.
    """

    def __init__(
        self, table: FeatureTable, *, name: str, place: Path | None = None, features_of_file: int = _FEATURES_OF_FILE
    ) -> None:
        """``name`` begins messages; ``place`` is a folder that runs share."""
        self._table = table
        self._name = name
        self._place = place or Path(tempfile.gettempdir()) / f"streamiter-features-{getattr(os, 'getuid', int)()}"
        self._folder = RunFolder(self._place)
        self._features_of_file = features_of_file
        self._files: list[_File] = []
        """The files that a snapshot needs now, those of the oldest features first."""
        self._made = 0
        """The greatest number of a file."""
        self.stored: dict[str, object] = {}
        """Where a store keeps each file that it has, by name."""
        self._local: set[str] = set()
        """The names of the files in the folder."""
        self._pieces: list[FrozenFeatures] = []
        """The snapshots that are not written yet."""

    def close(self) -> None:
        """Delete the folder. May be called more than once."""
        self._folder.close()

    # ---- snapshots

    def snapshot(self) -> FrozenFeatures | dict[str, Any]:
        """Return the state of the table now: a piece of files, or plain data if the table is small."""
        if not self._files and self._table.counts().features <= self._features_of_file:
            return self._table.state()
        what, failure = f"{self._name}, whose files are in the folder for temporary files (TMPDIR)", None
        try:
            with errors_of_writing(what, str(self._place), "set TMPDIR to a folder with more room"):
                self._write_changed()
                self._tidy()
        except StreamiterError as error:  # The checkpoint is given up; the job goes on.
            failure = error
        numbers = [file.number for file in reversed(self._files)]
        content = _PLAIN.encode(self._table.totals() | {"files": numbers})
        files = [] if failure else [self._local_file(number) for number in numbers]
        piece = FrozenFeatures(self, self._name, files, content, failure)
        self._pieces.append(piece)
        self._delete_needless()
        return piece

    def _write_changed(self) -> None:
        table, steps = self._table, self._table.steps
        changed = np.empty(table.counts().features, np.int32)
        changed = changed[: steps.changed_entries(table.arrays, changed)][::-1]
        for begin in range(0, len(changed), self._features_of_file):
            self._files.append(self._written(changed[begin : begin + self._features_of_file]))

    def _written(self, entries: npt.NDArray[np.int32]) -> _File:
        """Write features into a new file."""
        self._made += 1
        file = self._local_file(self._made)
        file.path.write_bytes(_PLAIN.encode(self._table.part(entries)))
        self._local.add(file.name)
        self._table.arrays.file_of[entries] = self._made
        return _File(self._made, len(entries))

    def _tidy(self) -> None:
        """Leave out files without features that count, and write few features of old files again."""
        table = self._table
        left = np.bincount(table.file_of(), minlength=self._made + 1).tolist()
        left[table.steps.NO_FILE] = 0  # Free entries, since all features are in files now.
        self._files = [file for file in self._files if left[file.number]]
        if not self._files:
            self._files.append(self._written(np.zeros(0, np.int32)))
            left.append(0)
        features, most = sum(left), _FILES_MIN + 2 * (sum(left) // self._features_of_file)
        while len(self._files) > most:
            of_neighbours = [left[one.number] + left[other.number] for one, other in pairwise(self._files)]
            place = int(np.argmin(of_neighbours))
            self._write_again(place, place + 2, left)
        while sum(file.features for file in self._files) > 2 * features + self._features_of_file:
            place = int(np.argmax([file.features - left[file.number] for file in self._files]))
            self._write_again(place, place + 1, left)

    def _write_again(self, start: int, stop: int, left: list[int]) -> None:
        """Replace neighbouring files by one with the features that are left in them."""
        numbers = [file.number for file in self._files[start:stop]]
        file = self._written(self._table.entries_of_files(numbers))
        left.append(file.features)
        self._files[start:stop] = [file]

    def _local_file(self, number: int) -> LocalFile:
        name = _name_of(number)
        return LocalFile(name, self._folder.path / name)

    # ---- what pieces ask for

    def note_released(self, piece: FrozenFeatures) -> None:
        """A snapshot is written, or given up."""
        self._pieces.remove(piece)
        self._delete_needless()

    def _delete_needless(self) -> None:
        """Delete the files that no snapshot needs, neither a later one nor one that is being written."""
        needed = {_name_of(file.number) for file in self._files}
        needed.update(file.name for piece in self._pieces for file in piece.files())
        for name in self._local - needed:
            (self._folder.path / name).unlink(missing_ok=True)
            self.stored.pop(name, None)
        self._local &= needed

    # ---- restore

    def restore(self, state: Mapping[str, Any] | FramesInFiles | Iterable[PlainValue]) -> None:
        """Take on what :meth:`snapshot` has returned, as it comes out of a store; later snapshots share its files.

        Raises as :meth:`FeatureTable.restore` does.
        """
        self._files, self._local, self.stored = [], set(), {}
        if isinstance(state, Mapping):
            self._table.restore(state)
            return
        if stored := {file.name: file for file in getattr(state, "files", ())}:
            state.fetch(self._folder.path)  # type: ignore[union-attr]
            self._local, self.stored = set(stored), dict(stored)
        frames = iter(state)
        totals = next(frames)
        self._table.restore_parts(totals, self._parts(totals["files"], frames))
        self._delete_needless()

    def _parts(self, numbers: Sequence[int], frames: Iterator[PlainValue]) -> Iterator[tuple[int, Any]]:
        """Give the parts with the numbers of their files, the newest first; 0 where there are no files."""
        self._made = max(numbers)
        for number in numbers:
            if self._local:
                part = _PLAIN.decode(self._local_file(number).path.read_bytes())
                self._files.insert(0, _File(number, len(part["keys"])))
                yield number, part
            else:
                yield 0, next(frames)


def _name_of(number: int) -> str:
    return f"{number}{FRAME_FILE}"


@final
class FrozenFeatures(DeferredFiles):
    """The state of a table at a barrier."""

    def __init__(
        self, owner: FeatureFiles, name: str, files: Sequence[LocalFile], rest: bytes, failure: StreamiterError | None
    ) -> None:
        """``failure`` is why the files could not be written."""
        self.name = name
        self._failure = failure
        self._owner = owner
        self.stored = owner.stored
        self._files = files
        self._rest = rest
        self._is_released = False

    def wait(self) -> None:
        """Make the disk store the files that a store does not have yet. Raises the error of their writing."""
        if self._failure is not None:
            raise self._failure
        for file in self._files:
            if file.name not in self.stored:
                with open(file.path, "rb") as handle:
                    os.fsync(handle)

    def files(self) -> Sequence[LocalFile]:
        return self._files

    def rest(self) -> bytes:
        return self._rest

    def frames(self) -> Iterator[bytes]:
        if self._failure is not None:
            raise self._failure
        yield self._rest
        for file in self._files:
            if self._is_released:
                raise InternalError(f"{self.name}: its state was released before all of it was read")
            yield file.path.read_bytes()

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._owner.note_released(self)
