"""Compaction as the connectors without a server do it: what is stored together is dropped together.

With each write they look at the last ``COMPACTED_BLOCKS`` things stored and drop those all of whose records
have a newer one of their key. So a topic of few keys, each written alone (commit records), has hardly more
blocks than keys, whatever was written; a topic of many keys keeps more than it needs.

>>> is_superseded([b"a", b"b"], {b"a", b"b", b"c"}), is_superseded([b"a", None], {b"a"})
(True, False)
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final

__all__ = ["COMPACTED_BLOCKS", "is_superseded"]

COMPACTED_BLOCKS: Final = 256
"""More keys than flows write to one file; as blocks of one record they are looked through in a millisecond."""


def is_superseded(keys: Sequence[bytes | None] | None, newer: Set[bytes]) -> bool:
    """Whether each of these records has a key that is among the ``newer`` ones."""
    return keys is not None and all(key is not None and key in newer for key in keys)
