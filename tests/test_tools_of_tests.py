"""The tools of the tests: processes, the check of circles, `make mutate`, random examples, a shared broker."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from support import examples
from support.circles import circle_in, imports_of
from support.examples import EXAMPLES, random_examples
from support.fork_server import Forked, fork_server
from support.kafka_fixtures import GivenKafka, broker_of_workers
from support.mutation import LIST, ROOT, Mutant, report
from support.processes import async_process, forked_run, process
from support.waiting import PATIENCE_S


@pytest.mark.parametrize(
    "lower",
    [
        "def late():\n    from rooms_of_a_house import attic\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rooms_of_a_house.attic import Roof\n",
        "from rooms_of_a_house import Roof\n",
    ],
    ids=["late", "for types", "by way of the face of the package"],
)
def test_a_circle_is_found_although_python_can_import_it(
    lower: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven circles of modules were hidden in late imports and in imports for types."""
    house = tmp_path / "rooms_of_a_house"
    house.mkdir()
    (house / "__init__.py").write_text("from rooms_of_a_house.attic import Roof as Roof\n")
    (house / "attic.py").write_text("from rooms_of_a_house import cellar\n\nclass Roof: ...\n")
    (house / "cellar.py").write_text(lower)
    monkeypatch.syspath_prepend(tmp_path)
    assert {"rooms_of_a_house.attic", "rooms_of_a_house.cellar"} <= set(circle_in(imports_of("rooms_of_a_house")))


SPLIT = Mutant("streamiter.values.records.take", "return a", "return b")
JOIN = Mutant("streamiter.values.records.join", "x = 1", "x = 2")


def test_a_survivor_that_is_not_explained_fails_the_command() -> None:
    """The command always succeeded, so the list of changes that no test notices only grew."""
    lines, is_good = report([SPLIT, JOIN], {JOIN: "the same for all callers"})
    assert not is_good
    assert lines == [
        "\nstreamiter.values.records.join\n    - x = 1\n    + x = 2\n    = the same for all callers",
        "\nNOT NOTICED: write a test, or list it in mutants.toml with the reason:\n"
        "streamiter.values.records.take\n    - return a\n    + return b",
        "\n2 survivors: 1 not explained; 0 listed ones are gone",
    ]


def test_an_explanation_of_a_noticed_change_is_reported_and_fails_nothing() -> None:
    """A line was changed, and the explanation of its old change stayed in the list."""
    lines, is_good = report([], {JOIN: "the same for all callers"})
    assert is_good
    assert lines[0].startswith("\nlisted in mutants.toml, but noticed or no longer made; take it out:\n")
    assert lines[-1].endswith("0 survivors: 0 not explained; 1 listed ones are gone")


def test_the_list_names_existing_modules_and_tests() -> None:
    """A module was moved, and was not mutated any more, without an error."""
    listed = tomllib.loads(LIST.read_text())
    modules = [core["module"] for core in listed["core"]]
    tests = {test.split("::")[0] for core in listed["core"] for test in core["tests"]}
    assert [module for module in modules if not (ROOT / module).is_file()] == []
    assert [test for test in sorted(tests) if not (ROOT / "tests" / test).exists()] == []
    named = [(core["module"], name) for core in listed["core"] for name in core.get("names", ["*"])]
    assert len(set(named)) == len(named)
    assert [
        (module, name)
        for module, name in named
        if name != "*" and not re.search(rf"^(async def|def|class) {name}\b", (ROOT / module).read_text(), re.M)
    ] == []
    cores = tuple(module.removesuffix(".py").replace("/", ".") + "." for module in modules)
    assert [each["where"] for each in listed["survivor"] if not each["where"].startswith(cores)] == []
    assert all(each["why"] for each in listed["survivor"])


def _numbers(random: Random) -> list[int]:
    return [random.randrange(100) for _ in range(random.randrange(30))]


@random_examples(_numbers)
def _below_99(numbers: list[int]) -> None:
    assert 99 not in numbers


def _failure() -> list[str]:
    with pytest.raises(AssertionError) as raised:
        _below_99()
    return raised.value.__notes__


def test_a_fault_is_reported_with_its_seed_and_the_smallest_example() -> None:
    """A plan of sixty steps failed, and only two of them mattered."""
    [note] = _failure()
    assert note.endswith("smaller example: [99]")
    assert re.match(r"seed \d+; again: STREAMITER_EXAMPLES_SEED=\d+\n", note)


def test_the_reported_seed_gives_the_failing_example_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure could not be repeated, so it could not be corrected."""
    monkeypatch.setenv("STREAMITER_EXAMPLES_SEED", "11")
    [first] = _failure()
    seed = first.split("\n")[0].rpartition("=")[2]
    monkeypatch.setenv("STREAMITER_EXAMPLES_SEED", seed)
    [again] = _failure()
    assert again == first
    assert 99 in _numbers(Random(int(seed)))


def test_an_example_that_raises_nothing_where_it_must_is_reported_with_its_seed() -> None:
    """A test expected an error, one example in a thousand raised none, and the failure did not name the example."""

    @random_examples(_numbers)
    def check(numbers: list[int]) -> None:
        with pytest.raises(AssertionError):
            assert 99 in numbers

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE") as raised:
        check()
    [note] = raised.value.__notes__
    assert note.startswith("seed ")
    assert note.endswith("smaller example: [99]")


@pytest.mark.parametrize("most", [3, 5])
def test_all_examples_run_and_other_arguments_are_those_of_the_test(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decorator ran a test only once, or hid its parameters, and no test noticed it."""
    monkeypatch.setattr(examples, "_ENOUGH_S", math.inf)  # On a slow machine cheap examples take longer, too.
    seen = []

    @random_examples(lambda random: random.randrange(2**60))
    def check(example: int, given: int) -> None:
        seen.append((example, given))

    check(most)
    check(given=most)
    assert [given for _, given in seen] == [most] * 2 * EXAMPLES
    assert len(set(seen)) == 2 * EXAMPLES


TESTS = Path(__file__).parent

# A program that is slow like Maven, so that the other processes start while it works.
MAVEN = """\
#!/bin/sh
echo fetched >> "$FETCHES"
mkdir jars
sleep 0.3
echo jar > jars/kafka.jar
"""


def test_processes_that_start_at_once_download_kafka_once(tmp_path: Path) -> None:
    """Two processes of Maven filled the same repository, and one of them read a half-written file of the other."""
    maven = tmp_path / "bin" / "mvn"
    maven.parent.mkdir()
    maven.write_text(MAVEN)
    maven.chmod(0o755)
    fetches = tmp_path / "fetches"
    environment = os.environ | {
        "PATH": f"{maven.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "FETCHES": str(fetches),
        "PYTHONPATH": str(TESTS),
    }
    program = "from support.kafka_jars import kafka_jars; print([jar.name for jar in kafka_jars().iterdir()])"
    with contextlib.ExitStack() as processes:
        command = [sys.executable, "-c", program]
        started = [processes.enter_context(process(command, env=environment, stdout=subprocess.PIPE)) for _ in range(3)]
        assert [each.communicate()[0] for each in started] == ["['kafka.jar']\n"] * 3
    assert fetches.read_text() == "fetched\n"


class Listening(NamedTuple):
    bootstrap: str
    log_file: Path


class Brokers:
    """Sockets in the place of brokers, which are counted."""

    def __init__(self, log: Path) -> None:
        self.log, self.running, self.started = log, 0, 0

    @contextlib.contextmanager
    def start(self) -> Iterator[Any]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.started, self.running = self.started + 1, self.running + 1
            yield Listening(f"127.0.0.1:{listening.getsockname()[1]}", self.log)
            self.running -= 1


def test_the_broker_runs_until_its_last_user_has_ended(tmp_path: Path) -> None:
    """Each of three processes had its own broker: 30 s of processor time; one that ends early would fail the others."""
    brokers = Brokers(tmp_path / "log")
    (tmp_path / "log").write_text("the end")
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    found = first.enter_context(broker_of_workers(tmp_path, brokers.start))
    same = second.enter_context(broker_of_workers(tmp_path, brokers.start))
    assert isinstance(same, GivenKafka)
    assert (same.bootstrap, same.log_tail()) == (found.bootstrap, "the end")
    ending = threading.Thread(target=first.close)
    ending.start()
    with broker_of_workers(tmp_path, brokers.start) as third:
        second.close()
        assert (third.bootstrap, brokers.running) == (found.bootstrap, 1)
    ending.join(PATIENCE_S)
    assert (brokers.started, brokers.running) == (1, 0)
    with broker_of_workers(tmp_path, brokers.start):
        assert (brokers.started, brokers.running) == (2, 1)


def test_a_broker_whose_process_was_killed_is_replaced(tmp_path: Path) -> None:
    """After a crash of one process, the tests of all others would ask a port on which nothing listens."""
    brokers = Brokers(tmp_path / "log")
    with brokers.start() as gone:
        pass
    (tmp_path / "kafka-broker").write_text(f"{gone.bootstrap} {gone.log_file}")
    with broker_of_workers(tmp_path, brokers.start) as broker:
        assert brokers.running == 1
        assert not isinstance(broker, GivenKafka)


FOLDER = Path(__file__).parent
# These modules start processes, and also end them.
STARTERS = {"support/processes.py", "support/kafka_server.py", "support/fork_server.py"}
STARTING = {"Popen", "create_subprocess_exec", "create_subprocess_shell", "Process"}
# A shell that starts another process with the same pipes; neither of them ends.
SILENT = ["/bin/sh", "-c", "sleep 1000 & sleep 1000"]


def calls(text: str) -> Iterator[tuple[str, ast.Call]]:
    """Return all calls of functions of a module in the text of a file, such as ``subprocess.run``."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=function)):
                yield f"{module}.{function}", node


def test_processes_are_started_only_with_a_limit() -> None:
    """A program printed nothing, and a test that read a line from it held up the whole suite for ever."""
    without_limit = []
    words = [f"asyncio.{function}" for function in STARTING] + ["subprocess.", "multiprocessing."]
    for path in sorted(FOLDER.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for name, call in calls(text) if any(word in text for word in words) else ():
            module, _, function = name.rpartition(".")
            starts = module in ("subprocess", "asyncio", "multiprocessing") and function in STARTING
            runs = module == "subprocess" and function in ("run", "call", "check_call", "check_output")
            has_limit = any(keyword.arg == "timeout" for keyword in call.keywords)
            place = path.relative_to(FOLDER).as_posix()
            if (starts and place not in STARTERS) or (runs and not has_limit):
                without_limit.append(f"{place}:{call.lineno} {name}")
    assert without_limit == []


def test_a_read_from_a_process_that_prints_nothing_ends() -> None:
    """A read never ended, because a child of the killed process still held the pipe open."""
    started_s = time.monotonic()
    with (
        pytest.raises(AssertionError, match=r"expected the process to end within 0\.2 s; it was killed"),
        process(SILENT, limit_s=0.2, stdout=subprocess.PIPE) as silent,
    ):
        assert silent.stdout.readline() == ""
    assert time.monotonic() - started_s < PATIENCE_S  # The child sleeps for longer.


async def test_a_read_in_an_event_loop_ends_too() -> None:
    """A limit ended a process while its test did other work, and the error did not name the limit."""

    async def read() -> None:
        async with async_process(SILENT, limit_s=0.2, stdout=asyncio.subprocess.PIPE) as silent:
            assert silent.stdout is not None
            assert await silent.stdout.readline() == b"a line"

    with pytest.raises(AssertionError) as failed:
        await read()
    assert failed.value.__notes__ == ["expected the process to end within 0.2 s; it was killed"]


@pytest.mark.parametrize("is_forked", [False, True])
@pytest.mark.parametrize("is_ignored", [False, True])
def test_ctrl_c_works_in_a_process_as_the_test_says(is_ignored: bool, is_forked: bool) -> None:
    """In the background of a script, processes of the tests ignored Ctrl-C, and the tests waited for their end."""
    program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    with process(
        [sys.executable, "-c", program], is_sigint_ignored=is_ignored, is_forked=is_forked, stdout=subprocess.PIPE
    ) as child:
        assert child.communicate()[0] == f"{is_ignored}\n"


def test_a_forked_command_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """A command did not end, and the commands of later tests waited for it."""
    url = "sqlite:///events.db?topic=clicks"

    def ran(*arguments: str, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return forked_run([sys.executable, "-m", "streamiter", *arguments], cwd=tmp_path, limit_s=limit_s)

    assert ran("topics", "create", url).returncode == 0
    with pytest.raises(AssertionError, match="expected the process to end within 1 s; it was killed"):
        ran("topics", "tail", url, "--follow", limit_s=1.0)
    listed = ran("topics", "list", "sqlite:///events.db")
    assert (listed.returncode, "clicks" in listed.stdout, listed.stderr) == (0, True, "")
    assert ran("topics", "list").returncode == 2


PRINTS = """
import os, sys, warnings
print(sys.argv, sys.path[0], os.getcwd(), sorted(os.environ.keys() - {"LC_CTYPE"}), __name__)
warnings.warn("late")
"""


@pytest.mark.parametrize("options", [[], ["-W", "error"]])
@pytest.mark.parametrize("way", ["-c", "-m", "script"])
def test_a_forked_program_runs_as_one_that_python_starts(way: str, options: list[str], tmp_path: Path) -> None:
    """A program had the arguments, the folder or the warnings of the process that forks."""
    (tmp_path / "program.py").write_text(PRINTS)
    program = {"-c": ["-c", PRINTS], "-m": ["-m", "program"], "script": [str(tmp_path / "program.py")]}[way]
    command = [sys.executable, *options, *program, "an argument"]
    environment = {"PATH": os.environ["PATH"], "NAME": "value"}
    forked = forked_run(command, cwd=tmp_path, env=environment)
    started = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr.splitlines()[-1] == started.stderr.splitlines()[-1]


async def test_a_forked_process_in_an_event_loop_ends_with_its_exit_code() -> None:
    """The exit code of a killed process was 0."""
    for code, expected in (("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9)):
        program = f"import os, sys; print('here', flush=True); sys.stdin.read(); {code}"
        stopped = subprocess.DEVNULL
        async with async_process(
            [sys.executable, "-c", program], is_forked=True, stdin=stopped, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            assert await child.stdout.readline() == b"here\n"
            assert await child.communicate() == (b"", b"")
            assert child.returncode == expected


async def test_a_forked_process_that_has_just_ended_may_be_killed_again() -> None:
    """The second signal took the news of the end from the event loop, and the test of a crash hung."""
    async with async_process([sys.executable, "-c", "import time; time.sleep(600)"], is_forked=True) as forked:
        forked.kill()
        readable, _, _ = select.select([forked._forked.fileno()], [], [], PATIENCE_S)  # type: ignore[attr-defined]
        assert readable  # The process has ended, and the event loop has not looked yet.
        forked.kill()
        async with asyncio.timeout(PATIENCE_S):
            assert await forked.wait() == -signal.SIGKILL


def test_a_process_that_forks_and_has_ended_fails_the_test(tmp_path: Path) -> None:
    """The process that forks had ended, and its silence was read as exit code 0 of a program that printed nothing."""
    with fork_server() as server:
        server.shutdown(socket.SHUT_WR)
        with pytest.raises((AssertionError, BrokenPipeError)):
            Forked([sys.executable, "-c", "pass"], server=server)
