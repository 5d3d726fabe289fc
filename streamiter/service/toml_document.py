"""TOML documents that are checked as a whole: the place of each key, values with units, and all errors at once.

``TomlDocument`` has the content, the places and the problems. A *parser* is a function from a value of TOML to a
setting; it raises ``WrongValue``, which becomes a problem with the line and the column of the value.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from streamiter.errors import ConfigurationError, did_you_mean, shortened

KeyPath = tuple[str, ...]
"""The keys from the top of the document to a value."""

Parser = Callable[[Any], Any]
"""Returns the setting for a value of TOML, or raises ``WrongValue``."""


class WrongValue(Exception):
    """A parser refuses a value: ``expected`` describes good values, ``remedy`` says what to do.

    ``given`` describes the value, where a message must not show it. ``key`` is the key below the value that is wrong.
    """

    def __init__(self, expected: str, remedy: str = "", *, given: str | None = None, key: KeyPath = ()) -> None:
        super().__init__(expected)
        self.expected = expected
        self.remedy = remedy
        self.given = given
        self.key = key


class Place(NamedTuple):
    """A place in the text; both numbers begin with 1, and columns count characters."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """One error of a file."""

    key: str
    """The key with the tables above it: ``http.address``; empty for an error of the syntax."""
    message: str
    """What was expected, what was given, and the remedy."""
    place: Place | None = None
    """The place in the file; None for settings that are no text."""

    def shown(self, source: str) -> str:
        """Return the problem with the name of its file, in the form that editors make a link of."""
        where = source if self.place is None else f"{source}:{self.place.line}:{self.place.column}"
        return ": ".join(filter(None, (where, self.key, self.message)))


class SettingsError(ConfigurationError):
    """A file of settings is wrong; ``problems`` has all its errors, in the order of the file."""

    def __init__(self, source: str, problems: Sequence[SettingProblem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        lines = [problem.shown(source) for problem in problems]
        super().__init__("\n".join(lines if len(lines) == 1 else [f"{source}: {len(lines)} errors", *lines]))


@dataclass(frozen=True, slots=True)
class TableKey:
    """A key of a table: its parser, and the name of the setting, if it is not that of the key."""

    parse: Parser
    setting: str = ""
    is_required: bool = False


class TomlDocument:
    """The content of a file, and the problems that were found in it so far."""

    def __init__(self, source: str, text: str | None, content: Mapping[str, object] | None = None) -> None:
        self.source = source
        self._problems: list[SettingProblem] = []
        self._places: dict[KeyPath, tuple[Place, Place]] = {}
        self._content: Mapping[str, object] = content or {}
        self._is_cut = False
        """Whether lines with an error of the syntax were left out, so that keys may be missing."""
        if text is not None:
            self._read(text)

    def _read(self, text: str) -> None:
        lines = text.split("\n")
        for _ in range(_SYNTAX_ERRORS_MAX):
            try:
                self._content = tomllib.loads("\n".join(lines))
                self._places = _places("\n".join(lines))
                return
            except RecursionError:
                message = "expected tables and arrays of few levels, given too many; remove brackets"
                self._problems.append(SettingProblem("", message, _deepest("\n".join(lines))))
                self._is_cut = True
                return
            except ValueError as error:  # tomllib also raises plain ones, for a number of thousands of digits.
                place = _place_in(str(error), lines)
                self._problems.append(SettingProblem("", _syntax_message(str(error), lines[place.line - 1]), place))
                self._is_cut = True
                if not lines[place.line - 1].strip():
                    return  # The error is at the end of the text, and there is nothing to leave out.
                lines[place.line - 1] = ""

    def names(self, path: KeyPath) -> frozenset[str]:
        """Return the keys of a table."""
        table = self._value(path)
        return frozenset(table if isinstance(table, Mapping) else ())

    def _value(self, path: KeyPath) -> object:
        value: object = self._content
        for name in path:
            value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
        return value

    def refuse(self, path: KeyPath, message: str, *, at_key: bool = False) -> None:
        """Add a problem about the value (or the key) at ``path``, or about the table that should have it."""
        known = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self._places), None)
        place = Place(1, 1) if self._places else None
        if known is not None:
            place = self._places[known][0 if at_key or known != path else 1]
        self._problems.append(SettingProblem(".".join(path), message, place))

    def table(self, path: KeyPath, keys: Mapping[str, TableKey]) -> dict[str, Any]:
        """Return the settings of a table that are right; add a problem for each other key, and each missing one."""
        given = self._value(path) if path else self._content
        if given is _MISSING:
            given = {}
        if not isinstance(given, Mapping):
            self.refuse(path, f"expected a table, given {shown_value(given)}; write [{'.'.join(path)}] above its keys")
            return {}
        settings: dict[str, Any] = {}
        for name, value in given.items():
            if name not in keys:
                self._refuse_key((*path, name), keys)
                continue
            try:
                settings[keys[name].setting or name] = keys[name].parse(value)
            except WrongValue as wrong:
                self.refuse_value((*path, name), wrong)
        for name, key in keys.items():
            if key.is_required and name not in given and not self._is_cut:
                self.refuse((*path, name), f"expected this key in [{'.'.join(path)}], given none; add it")
        return settings

    def is_wrong(self, path: KeyPath) -> bool:
        """Whether there is a problem of this value, or of a value in it."""
        return any(f"{problem.key}.".startswith(f"{'.'.join(path)}.") for problem in self._problems)

    def refuse_value(self, path: KeyPath, wrong: WrongValue) -> None:
        """Add the problem of a value that is refused."""
        value = self._value(path)
        given = wrong.given or ("none" if value is _MISSING else shown_value(value))
        remedy = f"; {wrong.remedy}" if wrong.remedy else ""
        self.refuse((*path, *wrong.key), f"expected {wrong.expected}, given {given}{remedy}")

    def _refuse_key(self, path: KeyPath, keys: Mapping[str, TableKey]) -> None:
        name = path[-1]
        if sources := [f"{name}{end}" for end in ("_env", "_file") if f"{name}{end}" in keys]:
            message = f"expected a secret outside of the file, given one in it; write {' or '.join(sources)}"
        else:
            meant = did_you_mean(name, keys) or f"; the keys are {', '.join(keys)}"
            message = f"expected a key that is known, given {name!r}{meant}"
        self.refuse(path, message, at_key=True)

    def check(self) -> None:
        """Raise ``SettingsError`` if there are problems."""
        if self._problems:
            first = Place(0, 0)
            raise SettingsError(self.source, sorted(self._problems, key=lambda problem: problem.place or first))


_MISSING: Final = object()

# A file with more errors of the syntax is no TOML.
_SYNTAX_ERRORS_MAX: Final = 20

_AT: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_BARE: Final = re.compile(r"[^=]*=\s*([A-Za-z\d][^\"'#]*?)\s*(#.*)?$")


def _place_in(message: str, lines: Sequence[str]) -> Place:
    at = _AT.search(message)
    if at is None or at[1] is None:
        return Place(len(lines), len(lines[-1]) + 1)
    return Place(min(int(at[1]), len(lines)), int(at[2]))


def _syntax_message(message: str, line: str) -> str:
    bare = _BARE.match(line)
    remedy = f'; texts, times and sizes need quotes: "{bare[1]}"' if bare else "; correct this line"
    return f"expected TOML, given a line that is none ({_AT.sub('', message).lower()}){remedy}"


# ---- places

_STRING: Final = re.compile(r'"""(?:\\.|[^\\])*?"""+|' r"'''.*?'''+|" r'"(?:\\.|[^"\\])*"|' r"'[^']*'", re.DOTALL)
_BLANK: Final = re.compile(r"(?:[\s,]|#[^\n]*)*")
_BARE_KEY: Final = re.compile(r"[\w-]+")
_BARE_VALUE: Final = re.compile(r"[^,\]}#\n]*")


_STRING_OR_BRACKET: Final = re.compile(rf"{_STRING.pattern}|#[^\n]*|[\[{{}}\]]", re.DOTALL)


def _deepest(text: str) -> Place:
    r"""Return the place of the bracket with the most brackets around it.

    >>> _deepest("a = [1]\nb = [[1], ']']")
    Place(line=2, column=6)
    """
    depth = most = at = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if depth > most:
            most, at = depth, token.start()
    return Place(text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))


def _places(text: str) -> dict[KeyPath, tuple[Place, Place]]:
    r"""Return the places of the key and of the value, for each key of a valid document.

    >>> _places("[http]\naddress = '127.0.0.1:80'")[("http", "address")]
    (Place(line=2, column=1), Place(line=2, column=11))
    """
    scanner = _Scanner(text)
    scanner.document()
    return scanner.found


class _Scanner:
    def __init__(self, text: str) -> None:
        self.found: dict[KeyPath, tuple[Place, Place]] = {}
        self._text = text
        self._at = 0
        self._line, self._line_start = 1, 0

    def document(self) -> None:
        table: KeyPath = ()
        while (character := self._next()) != "":
            if character == "[":
                place = self._place()
                self._at += 1 + self._text.startswith("[[", self._at)
                table = self._key()
                self._at = self._text.index("]", self._at) + 1
                self._at += self._text.startswith("]", self._at)
                self.found.setdefault(table, (place, place))
            else:
                self._pair(table)

    def _next(self) -> str:
        """Skip spaces, commas, line ends and comments, and return the next character; empty at the end."""
        blank = _BLANK.match(self._text, self._at)
        assert blank is not None
        self._at = blank.end()
        return self._text[self._at : self._at + 1]

    def _place(self) -> Place:
        line_ends = self._text.count("\n", self._line_start, self._at)
        if line_ends:
            self._line += line_ends
            self._line_start = self._text.rindex("\n", 0, self._at) + 1
        return Place(self._line, self._at - self._line_start + 1)

    def _key(self) -> KeyPath:
        names = []
        while True:
            self._next()
            if string := _STRING.match(self._text, self._at):
                names.append(tomllib.loads(f"x = {string[0]}")["x"])
                self._at = string.end()
            else:
                bare = _BARE_KEY.match(self._text, self._at)
                assert bare is not None
                names.append(bare[0])
                self._at = bare.end()
            if self._next() != ".":
                return tuple(names)
            self._at += 1

    def _pair(self, table: KeyPath) -> None:
        key_place = self._place()
        names = self._key()
        self._at += 1  # The equals sign.
        self._next()
        value_place = self._place()
        for end in range(1, len(names) + 1):
            self.found.setdefault((*table, *names[:end]), (key_place, value_place))
        self._value((*table, *names))

    def _value(self, path: KeyPath) -> None:
        opening = self._text[self._at]
        if opening in "[{":
            self._at += 1
            index = 0
            while (character := self._next()) not in "]}":
                if opening == "{":
                    self._pair(path)
                    continue
                place = self._place()
                self.found[*path, f"{index}"] = (place, place)
                self._value((*path, f"{index}"))
                index += 1
            self._at += len(character)
        else:
            match = _STRING.match(self._text, self._at) or _BARE_VALUE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()


# ---- values

_SHOWN_CHARACTERS: Final = 60


def shown_value(value: object) -> str:
    """Return a value as the file spells it, for messages.

    >>> shown_value("1s"), shown_value(True), shown_value({"a": 1}), shown_value([1])
    ('"1s"', 'true', 'a table', 'the array [1]')
    """
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, bool):
        return str(value).lower()
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]}…"
    return f"the array {shown}" if isinstance(value, list) else shown


def text_of(value: Any) -> str:
    """Parse a text that is not empty."""
    if isinstance(value, str) and value.strip():
        return value
    raise WrongValue("a text that is not empty", "write it in quotes")


def flag_of(value: Any) -> bool:
    """Parse true or false."""
    if isinstance(value, bool):
        return value
    raise WrongValue("true or false", "write it without quotes")


def choice_of(*choices: str) -> Parser:
    """Return the parser of one of these texts."""

    def parse(value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return value
        *first, last = [f'"{choice}"' for choice in choices]
        listed = f"{', '.join(first)} or {last}"
        meant = did_you_mean(value, choices).removeprefix("; ") if isinstance(value, str) else ""
        raise WrongValue(listed, meant or "choose one of them")

    return parse


def whole_of(least: int, most: int | None = None) -> Parser:
    """Return the parser of a whole number within these bounds."""

    def parse(value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= (most or value):
            return value
        expected = f"a whole number of at least {least}" if most is None else f"a number from {least} to {most}"
        choose = f"write {least} or more" if most is None else f"write {least}, {most}, or a number between them"
        raise WrongValue(expected, "write it without quotes" if isinstance(value, str) else choose)

    return parse


_WITH_UNIT: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z]+)", re.ASCII)
_WITHOUT_UNIT: Final = re.compile(r"(?=.*[1-9])\d{1,15}(\.\d{1,9})?", re.ASCII)
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_BYTES: Final = {"B": 1, "kB": 1000, "KiB": 1 << 10, "MB": 10**6, "MiB": 1 << 20, "GB": 10**9, "GiB": 1 << 30}


def duration_of(value: Any) -> float:
    """Parse a duration as seconds.

    >>> duration_of("36h"), duration_of("250 ms")
    (129600.0, 0.25)
    """
    return _with_unit(value, _SECONDS, 'a time above 0 with its unit, as "500ms", "1s", "5min", "36h" or "7d"', "s")


def size_of(value: Any) -> int:
    """Parse a size as bytes.

    >>> size_of("1 MiB"), size_of("500 kB")
    (1048576, 500000)
    """
    return int(_with_unit(value, _BYTES, 'a size above 0 with its unit, as "1 MiB" or "500 kB"', "MiB"))


def _with_unit(value: Any, units: Mapping[str, float], expected: str, usual: str) -> float:
    match = _WITH_UNIT.fullmatch(value) if isinstance(value, str) else None
    if match and match[2] in units and (number := float(match[1]) * units[match[2]]) > 0.0 and math.isfinite(number):
        return number
    bare = shortened(value).strip("'") if type(value) in (int, float, str) else ""
    if match and match[2] not in units:
        remedy = f"the units are {', '.join(units)}"
    elif match or _WITHOUT_UNIT.fullmatch(bare) is None:
        remedy = f'write a number above 0 with its unit, as "1{usual}"'
    else:
        remedy = f'write "{bare}{usual}"'
    raise WrongValue(expected, remedy)
