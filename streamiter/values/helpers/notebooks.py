"""Tables of jobs and models: for notebooks, which show HTML, and for terminals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from typing import Any, Final

from streamiter.errors import shortened

# A model may be a dict of millions of numbers.
_FACTS_SHOWN: Final = 100


def html_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """Return a table as HTML, with a title and lines below; all texts are escaped.

    >>> print(html_table("a < b", ["step", "in"], [["map", "3"]]))
    <div class="streamiter"><b>a &lt; b</b><table><thead><tr><th>step</th><th>in</th></tr></thead>\
<tbody><tr><td>map</td><td>3</td></tr></tbody></table></div>
    """
    head = f"<thead>{_row('th', headings)}</thead>" if headings else ""
    body = "".join(_row("td", row) for row in rows)
    below = "".join(f"<div>{_text(note)}</div>" for note in notes)
    return f'<div class="streamiter"><b>{_text(title)}</b><table>{head}<tbody>{body}</tbody></table>{below}</div>'


def text_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the same table as text: the first column begins at the left, the others end at the right.

    >>> print(text_table(["step", "in"], [["map", "3"], ["filter", "12"]]))
    step   in
    map     3
    filter 12
    """
    if not headings:  # without_empty_columns leaves none of a table without rows.
        return ""
    lines = [headings, *rows]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        f"{line[0]:<{first}} "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(line[1:], others, strict=True)).rstrip()
        for line in lines
    )


def without_empty_columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return the table without the columns that are empty in each row.

    >>> without_empty_columns(["step", "in", "lag"], [["map", "3", ""]])
    (['step', 'in'], [['map', '3']])
    """
    shown = [place for place in range(len(headings)) if any(row[place] for row in rows)]
    return [headings[place] for place in shown], [[row[place] for place in shown] for row in rows]


def html_facts(title: str, facts: Mapping[str, Any]) -> str:
    """Return a table of names and values; None is left out. Of very many facts it has the first ones.

    >>> html_facts("model", {"version": 3, "age": None})
    '<div class="streamiter"><b>model</b><table><tbody><tr><td>version</td><td>3</td></tr></tbody></table></div>'
    """
    known = {name: fact for name, fact in facts.items() if fact is not None}
    rows = [(str(name), _shown(fact)) for name, fact in islice(known.items(), _FACTS_SHOWN)]
    return html_table(title, (), rows, [f"… {len(known):,} in all"] if len(known) > len(rows) else [])


def _shown(fact: Any) -> str:
    if isinstance(fact, str):
        return fact
    if isinstance(fact, int) and not isinstance(fact, bool):
        return f"{fact:,}"
    return f"{fact:.4g}" if isinstance(fact, float) else shortened(fact)


def _row(cell: str, texts: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{_text(text)}</{cell}>' for text in texts)}</tr>"


def _text(text: str) -> str:
    """Escape a text; characters that HTML does not allow are shown as a replacement."""
    return escape("".join(letter if letter.isprintable() or letter in "\t\n" else "\ufffd" for letter in text))
