"""The cases of ``cases.txt``: what records, watermarks and the end cause, in a small language.

A line is ``number kind(arguments) option=value | actions``. ``a@5=7/1`` is a record of key a with time 5, value 7 and
partition 1 (1 and 0 by default), ``L.`` and the like its side. ``a@1!20+10`` sets a timer for 20, each one 10 later.
``tick`` asks for early results; ``idle/1``, ``new/1`` and ``end/1`` change a partition; ``END`` ends all input. What an
action causes is behind it: ``>late`` or a result.

>>> case = parse("3 tumbling(10) bound=5 | a@5 L.b@3=x >a[0,10)=2 END")
>>> case.kind, case.arguments, case.options, case.actions[1]
('tumbling', ('10',), {'bound': '5'}, Action(name='record', expected=('a[0,10)=2',), record=...))
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec


class Record(msgspec.Struct, frozen=True):
    """A record of a case."""

    key: str
    time: int
    value: Any = 1
    partition: int = 0
    side: str = ""
    timer: tuple[int, int] | None = None


@dataclass(frozen=True)
class Action:
    """A record, or something that happens to a partition or to all, and what it causes."""

    name: str
    expected: tuple[str, ...]
    record: Record | None = None
    partition: int | None = None


@dataclass(frozen=True)
class Case:
    """One line."""

    number: int
    kind: str
    arguments: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict)
    actions: tuple[Action, ...] = ()

    @property
    def expected(self) -> list[str]:
        """All results, in order."""
        return [result for action in self.actions for result in action.expected]


_RECORD = re.compile(
    r"((?P<side>[LRST])\.)?(?P<key>\w+)@(?P<time>[-\d:TZ]+)(=(?P<value>\w+))?(/(?P<partition>\d+))?(!(?P<timer>[\d+]+))?"
)


def instant(text: str) -> int:
    """Return a number of milliseconds, or that of a date and time."""
    return int(datetime.fromisoformat(text).timestamp() * 1000) if "T" in text else int(text)


def _record(word: str) -> Record:
    match = _RECORD.fullmatch(word)
    assert match, word
    value = match["value"] or "1"
    at, _, later = (match["timer"] or "").partition("+")
    return Record(
        key=match["key"],
        time=instant(match["time"]),
        value=int(value) if value.isdigit() else value,
        partition=int(match["partition"] or 0),
        side=match["side"] or "",
        timer=(int(at), int(later or 0)) if at else None,
    )


def _result(word: str) -> str:
    """Return an expected result with its dates as milliseconds."""
    return re.sub(r"\d{4}-[-\d:T]+Z", lambda match: str(instant(match[0])), word)


def parse(line: str) -> Case:
    """Return the case of a line."""
    head, _, body = line.partition(" | ")
    number, kind, *options = head.split()
    name, _, arguments = kind.rstrip(")").partition("(")
    actions: list[Action] = []
    for word in body.split():
        if word.startswith(">"):
            last = actions.pop()
            actions.append(Action(last.name, (*last.expected, _result(word[1:])), last.record, last.partition))
        elif "@" in word:
            actions.append(Action("record", (), _record(word)))
        else:
            event, _, partition = word.partition("/")
            actions.append(Action(event, (), None, int(partition) if partition else None))
    settings = dict(option.partition("=")[::2] for option in options)
    return Case(int(number), name, tuple(filter(None, arguments.split(","))), settings, tuple(actions))


def read_cases() -> Iterator[Case]:
    """Return all cases."""
    return map(parse, (Path(__file__).parent / "cases.txt").read_text("utf-8").splitlines())
