"""The programs of the stack as processes: the commands, environment and files of ``docker-compose.yml``.

Only addresses, folders and the names of topics are replaced, so that tests do not disturb each other.
"""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import httpx
import pytest
from stack.stack_files import EXAMPLE, ROOT, SERVICES, environment_of
from support.kafka_server import KafkaServer, free_ports
from support.processes import async_process
from support.waiting import PATIENCE_S

from streamiter.models import ModelUpdate, model_updates
from streamiter.topics import Topic, topic

__all__ = ["ComposeBroker", "Program", "Stack"]

# Each check is a process of its own, which takes time from the program that starts.
_LOOK_AGAIN_S = 0.2


# Only this process and its children see the mounts. The folder of the test has the volumes.
_CONFINED = (
    "mount --make-rprivate / && mount --bind /tmp /tmp && mount --bind $1 $1 && mount -o remount,bind,ro / && "
    'shift && ! touch /written 2> /dev/null && exec "$@"'
)


class Program:
    """One service of the file as a process; its output is read line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.printed: list[str] = []

    async def says(self, pattern: str) -> re.Match[str]:
        """Return the match of the next line that matches; without one, fail with the whole output."""
        assert self._process.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while line := await self._process.stdout.readline():
                    self.printed.append(line.decode())
                    if match := re.search(pattern, line.decode()):
                        return match
        pytest.fail(f"expected a line {pattern!r}, given:\n{''.join(self.printed)}")

    async def ends(self) -> int:
        """Wait until the process ends, and return its exit code."""
        rest, _ = await asyncio.wait_for(self._process.communicate(), PATIENCE_S)
        self.printed.append(rest.decode())
        return cast("int", self._process.returncode)

    async def terminated(self) -> int:
        """Send SIGTERM, as ``docker compose stop`` does, and return the exit code."""
        self._process.terminate()
        return await self.ends()


class Stack:
    """The programs of the file at one broker, with topics, folders and ports of their own."""

    def __init__(self, bootstrap: str, prefix: str, folder: Path, flights: str) -> None:
        """``flights`` is a folder with a package of flights, which the producer reads."""
        self._bootstrap = bootstrap
        self._flights = flights
        self._prefix = prefix
        self.model = f"{prefix}late-flights"
        self._names = {
            "MODEL": self.model,
            "EVENTS_TOPIC": f"{prefix}flights",
            "UPDATES_TOPIC": f"{prefix}model-updates",
            "DEAD_LETTERS_TOPIC": f"{prefix}flights-dead-letters",
        }
        self.http, self.prometheus = (f"127.0.0.1:{port}" for port in free_ports(2))
        self._places = {
            "kafka:9092": bootstrap,
            "0.0.0.0:8080": self.http,
            "127.0.0.1:8080": self.http,
            "service:8080": self.http,
            "127.0.0.1:9090": self.prometheus,
            "/run/streamiter": str(folder / "token"),
            "/var/lib/streamiter": str(folder / "state"),
            "/etc/prometheus": str(folder / "prometheus"),
            "=/prometheus": f"={folder / 'prometheus-data'}",
            "examples/online_service/service.toml": str(folder / "service.toml"),
        }
        self._folder = folder
        self._processes = contextlib.AsyncExitStack()
        self._write_files()

    def _write_files(self) -> None:
        """Write what containers mount or contain, with other places."""
        for name in ("token", "state", "prometheus-data"):
            (self._folder / name).mkdir()
        settings = re.sub(r"(kafka://[^/]*/)", rf"\1{self._prefix}", (EXAMPLE / "service.toml").read_text())
        settings = settings.replace('name = "late-flights"', f'name = "{self.model}"')
        # A service that is started after a kill waits for this time.
        settings = settings.replace('standby = "5s"', 'standby = "2s"')
        (self._folder / "service.toml").write_text(self.placed(settings))
        shutil.copytree(EXAMPLE / "prometheus", self._folder / "prometheus")
        configuration = self._folder / "prometheus" / "prometheus.yaml"
        # A test waits for a scrape and for the rules: not 5 s for each.
        quick = configuration.read_text().replace("interval: 5s", "interval: 1s").replace("timeout: 4s", "timeout: 1s")
        configuration.write_text(self.placed(quick))

    def placed(self, text: str) -> str:
        """Replace addresses and folders."""
        for place, here in self._places.items():
            text = text.replace(place, here)
        return text

    def topic(self, variable: str) -> Topic:
        """Return the topic that an environment variable names."""
        return topic(f"kafka://{self._bootstrap}/{self._names[variable]}")

    @property
    def token(self) -> str:
        """The token that ``prepare`` has written."""
        return (self._folder / "token" / "token").read_text()

    def client(self) -> httpx.AsyncClient:
        """Return a client of the service."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.AsyncClient(base_url=f"http://{self.http}", headers=headers, timeout=PATIENCE_S)

    async def start(
        self, service: str, *, is_sigint_ignored: bool = False, is_confined: bool = False, **environment: str
    ) -> Program:
        """Start a service of the file; ``environment`` replaces variables that the programs document.

        With ``is_confined``, the program can write to the volumes and to ``/tmp`` only, as in a container that is
        read-only.
        """
        command = [self.placed(word) for word in SERVICES[service]["command"]]
        given = {name: self.placed(value) for name, value in environment_of(service).items()}
        is_python = command[0] in ("python", "streamiter")
        if command[0] == "python":
            command = [sys.executable, *command[1:]]
        elif command[0] == "streamiter":
            command = [sys.executable, "-m", *command]
        else:  # Options alone are those of the program of the image.
            command = [service, f"--web.listen-address={self.prometheus}", *command]
        if is_confined:
            command = ["unshare", "--mount", "sh", "-c", _CONFINED, "sh", str(self._folder), *command]
        started = async_process(
            command,
            is_sigint_ignored=is_sigint_ignored,
            is_forked=is_python and not is_confined,
            limit_s=2 * PATIENCE_S,
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": self._flights, **given, **self._names, **environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        return Program(await self._processes.enter_async_context(started))

    async def becomes_healthy(self, service: str) -> None:
        """Wait until the health check of the file succeeds."""
        _, program, *arguments = [self.placed(word) for word in SERVICES[service]["healthcheck"]["test"]]
        command = [sys.executable if program == "python" else program, *arguments]
        async with asyncio.timeout(PATIENCE_S):
            while await self._exit_code(command):
                await asyncio.sleep(_LOOK_AGAIN_S)

    async def _exit_code(self, command: list[str]) -> int:
        quiet = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
        async with async_process(command, limit_s=PATIENCE_S, **quiet) as checking:
            return await checking.wait()

    async def updates(self) -> list[ModelUpdate]:
        """Return all updates published so far."""
        return [update async for update in model_updates(self.topic("UPDATES_TOPIC"), self.model, follow=False)]

    async def stop(self) -> None:
        """Stop all processes that are still running."""
        await self._processes.aclose()


class ComposeBroker(KafkaServer):
    """A broker that is configured only by the file's KAFKA_* variables, on free ports of the loopback address."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.inside, self.outside, self._controller = (f"127.0.0.1:{port}" for port in free_ports(3))

    @property
    def bootstrap(self) -> str:
        """The listener for other containers."""
        return self.inside

    def _formatted(self) -> None:
        """The tool reads the configuration of the file, as it does in the image."""

    def _write_files(self) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        super()._write_files()  # writes the configuration of the logging
        folders = {name: self.directory / name for name in ("default", "mounted", "final")}
        for folder in folders.values():
            folder.mkdir(exist_ok=True)
        command = [*self._java(), "kafka.docker.KafkaDockerWrapper", "setup"]
        for name, folder in folders.items():
            command += [f"--{name}-configs-dir", str(folder)]
        environment = {"PATH": os.environ["PATH"], **self._environment()}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        properties = self.directory / "server.properties"
        return Path(shutil.copy(folders["final"] / "server.properties", properties))

    def _environment(self) -> dict[str, str]:
        places = {
            "INTERNAL://:9092": f"INTERNAL://{self.inside}",
            "EXTERNAL://:29092": f"EXTERNAL://{self.outside}",
            "CONTROLLER://:9093": f"CONTROLLER://{self._controller}",
            "INTERNAL://kafka:9092": f"INTERNAL://{self.inside}",
            "EXTERNAL://127.0.0.1:9092": f"EXTERNAL://{self.outside}",
            "1@localhost:9093": f"1@{self._controller}",
            "/var/lib/kafka/data": str(self.directory / "data"),
        }
        environment = environment_of("kafka")
        text = "\n".join(environment.values())
        assert all(place in text for place in places)
        return {name: _replaced(value, places) for name, value in environment.items()}


def _replaced(text: str, replacements: Mapping[str, str]) -> str:
    return ",".join(replacements.get(part, part) for part in text.split(","))
