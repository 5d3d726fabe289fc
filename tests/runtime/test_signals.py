"""SIGTERM and Ctrl-C on a flow in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("signal_flow.py")
BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are those of Unix")


@contextmanager
def running(what: str) -> Iterator[subprocess.Popen[str]]:
    """The program, once its flow runs."""
    command = [sys.executable, str(PROGRAM), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            yield process
        finally:
            process.kill()


@BOTH
def test_a_signal_suspends_the_job_and_the_program_ends_well(number: signal.Signals) -> None:
    """A deployment that stops the service must find everything handled, and the exit code 0."""
    with running("pass") as process:
        process.send_signal(number)
        out, errors = process.communicate(timeout=30)
    assert (out.splitlines(), errors) == (["suspending", "suspended here", "close", "suspended"], "")
    assert process.returncode == 0


@BOTH
def test_a_second_signal_aborts_what_hangs(number: signal.Signals) -> None:
    """A step waits for a server that does not answer: the second Ctrl-C must help, without kill -9."""
    with running("hang") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "suspending\n"
        process.send_signal(number)
        out, errors = process.communicate(timeout=30)
    assert (out.splitlines(), errors) == (["close", "aborted"], "")
    assert process.returncode == 0
