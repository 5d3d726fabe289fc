"""Values of records, as they are shown."""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["shown"]

# A value is shown on a terminal up to here; in a pipe or a file, and with --json, it is whole.
_SHOWN_CHARACTERS: Final = 400


def shown(value: bytes) -> str:
    """Text as it is (shortened on a terminal), of anything else its size."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"({len(value):,} bytes that are not text)"
    if sys.stdout.isatty() and len(text) > _SHOWN_CHARACTERS:
        return f"{text[:_SHOWN_CHARACTERS]}… ({len(value):,} bytes)"
    return text
