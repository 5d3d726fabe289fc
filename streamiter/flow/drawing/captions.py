"""What is written in nodes, beside links and over boxes, in lines that fit."""

from __future__ import annotations

from dataclasses import dataclass

from streamiter.flow.drawing.picture import Box, Link, Node
from streamiter.flow.drawing.text import fit, fit_line, printable, width_of

__all__ = [
    "HEADING_SIZE",
    "LABEL_SIZE",
    "TITLE_SIZE",
    "Caption",
    "Line",
    "heading_caption",
    "label_caption",
    "node_caption",
    "title_caption",
]

TITLE_SIZE = 16.0
HEADING_SIZE = 12.0
LABEL_SIZE = 11.0
_NAME_SIZE = 13.0
_NOTE_SIZE = 11.0
_LINE_HEIGHT = 1.35

# A name goes on in the next line behind some 25 characters, and is shortened in the third.
_NAME_WIDTH = 180.0
_NAME_LINES = 3
_NOTE_WIDTH = 280.0
_LABEL_WIDTH = 220.0
_HEADING_WIDTH = 480.0


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a caption."""

    text: str
    size: float
    muted: bool = False
    times: str = ""
    """Comes behind the text, muted."""

    @property
    def width(self) -> float:
        """How wide it is."""
        return width_of(f"{self.text} {self.times}" if self.times else self.text, self.size)

    @property
    def height(self) -> float:
        """How high it is, with the room to the next line."""
        return self.size * _LINE_HEIGHT


@dataclass(frozen=True, slots=True)
class Caption:
    """Lines, and what they stand for where they are too short for it."""

    lines: tuple[Line, ...]
    whole: str = ""
    """Empty if nothing is left out."""

    @property
    def width(self) -> float:
        """Of its widest line."""
        return max((line.width for line in self.lines), default=0.0)

    @property
    def height(self) -> float:
        """Of all lines."""
        return sum(line.height for line in self.lines)


def node_caption(node: Node) -> Caption:
    """Its name in a few lines, then its notes, one a line."""
    name = fit(node.name, _NAME_SIZE, _NAME_WIDTH, lines=_NAME_LINES)
    notes = [fit_line(note, _NOTE_SIZE, _NOTE_WIDTH) for note in node.notes]
    lines = [Line(text, _NAME_SIZE) for text in name.lines]
    if lines and node.times:
        lines[-1] = Line(lines[-1].text, _NAME_SIZE, times=node.times)
    lines += [Line(text, _NOTE_SIZE, muted=True) for note in notes for text in note.lines]
    shortened = any(fitted.shortened for fitted in (name, *notes))
    return Caption(tuple(lines), printable(", ".join((node.name, *node.notes))) if shortened else "")


def label_caption(link: Link) -> Caption:
    """Of a link, in one line."""
    return _line(link.label, LABEL_SIZE, _LABEL_WIDTH)


def heading_caption(box: Box) -> Caption:
    """Of a box, in one line."""
    return _line(box.heading, HEADING_SIZE, _HEADING_WIDTH)


def title_caption(title: str, width: float) -> Caption:
    """Of the drawing, in one line that may be this wide."""
    return _line(title, TITLE_SIZE, width)


def _line(text: str, size: float, width: float) -> Caption:
    fitted = fit_line(text, size, width)
    return Caption(
        tuple(Line(line, size) for line in fitted.lines), printable(text) if fitted.shortened else ""
    )
