"""The font that drawings are measured and, as PNG, drawn with; a machine may have none."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["FONT_FAMILY", "FONT_FILE", "advances"]

FONT_FAMILY = "DejaVu Sans"
FONT_FILE = Path(__file__).parent / "font" / "DejaVuSans.ttf"


@functools.cache
def advances() -> Mapping[str, float]:
    """How far each character of the font moves the next one on, for a font of size 1."""
    data = FONT_FILE.read_bytes()
    tables = _tables(data)
    (units_in_em,) = struct.unpack_from(">H", data, tables["head"] + 18)
    (metrics,) = struct.unpack_from(">H", data, tables["hhea"] + 34)
    return {
        character: struct.unpack_from(">H", data, tables["hmtx"] + 4 * min(glyph, metrics - 1))[0]
        / units_in_em
        for character, glyph in _glyphs(data, tables["cmap"])
    }


def _tables(data: bytes) -> dict[str, int]:
    (count,) = struct.unpack_from(">H", data, 4)
    records = (struct.unpack_from(">4sIII", data, 12 + 16 * number) for number in range(count))
    return {tag.decode(): offset for tag, _, offset, _ in records}


def _glyphs(data: bytes, cmap: int) -> Iterator[tuple[str, int]]:
    """Characters with their glyphs, of the subtable for the basic plane (format 4)."""
    (count,) = struct.unpack_from(">H", data, cmap + 2)
    subtables = [cmap + struct.unpack_from(">I", data, cmap + 8 + 8 * number)[0] for number in range(count)]
    table = next(place for place in subtables if struct.unpack_from(">H", data, place)[0] == 4)
    segments = struct.unpack_from(">H", data, table + 6)[0] // 2
    ends, starts, deltas, ranges = (
        struct.unpack_from(f">{segments}H", data, table + 14 + 2 * segments * column + (2 if column else 0))
        for column in range(4)
    )
    for segment in range(segments):
        for code in range(starts[segment], min(ends[segment], 0xFFFE) + 1):
            glyph = code
            if ranges[segment]:
                place = (
                    table + 16 + 6 * segments + 2 * segment + ranges[segment] + 2 * (code - starts[segment])
                )
                (glyph,) = struct.unpack_from(">H", data, place)
            yield chr(code), (glyph + deltas[segment]) & 0xFFFF
