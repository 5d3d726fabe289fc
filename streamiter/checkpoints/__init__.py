"""State and records in bytes, on disk and between processes.

In reading order: ``plain_data`` (with ``encoding`` and ``plain_format``) encodes values and batches; ``keys`` has
keys and key groups; ``disk_queue`` and ``replay_cache`` (with ``disk_batches``) keep batches in memory up to a limit
and then on disk; ``snapshot`` is a stored snapshot and its file; ``store`` keeps snapshots, ``flow_checkpoints`` those
of one flow, and ``flow_record`` has the rules of claims and commits; they use ``blobs``: in memory, in a folder
(``folder_blobs``) or in an object store (``object_blobs``).
"""

from streamiter.checkpoints.disk_queue import SpillQueue, SpillStatistics
from streamiter.checkpoints.keys import KEY_GROUPS, Key, check_keys, encode_key, key_group, key_groups, normalize_key
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
