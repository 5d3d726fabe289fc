"""Error texts of a room in one file: a test compares them, and a command writes them again, to be read in a review.

A section of the file begins with ``==`` and its name. Lines with ``#`` tell the incidents that its refusals prevent.
Each call has its error below it, indented:

    psf.Abs("w", -1, 0)
        OutOfRange: psf.Abs(source=): expected a whole number of at least 0, given -1
"""

import asyncio
import re
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

LINE_LENGTH = 120

Call = Callable[[str], Awaitable[object]]
"""Evaluates the code of a call, which should raise an error."""


def sections(path: Path) -> dict[str, str]:
    """Return the text of each section of a file, by name."""
    parts = path.read_text(encoding="utf-8").split("\n== ")
    return {part.partition("\n")[0]: part.partition("\n")[2].strip("\n") for part in parts[1:]}


async def with_errors_now(section: str, call: Call) -> str:
    """Return the text of a section with the errors that its calls raise now."""
    errors = {line: await _error_of(line, call) for line, before in _calls_and_remarks(section) if before is not None}
    return with_texts_now(section, errors.__getitem__)


def with_texts_now(section: str, text_of: Callable[[str], str]) -> str:
    """Return a section with the texts that belong to its calls now.

    A text that ends with "…" stays if the text now begins so: the rest is the text of another library.
    """
    lines: list[str] = []
    for line, before in _calls_and_remarks(section):
        lines.append(line)
        if before is not None:
            text = text_of(line)
            lines += textwrap.wrap(
                before if before.endswith("…") and text.startswith(before[:-1]) else text,
                LINE_LENGTH,
                initial_indent="    ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def _calls_and_remarks(section: str) -> Iterator[tuple[str, str | None]]:
    """Yield each call with its error, which is indented, and each remark with None."""
    for of_call in re.split(r"\n(?! )", section):
        line, *error = of_call.splitlines()
        yield line, None if line.startswith("#") else " ".join(map(str.strip, error))


async def _error_of(code: str, call: Call) -> str:
    try:
        result = await call(code)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"accepted: {result!r}"


def refusals_test(path: Path, calls: dict[str, Call]) -> Callable[..., Awaitable[None]]:
    """Return a test, with a case for each section, that the errors are those of the file."""

    @pytest.mark.parametrize("section", calls)
    async def test(section: str) -> None:
        """Each section tells the incidents that its refusals prevent."""
        text = sections(path)[section]
        assert await with_errors_now(text, calls[section]) == text

    return test


class Script(Protocol):
    """Runs the lines of one section of a file of scripts."""

    def act(self, line: str) -> str:
        """Do what a line says, and return what follows, as it is below the line."""


def scripts_test(path: Path, script: Callable[[], Script]) -> Callable[[str], None]:
    """Return a test, with a case for each section, that scripts do what the file says."""

    @pytest.mark.parametrize("section", sections(path))
    def test(section: str) -> None:
        """Each section tells the incident that it prevents."""
        text = sections(path)[section]
        assert with_texts_now(text, script().act) == text

    return test


def write_scripts(path: Path, script: Callable[[], Script]) -> None:
    """Write the file again, with what its scripts do now."""
    rewrite(path, lambda _, text: with_texts_now(text, script().act))


def write(path: Path, calls: dict[str, Call]) -> None:
    """Write the file again, with the errors that its calls raise now."""
    rewrite(path, lambda name, text: asyncio.run(with_errors_now(text, calls[name])))


def rewrite(path: Path, as_now: Callable[[str, str], str]) -> None:
    """Write each section of the file again, given its name and its text."""
    written = path.read_text(encoding="utf-8").partition("\n== ")[0].rstrip() + "\n"
    for name, text in sections(path).items():
        written += f"\n== {name}\n{as_now(name, text)}\n"
    path.write_text(written, encoding="utf-8")
