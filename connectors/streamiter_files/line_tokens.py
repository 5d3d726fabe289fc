"""Lines cut into tokens, all lines of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamiter_files.number_parsing import Integers, Text

__all__ = ["Irregular", "LineTokens"]


class Irregular(ValueError):
    """Lines that the quick way of decoding does not take: each of them is looked at alone."""


class LineTokens:
    r"""The tokens of lines: stretches without any of the separators.

    ``text[starts[i]:ends[i]]`` is token i; those of line j are ``firsts[j]`` to before ``firsts[j + 1]``.

    >>> tokens = LineTokens([b"1 2:3", b"4"], b" :")
    >>> tokens.firsts.tolist(), bytes(tokens.text[tokens.ends]), tokens.places.tolist()
    ([0, 3, 4], b' :\n\n', [0, 1, 2, 0])
    """

    __slots__ = ("ends", "firsts", "is_separator", "places", "starts", "text")

    def __init__(self, lines: Sequence[bytes], separators: bytes) -> None:
        block = b"\n".join([b"", *lines, b"\n"])  # separators around all, and one more to look ahead to
        if block.count(b"\n") != len(lines) + 2:
            raise Irregular("a line feed within a line")
        self.text: Text = np.frombuffer(block, dtype=np.uint8)
        self.is_separator = _any_of(self.text, separators + b"\n")
        edges = np.flatnonzero(self.is_separator[1:] != self.is_separator[:-1]) + 1
        self.starts: Integers = edges[0::2]
        self.ends: Integers = edges[1::2]
        lengths = np.fromiter(map(len, lines), dtype=np.int64, count=len(lines))
        self.firsts: Integers = np.searchsorted(self.starts, np.cumsum(np.append(0, lengths + 1)))
        self.places: Integers = np.arange(len(self.starts)) - np.repeat(self.firsts[:-1], self.counts)
        """The place of each token in its line, from 0."""

    @property
    def counts(self) -> Integers:
        """How many tokens each line has."""
        return np.diff(self.firsts)


def _any_of(text: Text, characters: bytes) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = text == characters[0]
    for character in characters[1:]:
        found |= text == character
    return found
