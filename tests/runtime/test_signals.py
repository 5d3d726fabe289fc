"""SIGTERM and Ctrl-C on a flow in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from streamiter import Flow
from streamiter.errors import ConfigurationError

PROGRAM = Path(__file__).with_name("signal_flow.py")
LOOP = Path(__file__).with_name("signal_loop.py")
BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are those of Unix")


@contextmanager
def running(what: str, program: Path = PROGRAM, first: str = "running") -> Iterator[subprocess.Popen[str]]:
    """The program, once it has said that its flow runs."""
    command = [sys.executable, str(program), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{first}\n"
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


@BOTH
def test_a_loop_that_is_drained_by_a_signal_gives_its_result_so_far(number: signal.Signals) -> None:
    """An hour of rounds, a Ctrl-C, and nothing came out: the last round was never over."""
    with running("drain", LOOP, "in round 100") as process:
        process.send_signal(number)
        out, errors = process.communicate(timeout=30)
    said = re.fullmatch(r"finished (\d+) the job was drained (\d+)\n", out)
    assert said is not None, (out, errors)
    # The variables pass the body once more in the epoch it ends in, which is counted from 0.
    assert int(said[2]) == int(said[1]) + 1 > 100
    assert (process.returncode, errors) == (0, "")


def test_a_loop_that_is_suspended_by_a_signal_does_not_end() -> None:
    """Its steps must not hear of an end that is none: what they publish there would be taken for the last word."""
    with running("suspend", LOOP, "in round 100") as process:
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=30)
    assert (process.returncode, out, errors) == (0, "suspended None None\n", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"on_interrupt": "abort"},
            "flow 'signals': on_interrupt expected \"suspend\" or \"drain\", given 'abort'; choose one of these, "
            "a second Ctrl-C aborts in any case",
        ),
        (
            {"on_interrupt": "drain", "worker": (0, 2), "run_id": "a"},
            'flow \'signals\': expected on_interrupt="suspend" of a worker, given "drain"; a loop that workers '
            "share does not end when the inputs of one of them do",
        ),
    ],
)
def test_what_is_no_way_to_stop_is_refused_before_the_flow_runs(options: Any, said: str) -> None:
    """Found out at the Ctrl-C, the job would go on and say nothing."""
    flow = Flow("signals")
    seen = flow.from_items([1]).collect()
    with pytest.raises(ConfigurationError) as refused:
        flow.run(**options)
    assert (str(refused.value), seen.items) == (said, [])
