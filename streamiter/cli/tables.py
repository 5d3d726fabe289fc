"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

__all__ = ["print_fields", "print_table"]


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    title: str | None = None,
    caption: str | None = None,
) -> None:
    """A row below the other under ``headings``; the columns of ``numbers`` are aligned on the right."""
    # Slow to import, and most commands print no table.
    from rich.table import Table

    table = Table(
        title=title,
        caption=caption,
        box=None,
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in numbers else "left")
    for row in rows:
        table.add_row(*row)
    _print(table)


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """A name and what it is, below each other."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in fields:
        table.add_row(name, value)
    _print(table)


def _print(table: object) -> None:
    """Names are printed as they are, whatever is in them."""
    from rich.console import Console

    Console(markup=False, emoji=False, highlight=False).print(table)
