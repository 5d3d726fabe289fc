"""How state and records lie in bytes, on disk and between processes.

:class:`PlainData` is the encoding, :func:`key_group` and its like what keys are, :class:`SpillQueue` a
queue that goes on on disk.
"""

from streamiter.checkpoints.keys import (
    KEY_GROUPS,
    Key,
    check_keys,
    encode_key,
    key_group,
    key_groups,
    normalize_key,
)
from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.spill import SpillQueue, SpillStatistics

__all__ = [
    "KEY_GROUPS",
    "Key",
    "PlainData",
    "SpillQueue",
    "SpillStatistics",
    "check_keys",
    "encode_key",
    "key_group",
    "key_groups",
    "normalize_key",
]
