"""A real schema registry for tests: Apicurio, with Confluent's interface; fetched by Maven, on loopback, in memory.

Use it in code::

    with running_registry() as registry:
        print(registry.url)
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from support.kafka_fixtures import skip_without_java
from support.kafka_server import QUICK_START, free_ports, guard
from support.maven import Artifact, cache_folder, fetched
from support.processes import process
from support.waiting import PATIENCE_S

__all__ = ["RegistryServer", "registry_files", "running_registry", "schema_registry"]

# The last version that runs on Java 17.
_VERSION = "2.6.13.Final"
# A start takes 4 s on two free cores.
_START_TIMEOUT_S = 80.0
_POLL_S = 0.1
# All tests of a process share one registry.
_LIFE_S = 3600.0


class RegistryServer:
    """A running registry, which tests can freeze."""

    def __init__(self, url: str, started: subprocess.Popen[str]) -> None:
        self.url = url
        self._started = started

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the registry for a block: it takes connections, and does not answer."""
        self._started.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._started.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        try:
            yield
        finally:
            self._started.send_signal(signal.SIGCONT)


def registry_files() -> Path:
    """Return the folder of the registry; download it if it is missing."""
    artifact = Artifact("io.apicurio", "apicurio-registry-app", _VERSION, archive="all")
    return fetched(cache_folder() / f"apicurio-{_VERSION}", [artifact])


@contextlib.contextmanager
def running_registry() -> Iterator[RegistryServer]:
    """Run a registry for a ``with`` block."""
    files = registry_files()
    [runner] = files.glob("*-runner.jar")
    [port] = free_ports(1)
    settings = {"quarkus.http.host": "127.0.0.1", "quarkus.http.port": str(port), "quarkus.log.level": "WARN"}
    options = [*QUICK_START, *(f"-D{name}={value}" for name, value in settings.items())]
    url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
    with tempfile.TemporaryFile("w+") as log:
        command = ["java", *options, "-jar", str(runner)]
        with process(command, limit_s=_LIFE_S, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as started:
            guardian = guard(started.pid)
            try:
                if not _answers(url, started):
                    log.seek(0)
                    raise RuntimeError(f"no registry at {url} after {_START_TIMEOUT_S:.0f} s; its log:\n{log.read()}")
                yield RegistryServer(url, started)
            finally:
                started.kill()
                guardian.communicate(b"stopped\n")


def _answers(url: str, started: subprocess.Popen[str]) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and started.poll() is None:
        with contextlib.suppress(OSError), urlopen(f"{url}/subjects", timeout=PATIENCE_S):
            return True
        time.sleep(_POLL_S)
    return False


@pytest.fixture(scope="session")
def schema_registry() -> Iterator[RegistryServer]:
    """Return the registry that all tests share; each test uses subjects with its own names."""
    skip_without_java()
    with running_registry() as server:
        yield server
