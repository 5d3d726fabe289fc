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


def write(path: Path, calls: dict[str, Call]) -> None:
    """Write the file again, with the errors that its calls raise now."""
    rewrite(path, lambda name, text: asyncio.run(with_errors_now(text, calls[name])))


def rewrite(path: Path, as_now: Callable[[str, str], str]) -> None:
    """Write each section of the file again, given its name and its text."""
    written = path.read_text(encoding="utf-8").partition("\n== ")[0].rstrip() + "\n"
    for name, text in sections(path).items():
        written += f"\n== {name}\n{as_now(name, text)}\n"
    path.write_text(written, encoding="utf-8")
