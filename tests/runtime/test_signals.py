"""SIGTERM and Ctrl-C on a flow in another process."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.processes import process
from support.waiting import PATIENCE_S

from streamiter import Flow
from streamiter.errors import ConfigurationError

PROGRAM = Path(__file__).with_name("signal_flow.py")
LOOP = Path(__file__).with_name("signal_loop.py")
BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)

NOTHING_IS_KEPT = (
    "flow '{}': a signal has stopped it. What it had read is handled, and no state and no positions are kept, since it "
    "has no checkpoints=: the next run begins where its sources start\n"
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are those of Unix")


@contextmanager
def running(what: str, program: Path = PROGRAM, first: str = "running") -> Iterator[subprocess.Popen[str]]:
    """Return the program, after it has reported that its flow runs."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with process([sys.executable, program, what], is_forked=True, **pipes) as started:
        assert started.stdout.readline() == f"{first}\n"
        yield started


@BOTH
def test_a_signal_suspends_the_job_and_the_program_ends_with_code_0(number: signal.Signals) -> None:
    """A deployment stopped the service, which left unhandled records or ended with an exit code other than 0."""
    with running("pass") as started:
        started.send_signal(number)
        out, errors = started.communicate(timeout=PATIENCE_S)
    assert (out.splitlines(), errors) == (
        ["suspending", "suspended here", "close", "suspended"],
        NOTHING_IS_KEPT.format("signals"),
    )
    assert started.returncode == 0


@pytest.mark.parametrize(
    "given", [signal.default_int_handler, signal.SIG_IGN, lambda *_: None], ids=["default", "ignored", "own"]
)
@BOTH
def test_after_the_job_signals_have_their_old_handlers(number: signal.Signals, given: Any) -> None:
    """A service with a SIGTERM handler was killed by SIGTERM after it had run a flow."""
    before = signal.signal(number, given)
    try:
        flow = Flow("signals")
        flow.from_items([1]).collect()
        assert flow.run().state == "finished"
        assert signal.getsignal(number) == given
    finally:
        signal.signal(number, before)


@BOTH
def test_a_second_signal_aborts_a_stuck_job(number: signal.Signals) -> None:
    """A step waited for a server without an answer, and only kill -9 ended the program."""
    with running("hang") as started:
        started.send_signal(signal.SIGTERM)
        assert started.stdout is not None
        assert started.stdout.readline() == "suspending\n"
        started.send_signal(number)
        out, errors = started.communicate(timeout=PATIENCE_S)
    assert (out.splitlines(), errors) == (["close", "aborted"], "")
    assert started.returncode == 0


def test_a_loop_that_is_drained_by_a_signal_returns_its_result_so_far() -> None:
    """An hour of rounds ended by Ctrl-C had no result, because the last round never ended."""
    with running("drain", LOOP, "in round 100") as started:
        started.send_signal(signal.SIGINT)
        out, errors = started.communicate(timeout=PATIENCE_S)
    said = re.fullmatch(r"finished (\d+) the job was drained (\d+)\n", out)
    assert said is not None, (out, errors)
    # The variables pass the body again in the ending epoch, which is counted from 0.
    assert int(said[2]) == int(said[1]) + 1 > 100
    assert (started.returncode, errors) == (0, "")


def test_a_loop_that_is_suspended_by_a_signal_does_not_end() -> None:
    """The steps of a suspended loop received an end, and published results that were not final."""
    with running("suspend", LOOP, "in round 100") as started:
        started.send_signal(signal.SIGINT)
        out, errors = started.communicate(timeout=PATIENCE_S)
    assert (started.returncode, out, errors) == (0, "suspended None None\n", NOTHING_IS_KEPT.format("loop"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"on_interrupt": "abort"},
            "flow 'signals', on_interrupt=: expected \"suspend\" or \"drain\", given 'abort'; choose one of them, "
            "a second Ctrl-C aborts in any case",
        )
    ],
)
def test_an_unknown_way_to_stop_is_refused_before_the_flow_runs(options: Any, said: str) -> None:
    """The error came only at Ctrl-C, when the job continued without a message."""
    flow = Flow("signals")
    flow.from_items([1]).collect()
    with pytest.raises(ConfigurationError) as refused:
        flow.run(**options)
    assert str(refused.value) == said
