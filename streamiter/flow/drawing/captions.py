"""The text of a node, a link, a box or a drawing, in lines that fit.

Widths are those of the font of the package, which also draws PNG: a machine may have no font at all. They are in the
file ``font/widths.json``, so that SVG needs no package that reads fonts.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from unicodedata import east_asian_width

from streamiter.flow.drawing.picture import Node

_NAME_SIZE: Final = 13.0
_NOTE_SIZE: Final = 11.0
_LINE_HEIGHT: Final = 1.35

# The third line of a name is the last one.
_NAME_CHARACTERS: Final = 28
_NAME_LINES: Final = 3
_NOTE_CHARACTERS: Final = 45


@dataclass(frozen=True, slots=True)
class CaptionLine:
    """One line of a caption, in a font of a size."""

    text: str
    size: float
    is_note: bool = False
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

    lines: tuple[CaptionLine, ...] = ()
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
    name = fit(node.name, _NAME_SIZE, _NAME_CHARACTERS, lines=_NAME_LINES)
    notes = [fit(note, _NOTE_SIZE, _NOTE_CHARACTERS, is_note=True) for note in node.notes]
    lines = (*name.lines[:-1], *(replace(line, times=node.times) for line in name.lines[-1:]))
    is_shortened = any(caption.whole for caption in (name, *notes))
    whole = printable(", ".join((node.name, *node.notes))) if is_shortened else ""
    return Caption((*lines, *(line for note in notes for line in note.lines)), whole)


# XML 1.0 cannot hold these characters, not even escaped.
_NOT_IN_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class _Wrapper(textwrap.TextWrapper):
    """Breaks a text after a space, and after a character that joins words in a name."""

    wordsep_re = re.compile(r"(\s+|[^\s_./:\-→]*[_./:\-→])")


def printable(text: str) -> str:
    """Return the text in one line, without the characters that XML cannot hold."""
    return " ".join(_NOT_IN_XML.sub("\ufffd", text).split())


def fit(text: str, size: float, characters: int, *, lines: int = 1, is_note: bool = False) -> Caption:
    """Break the text into at most ``lines`` lines of about ``characters``; leave out the end of a longer text."""
    text = printable(text)
    wrapped = _Wrapper(characters).wrap(text)
    is_longer = len(wrapped) > lines
    if is_longer:
        wrapped[lines - 1 :] = [f"{wrapped[lines - 1]}…"]
    return Caption(tuple(CaptionLine(line, size, is_note) for line in wrapped), text if is_longer else "")


# A character that the font lacks is drawn by another font: its estimated width has some room.
_ESTIMATES: Final = {"W": 1.3, "F": 1.3}

FONT_FAMILY: Final = "DejaVu Sans"
FONT_FILE: Final = Path(__file__).parent / "font" / "DejaVuSans.ttf"
_UNITS_IN_EM: Final = 2048


@functools.cache
def advances() -> Mapping[str, float]:
    """Return the width of each character of the font of the package, for a font of size 1."""
    characters: dict[str, str] = json.loads(FONT_FILE.with_name("widths.json").read_text("utf-8"))
    return {character: int(units) / _UNITS_IN_EM for units, same in characters.items() for character in same}


def width_of(text: str, size: float) -> float:
    """Return the width of a line in a font of this size."""
    known = advances()
    return size * sum(known.get(each) or _ESTIMATES.get(east_asian_width(each), 1.0) for each in text)
