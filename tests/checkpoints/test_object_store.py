"""The store of checkpoints in an object store, with a real S3 server."""

from __future__ import annotations

import pytest
from checkpoints.store_contract import MakeStore, StoreContract, check_independence

from streamiter.checkpoints.store import store_at


class TestObjectStore(StoreContract):
    """The checks for every store."""

    @pytest.fixture
    def make_store(self, s3_url: str) -> MakeStore:
        return lambda: store_at(s3_url)

    async def test_flows_of_any_name_are_independent(self, make_store: MakeStore) -> None:
        """A server took the name of a flow for a path, or decoded it. (Fewer names, since each costs requests.)"""
        await check_independence(make_store(), "../clicks", ["..", "größe", "a b", "a/b", "漢字" * 61])
