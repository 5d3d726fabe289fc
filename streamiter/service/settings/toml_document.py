"""The text of a TOML document: its content, the line of each key, and all errors of the syntax at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Final

from streamiter.values.settings import KeyPath, SettingProblem, SettingsDocument


def toml_document(source: str, text: str) -> SettingsDocument:
    """Return the document of a text; lines with an error of the syntax are left out, so that the others are checked."""
    lines = text.replace("\r\n", "\n").split("\n")
    problems: list[SettingProblem] = []
    for _ in range(_SYNTAX_ERRORS_MAX):
        try:
            content = tomllib.loads("\n".join(lines))
            return SettingsDocument(source, content, lines_of_keys(lines), problems, is_whole=not problems)
        except RecursionError:
            deepest = max(lines, key=lambda line: line.count("[") + line.count("{"))
            message = "expected tables and arrays of few levels, given too many; remove brackets"
            problems.append(SettingProblem("", message, lines.index(deepest) + 1))
            break
        except ValueError as error:  # tomllib also raises plain ones, for a number of thousands of digits.
            at = _AT.search(str(error))
            line = len(lines) if at is None or at[1] is None else min(int(at[1]), len(lines))
            problems.append(SettingProblem("", _syntax_message(str(error), lines[line - 1]), line))
            if not lines[line - 1].strip():
                break  # The error is at the end of the text, and there is nothing to leave out.
            is_header = lines[line - 1].lstrip().startswith("[")
            lines[line - 1] = ""
            while is_header and line < len(lines) and not _HEADER.fullmatch(lines[line]):
                lines[line] = ""  # Its keys would be taken for those of the table before.
                line += 1
    return SettingsDocument(source, {}, None, problems, is_whole=False)


# A file with more errors of the syntax is no TOML.
_SYNTAX_ERRORS_MAX: Final = 20

_AT: Final = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_HEADER: Final = re.compile(r"\s*\[+[^\[\],=]+\]+\s*(#.*)?")
_BARE: Final = re.compile(r"[^=]*=\s*([A-Za-z\d][^\"'#]*?)\s*(#.*)?$")


def _syntax_message(message: str, line: str) -> str:
    if any(words in message for words in ("overwrite a value", " twice", "Duplicate inline")):
        return "expected each table, and each key in it, once, given this one again; leave one of them out"
    bare = _BARE.match(line)
    remedy = f'; texts, times and sizes need quotes: "{bare[1]}"' if bare else "; correct this line"
    return f"expected TOML, given a line that is none ({_AT.sub('', message).lower()}){remedy}"


def lines_of_keys(lines: list[str]) -> dict[KeyPath, int]:
    """Return the line on which each key of a valid document begins, or the value that has the key in it.

    tomllib tells no places. But a document is a sequence of statements, each of some whole lines, and the fewest lines
    that are TOML by themselves are one statement.

    >>> lines_of_keys(["[http]", "rows = [", "  1]", "tls.key = 'a'"])
    {('http',): 1, ('http', 'rows'): 2, ('http', 'tls'): 4, ('http', 'tls', 'key'): 4}
    """
    found: dict[KeyPath, int] = {}
    table: KeyPath = ()
    begin = 0
    for end in range(1, len(lines) + 1):
        try:
            statement = tomllib.loads("\n".join(lines[begin:end]))
        except ValueError:
            continue
        paths = list(_paths(statement, ()))
        if lines[begin].lstrip().startswith("["):
            table = paths[-1]
            found.setdefault(table, begin + 1)
        else:
            for path in paths:
                found.setdefault((*table, *path), begin + 1)
        begin = end
    return found


def _paths(table: Mapping[str, object], above: KeyPath) -> Iterator[KeyPath]:
    for name, value in table.items():
        yield (*above, name)
        if isinstance(value, Mapping):
            yield from _paths(value, (*above, name))
