"""State and records in bytes, on disk and between processes.

In reading order: ``plain_data`` (with ``encoding`` and ``plain_format``) encodes values and batches; ``keys`` has keys
and key groups; ``disk_queue`` and ``replay_cache`` keep batches in memory up to a limit and then on disk; ``snapshot``
and ``snapshot_file`` are the format of a stored snapshot; ``store`` is the protocol of a store of snapshots, with
``directory_store`` and ``memory_store``; ``files`` has temporary files and locks.
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
