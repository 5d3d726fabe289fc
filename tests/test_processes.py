"""No test waits for a process without a limit."""

from __future__ import annotations

import ast
import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fork_server import Forked, fork_server
from support.processes import async_process, forked_run, process
from support.waiting import PATIENCE_S

TESTS = Path(__file__).parent
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
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for name, call in calls(text) if any(word in text for word in words) else ():
            module, _, function = name.rpartition(".")
            starts = module in ("subprocess", "asyncio", "multiprocessing") and function in STARTING
            runs = module == "subprocess" and function in ("run", "call", "check_call", "check_output")
            has_limit = any(keyword.arg == "timeout" for keyword in call.keywords)
            place = path.relative_to(TESTS).as_posix()
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


def test_a_process_that_forks_and_has_ended_fails_the_test(tmp_path: Path) -> None:
    """The process that forks had ended, and its silence was read as exit code 0 of a program that printed nothing."""
    with fork_server() as server:
        server.shutdown(socket.SHUT_WR)
        with pytest.raises((AssertionError, BrokenPipeError)):
            Forked([sys.executable, "-c", "pass"], server=server)
