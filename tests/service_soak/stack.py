"""The stack of the soak test: a broker, a producer, the service, a consumer and an HTTP client, each a real process.

A process that ends is started again as docker compose does with ``restart: unless-stopped``: after 0.1 s, and after
twice as long each time up to a minute, unless the process has run for 10 s.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from service_soak.events import FEATURES, MODEL
from support.kafka_server import KafkaServer, free_ports
from support.processes import async_process

from streamiter import topic

__all__ = ["ChildProcess", "ProcessLife", "Resources", "ServiceStack", "running_stack"]

_HERE: Final = Path(__file__).parent
_ROOT: Final = _HERE.parents[1]
_FIRST_WAIT_S: Final = 0.1
_WAIT_S_MAX: Final = 60.0
_STEADY_S: Final = 10.0
# A process of the stack is stopped by the stack; this is for a stack that hangs.
_LIMIT_S: Final = 12 * 3600.0
_END_S: Final = 60.0

_SETTINGS: Final = """\
[service]
name = "{model}"
[input]
topic = "{events}"
dead_letter = "{dead_letters}"
[learn]
kind = "classification"
label = {{ field = "late" }}
[learn.features]
number = "ignore"
{features}
[publish]
topic = "{updates}"
every = "{every}"
[checkpoints]
store = "{folder}/checkpoints"
interval = "1s"
[http]
address = "{address}"
"""


@dataclass(frozen=True)
class Resources:
    """The resources of a process at a time."""

    at_s: float
    """Seconds since 1970."""
    rss_bytes: int
    files: int
    """The number of open file descriptors."""
    threads: int


@dataclass
class ProcessLife:
    """One run of a process; times are in seconds since 1970."""

    began_s: float
    pid: int
    killed_s: float | None = None
    """When the test killed it, taken just before the signal; None if the test did not."""
    ended_s: float | None = None
    code: int | None = None
    last_words: str = ""
    """The end of the log when it ended."""
    resources: list[Resources] = field(default_factory=list)


class ChildProcess:
    """A process that is started again whenever it ends, until it is stopped."""

    def __init__(self, name: str, arguments: list[str], folder: Path, *, is_forked: bool) -> None:
        self.name = name
        self.lives: list[ProcessLife] = []
        self.log_file = folder / f"{name}.log"
        self._command = [sys.executable, *arguments]
        self._is_forked = is_forked
        self._is_stopping = False

    @property
    def life(self) -> ProcessLife | None:
        """The life of the process that runs now; None while it is down."""
        return self.lives[-1] if self.lives and self.lives[-1].ended_s is None else None

    @property
    def surprising_ends(self) -> list[ProcessLife]:
        """The lives that ended although the test neither killed nor stopped the process."""
        return [life for life in self.lives if life.ended_s is not None and life.killed_s is None]

    async def run(self) -> None:
        """Run the process again and again until it is stopped."""
        wait_s = _FIRST_WAIT_S
        while not self._is_stopping:
            life = await self._live()
            assert life.ended_s is not None
            if not self._is_stopping:
                wait_s = _FIRST_WAIT_S if life.ended_s - life.began_s >= _STEADY_S else min(2 * wait_s, _WAIT_S_MAX)
                await asyncio.sleep(wait_s)

    async def _live(self) -> ProcessLife:
        environment = {**os.environ, "PYTHONPATH": str(_HERE.parent), "OPENBLAS_NUM_THREADS": "1"}
        with self.log_file.open("ab") as log:
            async with async_process(
                self._command,
                limit_s=_LIMIT_S,
                is_forked=self._is_forked,
                cwd=_ROOT,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            ) as process:
                life = ProcessLife(time.time(), process.pid)
                self.lives.append(life)
                life.code = await process.wait()
                life.ended_s = time.time()
        life.last_words = self.log_tail()
        return life

    def kill(self) -> bool:
        """Kill the process at once; return False if it is down."""
        if (life := self.life) is None:
            return False
        life.killed_s = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(life.pid, signal.SIGKILL)
        return True

    async def stop(self) -> int | None:
        """Stop the process for good with SIGTERM; return its exit code, or None if it does not end."""
        self._is_stopping = True
        if (life := self.life) is None:
            return 0
        life.killed_s = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(life.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                while life.ended_s is None:
                    await asyncio.sleep(0.01)
        return life.code

    def sample(self) -> None:
        """Note the resources of the process now."""
        if (life := self.life) is None:
            return
        place = Path(f"/proc/{life.pid}")
        with contextlib.suppress(OSError, KeyError):  # It has just ended.
            status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
            rss_bytes = int(status["VmRSS"].split()[0]) * 1024
            files = len(os.listdir(place / "fd"))
            life.resources.append(Resources(time.time(), rss_bytes, files, int(status["Threads"])))

    def log_tail(self, lines: int = 20) -> str:
        """Return the end of the output of all lives."""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])


class ServiceStack:
    """The running stack, and its topics."""

    def __init__(
        self, broker: KafkaServer, folder: Path, prefix: str, *, rate: int, asks_per_s: float, is_forked: bool
    ) -> None:
        self.broker = broker
        self.folder = folder
        self.broker_outages: list[tuple[float, float]] = []
        """When the broker was killed, and when it ran again."""
        names = ("events", "dead_letters", "updates")
        self.topics = {name: f"kafka://{broker.bootstrap}/{prefix}{name}" for name in names}
        self.address = f"127.0.0.1:{free_ports(1)[0]}"

        def child(name: str, *arguments: str) -> ChildProcess:
            return ChildProcess(name, list(arguments), folder, is_forked=is_forked)

        script = "service_soak.{}".format
        self.service = child("service", "-m", "streamiter", "serve", str(folder / "service.toml"))
        self.producer = child("producer", "-m", script("produce"), self.topics["events"], str(rate))
        self.consumer = child("consumer", "-m", script("consume"), self.topics["updates"], str(folder))
        self.client = child("client", "-m", script("ask"), f"http://{self.address}", str(folder), str(asks_per_s))
        self.children = (self.service, self.producer, self.consumer, self.client)

    async def prepare(self, publish_every: str) -> None:
        """Create the topics, and write the file of the service."""
        for url in self.topics.values():
            await topic(url).create()
        features = "\n".join(f'{name} = "{kind}"' for name, kind in FEATURES.items())
        values = {"model": MODEL, "features": features, "folder": self.folder, "address": self.address}
        text = _SETTINGS.format(**values, **self.topics, every=publish_every)
        (self.folder / "service.toml").write_text(text)

    async def kill(self, name: str, outage_s: float = 0.0) -> bool:
        """Kill a process, or kill or freeze the broker for this many seconds; return False if the process is down."""
        ends = {"broker": self.broker.kill, "frozen broker": self.broker.pause}
        if name not in ends:
            return next(child for child in self.children if child.name == name).kill()
        began_s = time.time()
        await asyncio.to_thread(ends[name])
        await asyncio.sleep(outage_s)
        await asyncio.to_thread(self.broker.start if name == "broker" else self.broker.resume)
        self.broker_outages.append((began_s, time.time()))
        return True

    def last_version(self) -> tuple[int, int, int]:
        """Return the generation, version and records of the newest version that the consumer has seen."""
        newest = (0, 0, 0)
        for file in self.folder.glob("versions-*.jsonl"):
            lines = [line for line in _tail(file).split(b"\n")[:-1] if line.startswith(b"[") and line.endswith(b"]")]
            if lines:
                newest = max(newest, msgspec.json.decode(lines[-1], type=tuple[int, int, int]))
        return newest


def _tail(file: Path) -> bytes:
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - 1024))
        return lines.read()


@contextlib.asynccontextmanager
async def running_stack(stack: ServiceStack, publish_every: str = "1s") -> AsyncIterator[ServiceStack]:
    """Run all processes; kill them at the end of the block. The broker must run."""
    await stack.prepare(publish_every)
    running = [asyncio.create_task(child.run(), name=child.name) for child in stack.children]
    sampling = asyncio.create_task(_sample(stack), name="samples")
    try:
        yield stack
    finally:
        for task in (*running, sampling):
            task.cancel()
        await asyncio.gather(*running, sampling, return_exceptions=True)


async def _sample(stack: ServiceStack) -> None:
    while True:
        for child in stack.children:
            child.sample()
        await asyncio.sleep(1.0)
