"""The text of a drawing, in lines that fit, and its width.

A *caption* is the text of a node, a link, a box or the drawing, broken into lines. Its width is measured with the font
of the package, which also draws PNG: a machine may have no font at all. The font file is read here, so that SVG needs
no other package.
"""

from __future__ import annotations

import functools
import re
import struct
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamiter.flow.drawing.picture import Box, Link, Node

_TITLE_SIZE: Final = 16.0
_HEADING_SIZE: Final = 12.0
_LABEL_SIZE: Final = 11.0
_NAME_SIZE: Final = 13.0
_NOTE_SIZE: Final = 11.0
_LINE_HEIGHT: Final = 1.35

# After about 25 characters a name continues in the next line; the third line is the last one.
_NAME_WIDTH: Final = 180.0
_NAME_LINES: Final = 3
_NOTE_WIDTH: Final = 280.0
_LABEL_WIDTH: Final = 220.0
_HEADING_WIDTH: Final = 480.0


@dataclass(frozen=True, slots=True)
class CaptionLine:
    """One line of a caption."""

    text: str
    size: float
    """The size of the font."""
    muted: bool = False
    """Whether the line has the colour of notes."""
    times: str = ""
    """The number of subtasks, written after the text in the colour of notes."""

    @property
    def width(self) -> float:
        """Return the width of the line."""
        return width_of(f"{self.text} {self.times}" if self.times else self.text, self.size)

    @property
    def height(self) -> float:
        """Return the height of the line, with the distance to the next line."""
        return self.size * _LINE_HEIGHT


@dataclass(frozen=True, slots=True)
class Caption:
    """A text in lines that fit."""

    lines: tuple[CaptionLine, ...]
    whole: str = ""
    """The whole text if the lines leave out a part of it, else empty."""

    @property
    def width(self) -> float:
        """Return the width of the widest line."""
        return max((line.width for line in self.lines), default=0.0)

    @property
    def height(self) -> float:
        """Return the height of all lines."""
        return sum(line.height for line in self.lines)


def node_caption(node: Node) -> Caption:
    """Return the name in up to three lines, then each note in a line."""
    name = fit(node.name, _NAME_SIZE, _NAME_WIDTH, lines=_NAME_LINES)
    notes = [fit(note, _NOTE_SIZE, _NOTE_WIDTH, lines=1) for note in node.notes]
    lines = [CaptionLine(text, _NAME_SIZE) for text in name.lines]
    if lines and node.times:
        lines[-1] = CaptionLine(lines[-1].text, _NAME_SIZE, times=node.times)
    lines += [CaptionLine(text, _NOTE_SIZE, muted=True) for note in notes for text in note.lines]
    shortened = any(fitted.shortened for fitted in (name, *notes))
    return Caption(tuple(lines), printable(", ".join((node.name, *node.notes))) if shortened else "")


def label_caption(link: Link) -> Caption:
    """Return the label of a link, in one line."""
    return _one_line(link.label, _LABEL_SIZE, _LABEL_WIDTH)


def heading_caption(box: Box) -> Caption:
    """Return the heading of a box, in one line."""
    return _one_line(box.heading, _HEADING_SIZE, _HEADING_WIDTH)


def title_caption(title: str, width: float) -> Caption:
    """Return the title of a drawing in one line, at most this wide."""
    return _one_line(title, _TITLE_SIZE, width)


def _one_line(text: str, size: float, width: float) -> Caption:
    fitted = fit(text, size, width, lines=1)
    return Caption(
        tuple(CaptionLine(line, size) for line in fitted.lines), printable(text) if fitted.shortened else ""
    )


# XML 1.0 cannot hold these characters, not even escaped.
_NOT_IN_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# A name may be broken after a space, and after a character that joins words in a name.
_PIECES: Final = re.compile(r"[^\s_./:\-→]*[\s_./:\-→]?")


@dataclass(frozen=True, slots=True)
class Fitted:
    """Lines that are narrow enough."""

    lines: tuple[str, ...]
    shortened: bool = False
    """Whether the end of the text is left out."""


def printable(text: str) -> str:
    """Return the text in one line, without the characters that XML cannot hold."""
    return " ".join(_NOT_IN_XML.sub("\ufffd", text).split())


def fit(text: str, size: float, width: float, *, lines: int) -> Fitted:
    """Break the text into at most this many lines, between words if possible; shorten a text that is too long."""
    rest = printable(text)
    fitted: list[str] = []
    while rest and len(fitted) < lines:
        if width_of(rest, size) <= width:
            return Fitted((*fitted, rest))
        is_last = len(fitted) == lines - 1
        length = _fitting(rest, size, width - (width_of("…", size) if is_last else 0))
        if is_last:
            return Fitted((*fitted, rest[:length].rstrip() + "…"), shortened=True)
        length = _break_before(rest, length)
        fitted.append(rest[:length].rstrip())
        rest = rest[length:].lstrip()
    return Fitted(tuple(fitted))


def _fitting(text: str, size: float, width: float) -> int:
    """Return the number of characters that fit, at least one."""
    used = 0.0
    for length, character in enumerate(text):
        used += width_of(character, size)
        if used > width:
            return max(1, length)
    return len(text)


def _break_before(text: str, length: int) -> int:
    """Return the last place to break within the first ``length`` characters, or ``length`` if there is none."""
    place = 0
    for piece in _PIECES.finditer(text):
        if len(piece[0].rstrip()) + piece.start() > length:
            break
        place = piece.end()
    return place or length


# -- the width of text -------------------------------------------------------------------------------------

FONT_FAMILY: Final = "DejaVu Sans"
FONT_FILE: Final = Path(__file__).parent / "font" / "DejaVuSans.ttf"

# The width of a character that the font lacks is estimated, with some room: another font draws it.
_WIDE_EM: Final = 1.3
_NARROW_EM: Final = 1.0


def width_of(text: str, size: float) -> float:
    """Return the width of a line in a font of this size."""
    known = advances()
    return size * sum(
        width if (width := known.get(character)) is not None else _estimate(character) for character in text
    )


def _estimate(character: str) -> float:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0.0
    return _WIDE_EM if unicodedata.east_asian_width(character) in "WF" else _NARROW_EM


@functools.cache
def advances() -> Mapping[str, float]:
    """Return the width of each character of the font of the package, for a font of size 1."""
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
    """Return the offset of each table of the font file."""
    (count,) = struct.unpack_from(">H", data, 4)
    records = (struct.unpack_from(">4sIII", data, 12 + 16 * number) for number in range(count))
    return {tag.decode(): offset for tag, _, offset, _ in records}


def _glyphs(data: bytes, cmap: int) -> Iterator[tuple[str, int]]:
    """Yield each character with its glyph, from the subtable of the basic plane (format 4)."""
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
