"""Reads settings that people write: tables of a file, JSON of a network, options of a topic, with all errors at once.

A *parser* is a function from a value to a setting; it raises ``WrongValue``. ``SettingsDocument`` gives the values of a
table to the parsers of its keys, and collects each ``WrongValue``, each unknown key and each missing key as a problem
with the path and the line of its key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, signature
from types import NoneType
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

from streamiter.errors import ConfigurationError, StreamiterError, did_you_mean, shortened
from streamiter.values.numbers import plain_float

KeyPath = tuple[str, ...]
"""The keys from the top of the document to a value; ``[0]`` is the first item of an array."""

Parser = Callable[[Any], Any]
"""Returns the setting for a value, or raises ``WrongValue``."""


class WrongValue(ValueError):
    """A parser refuses a value: ``expected`` describes good values, ``remedy`` says what to do.

    ``given`` describes the value, where a message must not show it. ``key`` is the key below the value that is wrong.
    """

    def __init__(self, expected: str, remedy: str = "", *, given: str | None = None, key: KeyPath = ()) -> None:
        super().__init__(expected)
        self.expected = expected
        self.remedy = remedy
        self.given = given
        self.key = key


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """One error of settings."""

    key: str
    """The key with the tables above it: ``http.address``; empty for an error of the syntax."""
    message: str
    """What was expected, what was given, and the remedy."""
    line: int | None = None
    """The line in the file, counted from 1; None for settings that are no text."""

    def shown(self, source: str) -> str:
        """Return the problem with the name of its file, in the form that editors make a link of."""
        where = source if self.line is None else f"{source}:{self.line}"
        return ": ".join(filter(None, (where, self.key, self.message)))


class SettingsError(ConfigurationError):
    """Settings are wrong; ``problems`` has all errors, in the order of the file."""

    def __init__(self, source: str, problems: Sequence[SettingProblem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        lines = [problem.shown(source) for problem in problems]
        super().__init__("\n".join(lines if len(lines) == 1 else [f"{source}: {len(lines)} errors", *lines]))


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of a table: its parser, and the name of the setting, if it is not that of the key."""

    parse: Parser
    name: str = ""
    is_required: bool = False


def setting_keys(kind: type[Any], key_of: Callable[[str], str]) -> dict[str, Setting]:
    """Return the keys of a dataclass: ``key_of`` returns the key for the name of a field.

    The parser of a field is in its ``Annotated``, or its type tells it.
    """
    hints = get_type_hints(kind, include_extras=True)
    keys = {}
    for each in fields(kind):
        is_required = each.default is MISSING and each.default_factory is MISSING
        keys[key_of(each.name)] = Setting(_parser_of(hints[each.name]), each.name, is_required)
    return keys


def _parser_of(hint: Any) -> Parser:
    if get_origin(hint) is Annotated:
        parse: Parser = hint.__metadata__[0]
        return parse
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return choice_of(*parts)
    return _parser_of(parts[0]) if NoneType in parts else _PARSERS[hint]


class SettingsDocument:
    """The content of a file, and the problems that were found in it so far.

    ``lines`` has the line of each key. ``is_whole`` is false if parts of the file are unknown, so that keys may be
    missing. ``is_lenient`` makes unknown keys warnings.
    """

    def __init__(
        self,
        source: str,
        content: Mapping[str, object],
        lines: Mapping[KeyPath, int] | None = None,
        problems: Sequence[SettingProblem] = (),
        *,
        is_whole: bool = True,
        is_lenient: bool = False,
    ) -> None:
        self.source = source
        self.warnings: list[str] = []
        self._content = content
        self._lines = {} if lines is None else lines
        self._problems = list(problems)
        self._is_whole, self._is_lenient = is_whole, is_lenient

    def names(self, path: KeyPath) -> list[str]:
        """Return the keys of a table, in its order."""
        table = self.value(path)
        return list(table) if isinstance(table, Mapping) else []

    def value(self, path: KeyPath) -> Any:
        """Return the value at ``path``; ``NOT_GIVEN`` if there is none."""
        value: Any = self._content
        for name in path:
            if isinstance(value, Mapping):
                value = value.get(name, NOT_GIVEN)
            else:
                value = value[int(name[1:-1])] if name.startswith("[") and isinstance(value, Sequence) else NOT_GIVEN
        return value

    def problem(self, path: KeyPath, message: str) -> SettingProblem:
        """Return a problem about the value at ``path``, or about the table that should have it."""
        known = (self._lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self._lines)
        return SettingProblem(_joined(path), message, next(known, 1 if self._lines else None))

    def refuse(self, path: KeyPath, message: str) -> None:
        """Add a problem."""
        self._problems.append(self.problem(path, message))

    def refuse_value(self, path: KeyPath, wrong: WrongValue) -> None:
        """Add the problem of a value that is refused."""
        value = self.value((*path, *wrong.key))
        given = wrong.given or ("none" if value is NOT_GIVEN else shown_value(value))
        remedy = f"; {wrong.remedy}" if wrong.remedy else ""
        self.refuse((*path, *wrong.key), f"expected {wrong.expected}, given {given}{remedy}")

    def expect(self, path: KeyPath, expected: str, remedy: str, *, given: str | None = None) -> None:
        """Add the problem of a value that does not fit the others."""
        self.refuse_value(path, WrongValue(expected, remedy, given=given))

    def check_options(self, path: KeyPath, options: Mapping[str, Any], take: Callable[..., object]) -> None:
        """Give options to what takes them; each option that it refuses is the problem of a key of the table ``path``.

        Its errors name the option: ``Embeddings(admit=): expected …, given …; …``. So a limit is written once. No error
        of an option that lacks another one counts if the table has a wrong value for that one.
        """
        left, wrong = dict(options), [name for name in self.names(path) if name not in options]
        while True:
            try:
                take(**left)
                return
            except StreamiterError as error:
                told = _OF_OPTION.fullmatch(str(error.args[0]))
                if told is None:
                    self.refuse(path, str(error.args[0]))
                    return
                option = told["option"]
                if option not in wrong and not any(f"{name}=" in told["expected"] for name in wrong):
                    expected, remedy = (_NAMED.sub(r"\1", told[part] or "") for part in ("expected", "remedy"))
                    self.expect((*path, option), expected, remedy or _remedy_of(take, option))
                if option not in left:
                    return
                wrong.append(option)
                del left[option]

    def check_needs(self, path: KeyPath, needs: Mapping[str, str], *, also: Sequence[str] = ()) -> None:
        """Refuse each key of a table that has no sense without another key; ``also`` are keys that it need not have."""
        names = [*self.names(path), *also]
        for name, needed in needs.items():
            if name in names and needed not in names:
                remedy, given = f"leave it out, or add {needed}", f"no {needed}"
                self.expect((*path, name), f"it with {needed} only", remedy, given=given)

    def error(self, path: KeyPath, message: str) -> SettingsError:
        """Return the error of one problem."""
        return SettingsError(self.source, [self.problem(path, message)])

    def warn(self, path: KeyPath, message: str) -> None:
        """Add a warning."""
        self.warnings.append(self.problem(path, message).shown(self.source))

    def table(self, path: KeyPath, keys: Mapping[str, Setting]) -> dict[str, Any]:
        """Return the settings of a table that are right; add a problem for each other key, and each missing one."""
        given = self.value(path)
        if given is NOT_GIVEN:
            given = {}
        if not isinstance(given, Mapping):
            self.refuse_value(path, WrongValue("a table", "write keys with their values in { }"))
            return {}
        settings: dict[str, Any] = {}
        for name, value in given.items():
            if name not in keys:
                self._refuse_key((*path, name), keys)
                continue
            try:
                settings[keys[name].name or name] = keys[name].parse(value)
            except WrongValue as wrong:
                self.refuse_value((*path, name), wrong)
        for name, key in keys.items():
            if key.is_required and name not in given and self._is_whole:
                self.refuse((*path, name), "expected this key, given none; add it")
        return settings

    def _refuse_key(self, path: KeyPath, keys: Mapping[str, Setting]) -> None:
        name = path[-1]
        if self._is_lenient:
            meant = did_you_mean(name, keys, likeness=_LIKE_A_TYPING_ERROR)
            self.warn(path, f"unknown, and left out{meant}")
        elif sources := [f"{name}{end}" for end in ("_env", "_file") if f"{name}{end}" in keys]:
            self.refuse(path, f"expected a secret outside of the file, given one in it; write {' or '.join(sources)}")
        else:
            meant = did_you_mean(name, keys) or f"; the keys are {', '.join(keys)}"
            self.refuse(path, f"expected a key that is known, given {name!r}{meant}")

    def is_wrong(self, path: KeyPath) -> bool:
        """Whether there is a problem of this value, or of a value in it."""
        return any(f"{problem.key}.".startswith(f"{_joined(path)}.") for problem in self._problems)

    def check(self) -> None:
        """Raise ``SettingsError`` if there are problems."""
        if self._problems:
            raise SettingsError(self.source, sorted(self._problems, key=lambda problem: problem.line or 0))


_OF_OPTION: Final = re.compile(
    r"(?:[^(:]*\()?(?P<option>\w+)(?:=\))?: expected (?P<expected>.*?)(?:, given .*?(?:; (?P<remedy>.*))?)?", re.DOTALL
)
_NAMED: Final = re.compile(r"\b(\w+)=(?![\w\"'])")


def _remedy_of(take: Callable[..., object], option: str) -> str:
    default = signature(take).parameters[option].default
    is_known = default not in (None, Parameter.empty, ())
    shown = f" for the default {shown_value(default).removeprefix('the array ')}" if is_known else ""
    return f"leave it out{shown}, or write another one"


NOT_GIVEN: Final = object()
"""The value of a key that is not there."""

# Many keys begin alike (decayalpha, decaybeta); only a key that is more similar is a likely typing error.
_LIKE_A_TYPING_ERROR: Final = 0.75


def _joined(path: KeyPath) -> str:
    return ".".join(path).replace(".[", "[")


# ---- values

_SHOWN_CHARACTERS: Final = 60


def shown_value(value: object) -> str:
    """Return a value as TOML and JSON spell it, for messages.

    >>> shown_value("1s"), shown_value(True), shown_value({"a": 1}), shown_value([1]), shown_value(None)
    ('"1s"', 'true', 'a table', 'the array [1]', 'null')
    """
    if isinstance(value, Mapping):
        return "a table"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]}…"
    return f"the array {shown}" if isinstance(value, (list, tuple)) else shown


def any_of(value: Any) -> Any:
    """Return any value as it is; it is checked elsewhere."""
    return value


def text_of(value: Any) -> str:
    """Parse a text that is not empty."""
    if isinstance(value, str) and value.strip():
        return value
    raise WrongValue("a text that is not empty", "write it in quotes")


def pattern_of(pattern: str, expected: str, remedy: str, *, given: str | None = None) -> Parser:
    """Return the parser of a text that has this pattern."""
    compiled = re.compile(pattern)

    def parse(value: Any) -> str:
        if isinstance(value, str) and compiled.fullmatch(value):
            return value
        raise WrongValue(expected, remedy, given=given)

    return parse


def flag_of(value: Any) -> bool:
    """Parse true or false."""
    if isinstance(value, bool):
        return value
    raise WrongValue("true or false", "write it without quotes")


def choice_of(*choices: str, any_case: bool = False, noun: str = "") -> Parser:
    """Return the parser of one of these texts; with ``any_case`` in any case. ``noun`` names them if they are many."""
    known = {choice.lower() if any_case else choice: choice for choice in choices}

    def parse(value: Any) -> str:
        if isinstance(value, str) and (found := known.get(value.lower() if any_case else value)) is not None:
            return found
        *first, last = [f'"{choice}"' for choice in choices]
        listed = f"{', '.join(first)} or {last}" if first else last
        likeness = _LIKE_A_TYPING_ERROR if noun else 0.6  # Without a noun all of them are in the message already.
        meant = did_you_mean(value, choices, likeness=likeness).removeprefix("; ") if isinstance(value, str) else ""
        raise WrongValue(noun or listed, meant or (f"there are {listed}" if noun else "choose one of them"))

    return parse


def whole_of(least: int, most: int | None = None, *, off: int | None = None) -> Parser:
    """Return the parser of a whole number within these bounds, or of ``off``, the number for no value."""

    def parse(value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and (least <= value <= (most or value)):
            return value
        if off is not None and value == off and isinstance(value, int):
            return off
        expected = f"a whole number of at least {least}" if most is None else f"a number from {least} to {most}"
        expected += "" if off is None else f", or {off}"
        choose = f"write {least} or more" if most is None else f"write {least}, {most}, or a number between them"
        raise WrongValue(expected, "write it without quotes" if isinstance(value, str) else choose)

    return parse


def number_of(expected: str, is_allowed: Callable[[float], bool]) -> Parser:
    """Return the parser of a finite number that ``is_allowed``; ``expected`` describes such numbers."""

    def parse(value: Any) -> float:
        number = plain_float(value) if type(value) in (int, float) else math.nan
        if math.isfinite(number) and is_allowed(number):
            return number
        remedy = "write it without quotes" if isinstance(value, str) else ""  # A number says by itself what is wrong.
        raise WrongValue(expected, remedy)

    return parse


FRACTION: Final = number_of("a number from 0 to below 1", lambda number: 0.0 <= number < 1.0)
POSITIVE: Final = number_of("a number above 0", lambda number: number > 0.0)
NOT_NEGATIVE: Final = number_of("a number of 0 or more", lambda number: number >= 0.0)


def items_of(parse: Parser, noun: str) -> Parser:
    """Return the parser of an array with at least one item; ``noun`` says what the items are."""

    def parse_all(value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)) or not value:
            raise WrongValue(f"an array of {noun}", "write one or more between [ and ]")
        parsed = []
        for number, item in enumerate(value):
            try:
                parsed.append(parse(item))
            except WrongValue as wrong:
                raise WrongValue(wrong.expected, wrong.remedy, key=(f"[{number}]", *wrong.key)) from None
        return parsed

    return parse_all


_WITH_UNIT: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z]+)", re.ASCII)
_WITHOUT_UNIT: Final = re.compile(r"(?=.*[1-9])\d{1,15}(\.\d{1,9})?", re.ASCII)
# A larger number without a unit is one of bytes, or of milliseconds.
_MANY: Final = 10_000
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
        remedy = f'write "{bare}{usual if float(bare) < _MANY else next(iter(units))}"'
    raise WrongValue(expected, remedy)


_PARSERS: Final[Mapping[type, Parser]] = {bool: flag_of, str: text_of, int: whole_of(1), float: duration_of}
