"""A real S3 server (of moto) in a process of its own, which a test can stop, start and freeze."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.processes import process

__all__ = ["S3Server", "s3_server", "s3_url"]

REGION = "us-east-1"
# All tests of a process share one server.
_LIFE_S = 3600.0


class S3Server:
    """The process of the server, as a test sees it."""

    def __init__(self, started: subprocess.Popen[str]) -> None:
        self._process = started
        self.address = f"http://127.0.0.1:{self._answer()}"

    def bucket(self) -> str:
        """Create a bucket; return its name."""
        name = f"state-{uuid.uuid4().hex[:12]}"
        httpx.put(f"{self.address}/{name}").raise_for_status()
        return name

    def url(self, *, give_up_after_s: float = 20) -> str:
        """Return the URL of a place for checkpoints in a new bucket."""
        options = f"endpoint={self.address}&region={REGION}&give_up_after_s={give_up_after_s:g}"
        return f"s3://{self.bucket()}/of/tests?{options}"

    def stop(self) -> None:
        """Refuse connections from now on."""
        self._tell("stop")

    def start(self) -> None:
        """Accept connections again, with the same objects on the same port."""
        self._tell("start")

    def freeze(self) -> None:
        """Answer nothing from now on, as a network that loses all packets."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Answer again."""
        os.kill(self._process.pid, signal.SIGCONT)

    def _tell(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Return a running server, which all tests of a process share; each test has buckets with names of their own."""
    command = [sys.executable, Path(__file__).with_name("s3_process.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with process(command, limit_s=_LIFE_S, **pipes) as server:
        yield S3Server(server)
        server.kill()


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a place for checkpoints in a new bucket; the credentials are in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOFTESTS")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-the-secret")
    return s3_server.url()
