"""The record of a flow in a store of checkpoints, and the names of flows and runs as names of files.

:class:`FlowRecord` has the rules of claims and commits as a pure data structure. ``record.json`` is its form in a
store: the runs of a flow, and its last commit.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import msgspec

from streamiter.engine.storage.snapshot import CheckpointId, Damage, OtherFormat
from streamiter.errors import ConfigurationError, ProducerFenced


@dataclass(frozen=True, slots=True)
class CommitPointer:
    """The last run of a flow, and its last commit."""

    run: str
    """The run that claimed the flow last."""
    committed: CheckpointId | None
    """The last committed checkpoint; None if no run has committed one since the flow began without state."""
    committed_by_run: Mapping[str, int] = field(default_factory=dict, compare=False)
    """The highest number that each run has committed, as far back as is known; its earlier checkpoints led to it."""

    def has_led_to_commit(self, checkpoint: CheckpointId) -> bool:
        """Return whether the checkpoint was committed, or a later one of the same run."""
        return checkpoint.number <= self.committed_by_run.get(checkpoint.run, -1)


# With this limit the record stays below 10 kB. A run that was replaced a hundred runs ago and is still alive could not
# be told from a new one; but snapshots of such a run are no longer kept.
_RUNS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run that has claimed the flow."""

    run: str
    """The id of the run."""
    committed: int | None = None
    """The highest number of its checkpoints that was committed."""


@dataclass(frozen=True, slots=True)
class FlowRecord:
    """The runs of a flow, its last commit, and so which snapshots may be removed. It does no I/O.

    >>> record = FlowRecord("clicks").claimed_by("a").with_commit(CheckpointId(7, "a")).claimed_by("b")
    >>> record.pointer
    CommitPointer(run='b', committed=CheckpointId(number=7, run='a'), committed_by_run={'a': 7})
    >>> record = record.with_commit(CheckpointId(9, "b"))
    >>> ids = [CheckpointId(6, "a"), CheckpointId(7, "a"), CheckpointId(8, "a"), CheckpointId(9, "b")]
    >>> record.removable(ids, keep=2, newer=True)  # 8 of run a was never committed: run b started from 7
    [CheckpointId(number=6, run='a'), CheckpointId(number=8, run='a')]
    """

    flow: str
    """The name of the flow."""
    runs: tuple[RunRecord, ...] = ()
    """The runs in the order of their claims; the last one owns the flow."""
    committed: CheckpointId | None = None
    """The last committed checkpoint."""
    is_lost: bool = False
    """Whether snapshots were found without a record: which of them is committed is unknown until the next commit."""

    @property
    def run(self) -> str | None:
        """The run that owns the flow."""
        return self.runs[-1].run if self.runs else None

    @property
    def pointer(self) -> CommitPointer | None:
        """The last run and the last commit, for a job; None if the committed checkpoint is unknown."""
        if self.run is None or self.is_lost:
            return None
        return CommitPointer(self.run, self.committed, self._committed_by_run)

    @property
    def _committed_by_run(self) -> dict[str, int]:
        return {each.run: each.committed for each in self.runs if each.committed is not None}

    def claimed_by(self, run: str, *, forget_committed: bool = False) -> FlowRecord:
        """Return the record with ``run`` as the owner. Raises ``ProducerFenced`` if a newer run has claimed the
        flow.
        """
        record = self
        if any(earlier.run == run for earlier in self.runs[:-1]):
            record.check_owner(run, "claim the flow again")
        if run != self.run:
            record = replace(record, runs=(*record.runs, RunRecord(run))[-_RUNS_MAX:])
        if forget_committed:
            runs = tuple(RunRecord(earlier.run) for earlier in record.runs)
            record = replace(record, runs=runs, committed=None, is_lost=False)
        return record

    def check_owner(self, run: str, wanted: str) -> None:
        """Raise ``ProducerFenced`` if another run owns the flow; ``wanted`` is what this run was about to do."""
        if run != self.run:
            raise ProducerFenced(
                f"flow {self.flow!r}: run {run} cannot {wanted}: run {self.run} has claimed the flow since; only one "
                f"run of a flow may continue, so run {run} must end"
            )

    def with_commit(self, checkpoint: CheckpointId) -> FlowRecord:
        """Return the record with this checkpoint as the last commit."""
        runs = [
            replace(each, committed=max(checkpoint.number, each.committed or 0)) if each.run == checkpoint.run else each
            for each in self.runs
        ]
        if checkpoint.run not in [each.run for each in runs]:
            runs.insert(0, RunRecord(checkpoint.run, checkpoint.number))
        return replace(self, runs=tuple(runs), committed=checkpoint, is_lost=False)

    def removable(self, ids: Collection[CheckpointId], *, keep: int, newer: bool) -> list[CheckpointId]:
        """Return the snapshots that are not needed, in order; ``newer``: also those newer than the committed one.

        If the committed checkpoint is unknown, or not among ``ids``, none is removable.
        """
        committed = self.committed
        if committed is None or committed not in ids:
            return []
        # A checkpoint whose run committed neither it nor a later one led to no commit: a later run started before it.
        led = self._committed_by_run
        before = sorted(each for each in ids if each.number < committed.number and each.number <= led.get(each.run, -1))
        kept = {committed, *before[max(0, len(before) - (keep - 1)) :]}
        return sorted(each for each in ids if each not in kept and (newer or each.number <= committed.number))


STORAGE_NAME_CHARACTERS: Final = 200
"""File systems allow names of 255 bytes; the number, the run and the suffix of a file must fit too."""

# Without capital letters: on some file systems "A" and "a" are the same file.
_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-.")
_ESCAPED: Final = re.compile(rb"%([0-9a-f]{2})")

# No escaped name contains these.
_SHORTENED: Final = "~"
_EMPTY: Final = "%"

_STORED: Final = re.compile(
    r"(?P<number>[0-9]{10,})-(?P<run>.+)\.(checkpoint|(?P<process>[1-9][0-9]*)\.parts|(?P<owner>[0-9]+)-(?P<shared>[0-9]+)\.shared)"
)


def storage_name(name: str) -> str:
    """Return the name of a flow or a run as the name of a file or folder, which no other name shares.

    Bytes other than small letters, digits, ``_``, ``-`` and ``.`` (not first) become ``%`` and their hex digits. So no
    name leaves the folder of the store.

    >>> storage_name("clicks-2"), storage_name("../etc"), storage_name("Clicks é")
    ('clicks-2', '%2e.%2fetc', '%43licks%20%c3%a9')
    >>> name_of(storage_name("Clicks é"))
    'Clicks é'
    """
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"checkpoints: expected names of text, given {name!r}, which holds half a character; rename it"
        ) from error
    escaped = "".join(
        chr(byte) if byte in _PLAIN and (position or byte != ord(".")) else f"%{byte:02x}"
        for position, byte in enumerate(encoded)
    )
    return escaped or _EMPTY


def name_of(stored: str) -> str | None:
    """Return the name that ``storage_name`` converted; None for a text that ``storage_name`` never returns."""
    if stored == _EMPTY:
        return ""
    try:
        name = _ESCAPED.sub(lambda found: bytes((int(found[1], 16),)), stored.encode()).decode()
    except UnicodeError:
        return None
    return name if storage_name(name) == stored else None


def shortened_name(name: str) -> str:
    """Return :func:`storage_name`; if it is too long for a file, its end is replaced by the hash of the name."""
    escaped = storage_name(name)
    if len(escaped) <= STORAGE_NAME_CHARACTERS:
        return escaped
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{escaped[: STORAGE_NAME_CHARACTERS - len(digest) - 1]}{_SHORTENED}{digest}"


def is_shortened(stored: str) -> bool:
    """Return whether the name cannot be recovered from its stored form."""
    return _SHORTENED in stored


class StoredName(NamedTuple):
    """What the name of a file says: the checkpoint that it was stored for first, and the process that has stored it.

    >>> str(StoredName(CheckpointId(7, "a1"))), str(StoredName(CheckpointId(7, "a1"), process=2))
    ('0000000007-a1.checkpoint', '0000000007-a1.2.parts')
    >>> StoredName.of("0000000007-a1.2-0.shared")
    StoredName(checkpoint=CheckpointId(number=7, run='a1'), process=2, shared=0)
    """

    checkpoint: CheckpointId
    process: int = 0
    """Process 0 writes the file of a snapshot, and another process a file with its parts."""
    shared: int | None = None
    """Its number among the shared files of the process; None for a file that is not shared."""

    def __str__(self) -> str:
        end = f"{self.process}.parts" if self.process else "checkpoint"
        if self.shared is not None:
            end = f"{self.process}-{self.shared}.shared"
        return f"{self.checkpoint.number:010d}-{storage_name(self.checkpoint.run)}.{end}"

    @classmethod
    def of(cls, file_name: str) -> StoredName | None:
        """Return what the name of a file says; None for another file."""
        match = _STORED.fullmatch(file_name)
        run = name_of(match["run"]) if match else None
        if match is None or not run:
            return None
        shared = None if match["shared"] is None else int(match["shared"])
        found = cls(CheckpointId(int(match["number"]), run), int(match["process"] or match["owner"] or 0), shared)
        return found if str(found) == file_name else None


def snapshot_name(checkpoint: CheckpointId, process: int = 0) -> str:
    """Return the name of a snapshot's file, or of the file with the parts of another process than 0."""
    return str(StoredName(checkpoint, process))


def checkpoint_of(file_name: str) -> CheckpointId | None:
    """Return the checkpoint of a snapshot's file, by its name; None if the file is no snapshot."""
    found = StoredName.of(file_name)
    return found.checkpoint if found is not None and found[1:] == (0, None) else None


def shared_of(file_name: str) -> CheckpointId | None:
    """Return the checkpoint that stored a shared file first, by its name; None for another file."""
    found = StoredName.of(file_name)
    return None if found is None or found.shared is None else found.checkpoint


def removable_shared(names: Iterable[str], needed: Container[str], committed: CheckpointId) -> list[str]:
    """Return the shared files among ``names`` that nobody needs.

    ``needed`` are those that the kept snapshots name. A file that was stored for a checkpoint after the committed one
    may belong to a snapshot that is being written. A file that a run stored for an earlier checkpoint cannot: if it
    still were a part of the state, the committed snapshot would name it.

    >>> files = [str(StoredName(CheckpointId(number, "a"), shared=0)) for number in (6, 7, 8)]
    >>> removable_shared(files, needed={files[1]}, committed=CheckpointId(7, "a"))
    ['0000000006-a.0-0.shared']
    """
    owners = ((name, shared_of(name)) for name in names if name not in needed)
    return [name for name, owner in owners if owner is not None and owner.number <= committed.number]


RECORD_FORMAT: Final = 1


class _File(msgspec.Struct, frozen=True):
    format: int
    crc32: int
    record: msgspec.Raw


def pack_record(record: FlowRecord) -> bytes:
    """Return the bytes of ``record.json``: one line of JSON, with the checksum of the bytes of ``record`` in it.

    >>> data = pack_record(FlowRecord("clicks").claimed_by("a1").with_commit(CheckpointId(7, "a1")))
    >>> unpack_record(data).committed
    CheckpointId(number=7, run='a1')
    """
    packed = msgspec.json.encode(record)
    return msgspec.json.encode(_File(RECORD_FORMAT, zlib.crc32(packed), msgspec.Raw(packed))) + b"\n"


def unpack_record(data: bytes, *, flow: str | None = None) -> FlowRecord:
    """Return the record, which must be of ``flow`` if one is given.

    Raises ``Damage`` for damaged bytes, and ``OtherFormat`` for a record of another version.
    """
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise Damage(f"it is not what was written ({problem})") from None
    if file.format != RECORD_FORMAT:
        raise OtherFormat(file.format)
    if zlib.crc32(file.record) != file.crc32:
        raise Damage("it does not match its checksum")
    try:
        record = msgspec.json.decode(file.record, type=FlowRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise Damage(f"it holds what no version of this format has ({problem})") from None
    if msgspec.json.encode(record) != bytes(file.record):
        # A field that is missing would be read as its default: "nothing committed".
        raise Damage("it holds what no version of this format has (fields are missing or unknown)")
    if flow not in (None, record.flow):
        raise Damage(f"it is that of flow {record.flow!r}")
    return record
