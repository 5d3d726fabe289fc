"""Names of flows and runs as names of files: whatever they hold, no two share a file and none leaves the folder.

>>> storage_name("clicks-2"), storage_name("../etc"), storage_name("Clicks é")
('clicks-2', '%2e.%2fetc', '%43licks%20%c3%a9')
>>> name_of(storage_name("Clicks é"))
'Clicks é'
>>> snapshot_name(CheckpointId(7, "a1")), checkpoint_of("0000000007-a1.checkpoint")
('0000000007-a1.checkpoint', CheckpointId(number=7, run='a1'))
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from streamiter.checkpoints.snapshot import CheckpointId
from streamiter.errors import ConfigurationError

__all__ = [
    "STORAGE_NAME_CHARACTERS",
    "checkpoint_of",
    "is_shortened",
    "name_of",
    "shortened_name",
    "snapshot_name",
    "storage_name",
]

STORAGE_NAME_CHARACTERS: Final = 200
"""File systems end at 255 bytes; the number, the run and the suffix of a file must fit as well."""

# Capital letters are not among them: on some file systems "A" and "a" are one file.
_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-.")
_ESCAPED: Final = re.compile(rb"%([0-9a-f]{2})")

# Stand in no escaped name.
_SHORTENED: Final = "~"
_EMPTY: Final = "%"

_SNAPSHOT: Final = re.compile(r"(?P<number>[0-9]{10,})-(?P<run>.+)\.checkpoint")


def storage_name(name: str) -> str:
    """The name; bytes other than small letters, digits, ``_``, ``-`` and ``.`` (not first) as ``%`` and hex."""
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
    """The name that ``storage_name`` gave this; None for what it never gives."""
    if stored == _EMPTY:
        return ""
    try:
        name = _ESCAPED.sub(lambda found: bytes((int(found[1], 16),)), stored.encode()).decode()
    except UnicodeError:
        return None
    return name if storage_name(name) == stored else None


def shortened_name(name: str) -> str:
    """:func:`storage_name`, with the hash of the whole in place of the end where that is too long for a file."""
    escaped = storage_name(name)
    if len(escaped) <= STORAGE_NAME_CHARACTERS:
        return escaped
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{escaped[: STORAGE_NAME_CHARACTERS - len(digest) - 1]}{_SHORTENED}{digest}"


def is_shortened(stored: str) -> bool:
    """Whether the name cannot be read back from it."""
    return _SHORTENED in stored


def snapshot_name(checkpoint: CheckpointId) -> str:
    """The name of a snapshot's file."""
    return f"{checkpoint.number:010d}-{storage_name(checkpoint.run)}.checkpoint"


def checkpoint_of(file_name: str) -> CheckpointId | None:
    """Which snapshot a file is, by its name; None if none."""
    match = _SNAPSHOT.fullmatch(file_name)
    run = name_of(match["run"]) if match else None
    if match is None or not run:
        return None
    checkpoint = CheckpointId(int(match["number"]), run)
    return checkpoint if snapshot_name(checkpoint) == file_name else None
