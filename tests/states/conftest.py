"""A database for the tests of its rows."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamiter.engine.states.database import Database, DatabaseHome


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    home = DatabaseHome(tmp_path / "state", 16 << 20, flow="tests")
    made = Database(home, 0, owner="step 'join'")
    yield made
    with contextlib.suppress(Exception):
        made.close()
    home.close()
