"""How wide text is, and how it is made to fit."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from streamiter.flow.drawing.font_file import advances

__all__ = ["Fitted", "fit", "fit_line", "printable", "width_of"]

# Of characters that the font does not have; it is another font's, so it can only be estimated, with some room.
_WIDE_EM = 1.3
_NARROW_EM = 1.0

# XML 1.0 cannot hold these, not even escaped.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# Where a name may be broken: behind a space, and behind what joins words in a name.
_PIECES = re.compile(r"[^\s_./:\-→]*[\s_./:\-→]?")


@dataclass(frozen=True, slots=True)
class Fitted:
    """Lines that are narrow enough."""

    lines: tuple[str, ...]
    shortened: bool = False


def width_of(text: str, size: float) -> float:
    """The width of a line in a font of this size."""
    known = advances()
    return size * sum(
        width if (width := known.get(character)) is not None else _estimate(character) for character in text
    )


def _estimate(character: str) -> float:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0.0
    return _WIDE_EM if unicodedata.east_asian_width(character) in "WF" else _NARROW_EM


def printable(text: str) -> str:
    """The text as XML can hold it, in one line."""
    return " ".join(_NOT_IN_XML.sub("\ufffd", text).split())


def fit_line(text: str, size: float, width: float) -> Fitted:
    """The text in one line, shortened at its end if it is too wide."""
    return fit(text, size, width, lines=1)


def fit(text: str, size: float, width: float, *, lines: int) -> Fitted:
    """The text in a few lines, broken between words where that helps, shortened if it is still too wide."""
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
    """How many characters fit; at least one, so that there is always progress."""
    used = 0.0
    for length, character in enumerate(text):
        used += width_of(character, size)
        if used > width:
            return max(1, length)
    return len(text)


def _break_before(text: str, length: int) -> int:
    """The last place to break within the first ``length`` characters, or there if there is none."""
    place = 0
    for piece in _PIECES.finditer(text):
        if len(piece[0].rstrip()) + piece.start() > length:
            break
        place = piece.end()
    return place or length
