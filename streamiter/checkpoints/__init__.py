"""How state and records lie in bytes, on disk and between processes.

:class:`PlainData` is the encoding, :func:`key_group` and its like what keys are, :class:`SpillQueue` a
queue that goes on on disk, :class:`ReplayCache` data that is read again and again and does so, too.
"""

from streamiter.checkpoints.disk_queue import SpillQueue, SpillStatistics
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
from streamiter.checkpoints.replay_cache import ReplayCache

__all__ = [
    "KEY_GROUPS",
    "Key",
    "PlainData",
    "ReplayCache",
    "SpillQueue",
    "SpillStatistics",
    "check_keys",
    "encode_key",
    "key_group",
    "key_groups",
    "normalize_key",
]
