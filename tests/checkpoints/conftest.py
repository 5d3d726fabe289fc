"""Fixtures of stores in a directory."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from checkpoints.store_contract import MakeStore

from streamiter.engine.storage.store import CheckpointStore, store_at


@pytest.fixture
async def make_store(tmp_path: Path) -> AsyncIterator[MakeStore]:
    """Return a maker of stores in one directory, which is created by the first store that claims a flow."""
    stores: list[CheckpointStore] = []

    def make() -> CheckpointStore:
        stores.append(store_at(tmp_path / "made" / "here"))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()
        await store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder in which the stores of ``make_store`` keep the flow ``clicks``."""
    return tmp_path / "made" / "here" / "clicks"
