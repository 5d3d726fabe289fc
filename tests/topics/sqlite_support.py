"""Topics in an SQLite file of a test, and what any SQLite tool sees in the file."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from streamiter.topics import Topic, topic


def sqlite_topic(folder: Path, name: str = "clicks", **options: object) -> Topic:
    return topic(f"sqlite:///{folder}/topics.db?topic={name}", **options)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the file as any SQLite tool does."""
    connection = sqlite3.connect(folder / "topics.db", isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


def stored_blocks(folder: Path) -> tuple[int, int]:
    """Return the number of blocks, and how many of them are staged."""
    with opened(folder) as connection:
        [blocks] = connection.execute("SELECT count(*) FROM blocks").fetchone()
        [staged] = connection.execute("SELECT count(*) FROM staged").fetchone()
        return blocks, staged


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
