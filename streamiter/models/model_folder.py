"""``ModelFolder``: the version that a follower answers with, in a folder on disk, for more rows than there is memory.

Arrays with many rows are :class:`~streamiter.models.stored_rows.StoredRows`. All else, as the lists of keys and dense
layers, is in memory, and on disk once as a whole, with the changes since then. A version is written at once, with its
rank, the checksum of its chain, and the positions in the topic behind it. So after a crash the follower has a version
as it was published, and reads only what came after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from streamiter.errors import ModelError, PlainDataError
from streamiter.models.changes import Changes, Operation, applied
from streamiter.models.documents import Parameters, freeze_arrays
from streamiter.models.intake import ChainAssembler, ChainPlace
from streamiter.models.stored_rows import NO_TABLE, PartPath, RowsDatabase, RowWrite, StoredNumbers, StoredRows
from streamiter.models.update import ModelUpdate
from streamiter.values.helpers.closing import undone_on_failure
from streamiter.values.plain_data import PlainData

_FORMAT: Final = 1

_VERSION: Final = b"version"
_WHOLE: Final = b"whole"
_CHANGE: Final = b"change"

# A start applies the changes again, each in some milliseconds for a million rows.
_CHANGES_MAX: Final = 64

_FIELDS: Final = tuple(each.name for each in fields(ModelUpdate) if each.name != "parameters")

StoredParts = Callable[[Parameters], Sequence[PartPath]]
"""Returns the paths of the arrays whose rows belong on disk, and of those that are there."""


NextRecords = tuple[dict[int, int], dict[int, str]]
"""Where to continue in a topic: the next offset by partition, and the identities of the partitions."""


class KeptVersion(NamedTuple):
    """A version in a folder."""

    update: ModelUpdate
    place: ChainPlace
    """Its place in its chain."""
    reading: NextRecords | None
    """Where the records behind it begin; None if that is not known."""


class ModelFolder:
    """Keeps one version of a model; each version replaces the one before. One process uses it at a time."""

    def __init__(self, folder: Path, subject: str, owner: tuple[str, str], stored_parts: StoredParts) -> None:
        """``subject`` begins the messages; the ``owner`` is a topic and a model of it."""
        self._folder = folder
        self._subject = subject
        self._owner = owner
        self._stored_parts = stored_parts
        self._plain = PlainData()
        self._opened: RowsDatabase | None = None
        self._changes = self._changes_bytes = self._whole_bytes = 0
        self.kept: KeptVersion | None = None
        """The version that is in the folder."""

    def open(self) -> None:
        """Open the folder, and read what it has. Raises ``ModelError`` if it is damaged, or of another model."""
        self._opened = database = RowsDatabase(self._folder, self._subject)
        tables: list[int] = []
        with undone_on_failure(database.close):
            if (content := database.value(_VERSION)) is not None:
                try:
                    tables = self._read(database, self._decoded(content))
                except (PlainDataError, ValueError, LookupError, TypeError, AttributeError) as error:
                    raise database.error(f"a damaged version: {error}") from error
            database.delete_others(tables)

    def close(self) -> None:
        """Close the folder. Its version can no longer predict."""
        if self._opened is not None:
            self._opened.close()

    def keep(self, update: ModelUpdate, chain: ChainAssembler, reading: NextRecords | None) -> ModelUpdate:
        """Write a version, and return it with its rows on disk; ``reading`` is None while records before it matter."""
        database = self._opened
        assert database is not None
        numbers: dict[int, StoredNumbers] = {}
        parts: dict[PartPath, StoredRows] = {}
        operations = chain.unkept
        for path in self._stored_parts(update.parameters):
            part: Any = _part_at(update.parameters, path)
            if isinstance(part, np.ndarray):
                operations = None
                same = numbers.setdefault(len(part), np.arange(len(part), dtype=np.int32))
                part = database.add(part, same)
            parts[path] = part
        puts: list[RowWrite] = [put for part in parts.values() for put in part.puts()]
        parts = {path: part.written() for path, part in parts.items()}
        update = replace(update, parameters=_with_parts(update.parameters, parts))
        freeze_arrays([part.numbers for part in parts.values()])
        is_long = self._changes >= _CHANGES_MAX or self._changes_bytes >= self._whole_bytes
        if operations is None or (operations and is_long):
            content = self._encoded_whole(update.parameters, parts)
            puts.append((NO_TABLE + _WHOLE, content))
            puts += [(NO_TABLE + _change_name(number), None) for number in range(self._changes)]
            changes, changes_bytes, whole_bytes = 0, 0, len(content)
        else:
            changes, changes_bytes, whole_bytes = self._changes, self._changes_bytes, self._whole_bytes
            if operations:
                content = self._plain.encode([_without_values(each, parts) for each in operations])
                puts.append((NO_TABLE + _change_name(changes), content))
                changes, changes_bytes = changes + 1, changes_bytes + len(content)
        if reading is None and self.kept is not None:
            reading = self.kept.reading
        kept = KeptVersion(update, chain.place, reading)
        puts.append((NO_TABLE + _VERSION, self._encoded_version(kept, changes)))
        database.write(puts)
        self._changes, self._changes_bytes, self._whole_bytes = changes, changes_bytes, whole_bytes
        self.kept = kept
        chain.keep(update)
        database.delete_unused()
        return update

    def _encoded_whole(self, parameters: Parameters, parts: Mapping[PartPath, StoredRows]) -> bytes:
        stored = [(path, part.table, part.numbers, part.like, part.end) for path, part in parts.items()]
        rest = _with_parts(parameters, dict.fromkeys(parts))
        return self._plain.encode({"parameters": rest, "stored": stored})

    def _encoded_version(self, kept: KeptVersion, changes: int) -> bytes:
        return self._plain.encode(
            {
                "format": _FORMAT,
                "owner": self._owner,
                "update": {name: getattr(kept.update, name) for name in _FIELDS},
                "place": tuple(kept.place),
                "reading": kept.reading,
                "changes": changes,
            }
        )

    def _decoded(self, content: bytes | None) -> Any:
        if content is None:
            raise ValueError("a part is missing")
        return self._plain.decode(content)

    def _read(self, database: RowsDatabase, version: Mapping[str, Any]) -> list[int]:
        """Set what is kept; return the tables of its rows."""
        if version["format"] != _FORMAT:
            raise ValueError(f"format {version['format']} in place of {_FORMAT}")
        if version["owner"] != self._owner:
            topic, model = version["owner"]
            raise ModelError(
                f"{self._subject}: expected a folder of its own, given {self._folder} of model {model!r} of {topic}; "
                "choose another folder, or delete this one"
            )
        whole = database.value(_WHOLE)
        given = self._decoded(whole)
        parts = {path: database.stored(*others) for path, *others in given["stored"]}
        operations: Changes = []
        for number in range(version["changes"]):
            content = database.value(_change_name(number))
            operations += [_with_values(each, parts) for each in self._decoded(content)]
            self._changes_bytes += len(content or b"")
        self._changes, self._whole_bytes = version["changes"], len(whole or b"")
        parameters: Any = applied(_with_parts(given["parameters"], parts), operations)
        parameters = _with_parts(parameters, {path: _part_at(parameters, path).written() for path in parts})
        freeze_arrays(parameters)
        update = ModelUpdate(**version["update"], parameters=parameters)
        self.kept = KeptVersion(update, ChainPlace(*version["place"]), version["reading"])
        return [part.table for part in parts.values()]


def _change_name(number: int) -> bytes:
    return _CHANGE + number.to_bytes(4, "big")


def _part_at(value: Any, path: PartPath) -> Any:
    for name in path:
        value = value[name]
    return value


def _with_parts(parameters: Any, parts: Mapping[PartPath, Any]) -> Any:
    return applied(parameters, [{"path": list(path), "value": part} for path, part in parts.items()])


def _without_values(operation: Operation, parts: Mapping[PartPath, StoredRows]) -> Operation:
    """Return an operation as it is written: the values of stored rows are on disk already."""
    return {**operation, "values": None} if tuple(operation["path"]) in parts else operation


def _with_values(operation: Operation, parts: Mapping[PartPath, StoredRows]) -> Operation:
    """Return an operation as it was, with other values in place of those that are on disk."""
    if (part := parts.get(tuple(operation["path"]))) is None:
        return operation
    like = part.like
    return {**operation, "values": np.broadcast_to(np.zeros((), like.dtype), (len(operation["rows"]), *like.shape))}
