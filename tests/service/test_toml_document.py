"""Each key of a TOML document has its line; values have units, and messages say what is good."""

import tomllib
from random import Random
from typing import Any

import pytest
from support.examples import random_examples

from streamiter.service.settings.toml_document import lines_of_keys, toml_document
from streamiter.values.settings import (
    KeyPath,
    SettingsError,
    WrongValue,
    choice_of,
    duration_of,
    shown_value,
    size_of,
    whole_of,
)

SCALARS = [
    "1", "-1.5e3", "0x1F", "true", "1979-05-27T07:32:00Z", "1979-05-27 07:32:00", "inf",
    '""', '"a # b"', r'"\" ] } = \\"', "'c:\\'",
    '"""two\nlines"""', "'''two\n'' lines'''", '"""a "" b"""""', r'"""x \""" y"""', "''", "''''quoted''''", "07:32:00",
]  # fmt: skip
NAMES = ["a", "b-c", "1", '"a b"', "'x.y'", '"ö\\n"', '"]"', "true"]
BLANKS = ["", " ", "\t ", "  "]


class Writer:
    """Writes a random document, and notes the line of the statement of each key."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.text = ""
        self.expected: dict[KeyPath, int] = {}
        self.line_of_statement = 0

    def begin(self) -> None:
        self.line_of_statement = self.text.count("\n") + 1

    def blank(self) -> None:
        self.text += self.random.choice(BLANKS)

    def name(self, taken: set[str]) -> str | None:
        left = [name for name in NAMES if self.plain(name) not in taken]
        return self.random.choice(left) if left else None

    @staticmethod
    def plain(name: str) -> str:
        [plain] = tomllib.loads(f"{name} = 1")
        return plain

    def document(self) -> None:
        taken: set[str] = set()
        for _ in range(self.random.randint(0, 3)):
            self.line(())
            self.begin()
            self.pair((), taken)
            self.text += "\n"
        for _ in range(self.random.randint(0, 3)):
            self.line(())
            if (name := self.name(taken)) is None:
                return
            taken.add(self.plain(name))
            path = (self.plain(name),)
            self.begin()
            self.text += "["
            self.blank()
            self.text += name
            self.blank()
            self.text += self.random.choice(["]\n", "] # [x]\n"])
            self.expected[path] = self.line_of_statement
            within: set[str] = set()
            for _ in range(self.random.randint(0, 3)):
                self.line(path)
                self.begin()
                self.pair(path, within)
                self.text += self.random.choice(["\n", ' # y = "\n'])

    def line(self, path: KeyPath) -> None:
        del path
        self.text += self.random.choice(["", "\n", "# x = 1\n", " \t\n"])
        self.blank()

    def pair(self, path: KeyPath | None, taken: set[str]) -> None:
        """Write a key and its value; without a path they are in an array, and have no line."""
        if (name := self.name(taken)) is None:
            self.text += "# none left"
            return
        taken.add(self.plain(name))
        self.text += name
        names = [self.plain(name)]
        while self.random.random() < 0.2:
            self.blank()
            self.text += "."
            self.blank()
            more = self.random.choice(NAMES)
            self.text += more
            names.append(self.plain(more))
        self.blank()
        self.text += "="
        self.blank()
        if path is not None:
            for end in range(1, len(names) + 1):
                self.expected[*path, *names[:end]] = self.line_of_statement
        self.value(None if path is None else (*path, *names), 0)

    def value(self, path: KeyPath | None, depth: int) -> None:
        choice = self.random.random()
        if choice < 0.15 and depth < 3:
            self.text += "["
            for _ in range(self.random.randint(0, 3)):
                self.text += self.random.choice(["", " ", "\n ", " # ],[\n"])
                self.value(None, depth + 1)
                self.text += self.random.choice([",", " ,", "\n,"])
            self.text += self.random.choice(["]", "\n]"])
        elif choice < 0.3 and depth < 3:
            self.text += "{"
            taken: set[str] = set()
            for number in range(self.random.randint(0, 3)):
                self.text += " ," if number else ""
                self.blank()
                self.pair(path, taken)
            self.blank()
            self.text += "}"
        else:
            self.text += self.random.choice(SCALARS)


def written(random: Random) -> Writer:
    writer = Writer(random)
    writer.document()
    return writer


@random_examples(written)
def test_each_key_has_the_line_where_it_is_written(writer: Writer) -> None:
    """An error was told at the line of another key, because a comment or a text looked like a key."""
    tomllib.loads(writer.text)  # The test itself writes TOML.
    assert lines_of_keys(writer.text.split("\n")) == writer.expected


# ---- values


@pytest.mark.parametrize(
    ("given", "seconds"), [("1s", 1.0), ("250 ms", 0.25), ("1.5h", 5400.0), ("5min", 300.0), ("7d", 604_800.0)]
)
def test_times_have_units(given: str, seconds: float) -> None:
    """A time of 5 was 5 minutes for its author, and 5 seconds for the program."""
    assert duration_of(given) == seconds


@pytest.mark.parametrize(
    "given", [5, 1.5, True, "5", "s", "1 m", "-1s", "0s", "1s ", "１s", "1e3s", "9" * 16 + "d", None, []]
)
def test_times_without_a_unit_are_refused(given: Any) -> None:
    """A time without a unit, or of 0, was accepted."""
    with pytest.raises(WrongValue, match='above 0 with its unit, as "500ms"'):
        duration_of(given)


def test_a_refused_time_says_what_to_write() -> None:
    """A time of 0 was told to add its unit, which it had."""
    remedies = {}
    for given in (5, "5", 1.5, "0s", "5 sec", -1, "soon", 10**400):
        with pytest.raises(WrongValue) as refused:
            duration_of(given)
        remedies[given] = refused.value.remedy
    positive = 'write a number above 0 with its unit, as "1s"'
    expected = ['write "5s"', 'write "5s"', 'write "1.5s"', positive, "the units are ms, s, min, h, d", *[positive] * 3]
    assert list(remedies.values()) == expected


def test_sizes_have_units() -> None:
    """1 MB was a binary megabyte for one half of the users."""
    assert [size_of(given) for given in ("1 MiB", "1MB", "1.5 kB", "7 B")] == [1 << 20, 1_000_000, 1_500, 7]
    for given in ("1 mb", 1024, "0 B"):
        with pytest.raises(WrongValue, match="a size above 0"):
            size_of(given)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a", '"a"'),
        (True, "true"),
        (1.5, "1.5"),
        ({"a": 1}, "a table"),
        (None, "null"),
        ([1], "the array [1]"),
        ("x" * 80, '"' + "x" * 59 + "…"),
    ],
)
def test_values_are_shown_as_the_file_spells_them(value: Any, shown: str) -> None:
    """A message showed True, which is no TOML."""
    assert shown_value(value) == shown


def test_choices_and_whole_numbers_say_what_is_good() -> None:
    """True was accepted as the number 1."""
    with pytest.raises(WrongValue, match=r'^"a", "b" or "c"$'):
        choice_of("a", "b", "c")("d")
    for given in (True, 0, 4, 2.0, "2"):
        with pytest.raises(WrongValue, match=r"^a number from 1 to 3$"):
            whole_of(1, 3)(given)


def test_lines_that_are_no_toml_are_left_out_and_the_others_are_checked() -> None:
    """One missing quote hid all other errors of the file."""
    document = toml_document("f", 'a = 1s\n[b]\nc = "x"\nd = {\n[e]\nf = ]\n')
    assert document.names(()) == ["b", "e"]
    with pytest.raises(SettingsError) as caught:
        document.check()
    assert [problem.line for problem in caught.value.problems] == [1, 4, 6]
