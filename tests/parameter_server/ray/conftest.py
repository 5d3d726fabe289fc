"""A Ray cluster of the tests' own: one for each test process, from the first test that needs it to the last."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.programs import missing

from streamiter.clock import SystemClock
from streamiter.parameter_server.ray.host import RayAddress

# Enough for the objects of the tests, and small enough for two test processes at the same time.
_OBJECT_STORE_BYTES = 256 << 20

# A shard restarts in a second, on a busy machine in half a minute; some tests wait for several restarts.
_TIME_LIMIT_S = 400

TESTS = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests on Ray a longer time limit, as starting processes and calling them is slow on a busy machine."""
    for item in items:
        if {"ray_cluster", "shared_address"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.timeout(_TIME_LIMIT_S))


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    """Start Ray without a dashboard and without fixed ports, in a folder whose path is short enough for its sockets.

    Ray ends with the tests of this folder, because it takes a thirtieth of a core even without any work.
    """
    if importlib.util.find_spec("ray") is None:
        missing("the package ray is not installed: pip install 'streamiter[ray]'")
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Otherwise Ray writes a token into the home folder.
        environment.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        # Ray imports the actors of tests by name.
        environment.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        import ray

        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(folder),
        )
        try:
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="package")
def shared_address(ray_cluster: None) -> Iterator[RayAddress]:
    """Yield the address of two shards for all tests that end no shard; each test makes its own matrices."""
    from streamiter.parameter_server.ray.hosting import RayHosting

    hosting = RayHosting(2, name="shared shards", clock=SystemClock())
    yield hosting.address
    asyncio.run(hosting.close())
