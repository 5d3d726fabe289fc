"""The bytes of ``record.json``: what a directory store knows of a flow, with a checksum.

>>> data = pack_record(FlowRecord("clicks").claimed_by("a1").with_commit(CheckpointId(7, "a1")))
>>> unpack_record(data).committed
CheckpointId(number=7, run='a1')
"""

from __future__ import annotations

import zlib
from typing import Final

import msgspec

from streamiter.checkpoints.flow_record import FlowRecord, RunRecord
from streamiter.checkpoints.snapshot import CheckpointId
from streamiter.checkpoints.snapshot_format import Damage, OtherFormat

__all__ = ["RECORD_FORMAT", "pack_record", "unpack_record"]

RECORD_FORMAT: Final = 1


class _Committed(msgspec.Struct, frozen=True):
    number: int
    run: str


class _Run(msgspec.Struct, frozen=True):
    run: str
    committed: int | None


class _Record(msgspec.Struct, frozen=True):
    flow: str
    runs: list[_Run]
    committed: _Committed | None
    is_lost: bool


class _File(msgspec.Struct, frozen=True):
    format: int
    crc32: int
    record: msgspec.Raw


def pack_record(record: FlowRecord) -> bytes:
    """One line of JSON; the checksum is that of the bytes of ``record`` in it."""
    committed = record.committed
    packed = msgspec.json.encode(
        _Record(
            record.flow,
            [_Run(each.run, each.committed) for each in record.runs],
            None if committed is None else _Committed(committed.number, committed.run),
            record.is_lost,
        )
    )
    return msgspec.json.encode(_File(RECORD_FORMAT, zlib.crc32(packed), msgspec.Raw(packed))) + b"\n"


def unpack_record(data: bytes, *, flow: str | None = None) -> FlowRecord:
    """The record, of ``flow`` where one is given. Raises ``Damage``; ``OtherFormat`` for that of another version."""
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise Damage(f"it is not what was written ({problem})") from None
    if file.format != RECORD_FORMAT:
        raise OtherFormat(file.format)
    if zlib.crc32(file.record) != file.crc32:
        raise Damage("it does not match its checksum")
    try:
        record = msgspec.json.decode(file.record, type=_Record)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise Damage(f"it holds what no version of this format has ({problem})") from None
    if flow not in (None, record.flow):
        raise Damage(f"it is that of flow {record.flow!r}")
    committed = record.committed
    return FlowRecord(
        record.flow,
        tuple(RunRecord(each.run, each.committed) for each in record.runs),
        None if committed is None else CheckpointId(committed.number, committed.run),
        record.is_lost,
    )
