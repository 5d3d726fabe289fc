"""A real Ray cluster on this machine, whose processes tests may kill."""

import importlib.util
import logging
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from support.programs import missing
from support.waiting import PATIENCE_S

__all__ = ["children", "cluster", "raylet_of"]

TESTS: Final = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start a cluster of one node and connect to it; without a dashboard, without fixed ports, in a short path."""
    if importlib.util.find_spec("ray") is None:
        missing("the package ray is not installed: pip install 'streamiter[ray]'")
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_AUTH_TOKEN_PATH", str(token))  # Otherwise Ray writes a token into the home folder.
        environment.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        environment.setenv("RAY_TMPDIR", str(folder))
        import ray
        from ray._private import services
        from ray.cluster_utils import Cluster

        environment.setattr(services, "get_node", patient(services.get_node))
        small = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
        # Ray would note the loss of a node after 15 s. Here it never does: a flow notes its losses itself.
        never = {"health_check_failure_threshold": 10_000}
        nodes = Cluster(initialize_head=True, head_node_args={**small, "_system_config": never})
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function by which Ray looks for a node that starts, without its limit of 30 s for a busy machine."""

    def get(*given: Any, **options: Any) -> Any:
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return get_node(*given, **options)
            except RuntimeError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.1)  # Another process has no event to wait for.

    return get


def raylet_of(node: Any) -> int:
    """Return the process of Ray that has started all others of a node."""
    return int(node.all_processes["raylet"][0].process.pid)


def children(process_id: int) -> dict[int, str]:
    """Return the processes that a process has started, and what they call themselves."""
    command = ["ps", "-o", "pid=,args=", "--ppid", str(process_id)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    lines = [line.split(None, 1) for line in shown.stdout.splitlines()]
    return {int(number): name for number, name in lines}
