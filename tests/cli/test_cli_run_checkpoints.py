"""`streamiter run --checkpoints` resumes runs, and reports wrong options and wrong checkpoints."""

import asyncio
import contextlib
import json
import re
import signal

import pytest
from cli.program import started, streamiter
from support.kafka_server import free_ports
from support.waiting import PATIENCE_S
from typer.testing import CliRunner

from streamiter.cli.app import app
from streamiter.topics import OutgoingBatch, ReadRequest, topic

FLOWS = """
import os
from streamiter import Flow, topic

def summing(stop, numbers="sqlite:///numbers.db?topic=numbers", name="sum"):
    flow = Flow("sums")
    sums = flow.source(topic(numbers), stop=stop, name="numbers").key_by(lambda n: n % 2)
    sums = sums.stateful_map(lambda total, n: (total + n, [n, total + n]), 0, name=name)
    sums.map(lambda pair: (print(pair, flush=True), pair)[1]).sink(topic("sqlite:///sums.db?topic=sums"), name="sums")
    return flow

def service():
    return summing(None)

def rest():
    return summing("latest")

def unnamed():
    flow = summing("latest", name=None)
    flow.from_items([1]).collect()
    return flow

def renamed():
    return summing("latest", name="total")

def copies():
    flow = Flow("copies")
    read = flow.source(topic("sqlite:///numbers.db?topic=numbers"), start="committed", stop="latest")
    read.sink(topic("sqlite:///sums.db?topic=sums"))
    return flow

def elsewhere():
    return summing("latest", os.environ["ELSEWHERE"])
"""

KEPT = ("--checkpoints", "kept", "--checkpoint-interval", "0.1")


@pytest.fixture
async def folder(tmp_path):
    (tmp_path / "job.py").write_text(FLOWS)
    for name in ("numbers", "sums"):
        await topic_in(tmp_path, name).create()
    await write(tmp_path, range(10))
    return tmp_path


def topic_in(folder, name):
    return topic(f"sqlite:///{folder}/{name}.db?topic={name}")


async def write(folder, numbers):
    writer = await topic_in(folder, "numbers").open_writer()
    await writer.write(OutgoingBatch([b"%d" % number for number in numbers]))
    await writer.close()


async def committed(folder):
    reader = await topic_in(folder, "sums").open_reader(ReadRequest(stop="latest"))
    seen = []
    while (batch := await reader.read()) is not None:
        seen += [json.loads(value) for value in batch.values]
    await reader.close()
    return seen


def expected(count):
    totals = [0, 0]
    outputs = []
    for number in range(count):
        totals[number % 2] += number
        outputs.append([number, totals[number % 2]])
    return outputs


async def test_a_suspended_run_is_resumed(folder):
    """A service that was stopped and started by a deploy lost records or doubled outputs."""
    with started("run", "job.py:service", *KEPT, cwd=folder) as program:
        for _ in range(10):
            program.stdout.readline()
        program.send_signal(signal.SIGTERM)
        printed, said = program.communicate(timeout=PATIENCE_S)
    assert (program.returncode, printed) == (0, "")
    assert said.startswith("sums: suspended, ")
    assert await committed(folder) == expected(10)
    await write(folder, range(10, 20))
    ran = streamiter("run", "job.py:rest", *KEPT, "--restore", "last", cwd=folder)
    assert ran.returncode == 0
    assert ran.stderr.startswith("sums: finished, ")
    assert await committed(folder) == expected(20)


async def test_a_killed_run_is_resumed_from_an_object_store(folder, s3_url):
    """The folder of a pod is gone with the pod: a run on another machine started from the beginning."""
    options = ("--checkpoints", s3_url, "--checkpoint-interval", "0.1")
    with started("run", "job.py:service", *options, cwd=folder) as program:
        for _ in range(10):
            program.stdout.readline()
        while await committed(folder) != expected(10):
            await asyncio.sleep(0.05)
        program.kill()
        printed, said = program.communicate(timeout=PATIENCE_S)
    await write(folder, range(10, 20))
    ran = streamiter("run", "job.py:rest", *options, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.startswith("sums: finished, ")
    assert await committed(folder) == expected(20)
    assert "hush" not in printed + said + ran.stdout + ran.stderr


async def test_a_run_can_restart_from_an_older_checkpoint_or_from_the_beginning(folder):
    """After a mistake in the flow, a user could not restart it from an older checkpoint or from the beginning."""
    committed_by = {}
    for options in ((), ("--restore", "1"), ("--restore", "none")):
        ran = streamiter("run", "job.py:rest", "--checkpoints", "kept", *options, cwd=folder)
        assert ran.returncode == 0, ran.stderr
        committed_by[options] = await committed(folder)
    assert committed_by[()] == expected(10)
    assert committed_by["--restore", "1"] == expected(10)  # checkpoint 1 was the last one of a job that had ended
    assert committed_by["--restore", "none"] == expected(10) * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(
            (
                (*KEPT, "--restore", given),
                f'--restore: expected "last", "none" or the number of a checkpoint, given {given!r}; '
                "streamiter checkpoints list shows the checkpoints",
            )
            for given in ("seven", "-1", "", "７", "7" * 5000)
        ),
        *(
            (
                ("--checkpoints", "kept", "--checkpoint-interval", given),
                f"Checkpoints: interval_s: expected a number above 0, given {given}",
            )
            for given in ("0.0", "-1.0", "nan", "inf")
        ),
        (
            ("--checkpoints", ""),
            "Checkpoints: expected a folder, a URL or a CheckpointStore, given ''; write Checkpoints(\"/var/lib/…\")",
        ),
    ],
)
def test_an_error_of_an_option_is_printed_on_one_line(tmp_path, options, said):
    """The error about an option named a part of the engine instead of the option, or came after the start."""
    # The command runs in this process, which saves a second.
    with contextlib.chdir(tmp_path):
        ran = CliRunner().invoke(app, ["run", "job.py:rest", *options], prog_name="streamiter")
    assert (ran.exit_code, ran.stdout, ran.stderr) == (1, "", f"error: {said}\n")


def test_an_interval_that_is_no_number_is_a_usage_error(tmp_path):
    """An interval that is no number ended with the exit code of a failure, unlike with other commands."""
    options = ("--checkpoints", "kept", "--checkpoint-interval", "soon")
    ran = CliRunner().invoke(app, ["run", "job.py:rest", *options], prog_name="streamiter")
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert "Invalid value for '--checkpoint-interval'" in ran.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*KEPT, "--restore", "7"), "flow 'sums': expected a checkpoint 7 in the store, given none"),
        (
            ("--checkpoints", "kept", "--checkpoint-interval", "300"),
            "flow 'sums', Checkpoints: expected interval_s + alignment_timeout_s below transaction_timeout_s",
        ),
        (
            ("--checkpoints", "job.py"),
            "flow 'sums': expected a directory for checkpoints that this process may write to, given job.py",
        ),
    ],
)
def test_options_that_do_not_fit_the_flow_are_an_error_on_one_line(folder, options, said):
    """An option that does not fit the flow was reported after records had been read and written."""
    check_error(streamiter("run", "job.py:rest", *options, cwd=folder), said)


def check_error(ran, *said):
    """Check that the program printed one error, as its last line, that contains all these texts."""
    assert (ran.returncode, ran.stdout) == (1, "")
    [error] = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert ran.stderr.endswith(f"{error}\n")
    assert "Traceback" not in ran.stderr
    for each in said:
        assert each in error


def test_a_step_whose_state_could_not_be_found_again_is_named(folder):
    """The error about a step without a name did not have the user's own line."""
    ran = streamiter("run", "job.py:unnamed", *KEPT, cwd=folder)
    check_error(ran, "step 'stateful_map': expected a name= for a step that keeps state", "job.py:")
    check_error(ran, "nor have 'items' at job.py:20, 'collect' at job.py:20")


def test_a_changed_step_may_be_confirmed_by_an_option(folder):
    """The error about a changed step named an option that only Python programs had."""
    assert streamiter("run", "job.py:rest", *KEPT, cwd=folder).returncode == 0
    check_error(streamiter("run", "job.py:renamed", *KEPT, cwd=folder), "given no step 'sum', whose state it has")
    changed = ("--changed-step", "sum", "--changed-step", "total")
    assert streamiter("run", "job.py:renamed", *KEPT, *changed, cwd=folder).returncode == 0
    without = streamiter("run", "job.py:rest", *changed, cwd=folder)
    check_error(
        without, "changed_steps=['sum', 'total'] alone; add checkpoints=Checkpoints(…) (on the command line --c"
    )
    without = streamiter("run", "job.py:rest", "--checkpoint-interval", "5", cwd=folder)
    check_error(without, 'or sources with start="committed", given neither', "--checkpoints STORE")


async def test_a_flow_without_state_is_resumed_without_a_folder(folder):
    """A flow that only maps records needed a disk, or wrote all outputs again at each start, or told of checkpoints."""
    for start, options in ((0, ()), (10, ("--checkpoint-interval", "5"))):
        ran = streamiter("run", "job.py:copies", *options, cwd=folder)
        assert ran.returncode == 0, ran.stderr
        assert re.search(r", 10 records read\npositions: 1 committed, the last in \S+ s\n$", ran.stderr)
        assert await committed(folder) == list(range(start + 10))
        await write(folder, range(start + 10, start + 20))
    assert streamiter("run", "job.py:copies", "--restore", "none", cwd=folder).returncode == 0
    assert await committed(folder) == [*range(20), *range(30)]


async def test_checkpoints_that_do_not_fit_the_commit_record_are_an_error(folder):
    """A run started fresh, because its folder was not mounted or the file of topics came from another day."""
    assert streamiter("run", "job.py:rest", *KEPT, cwd=folder).returncode == 0
    ran = streamiter("run", "job.py:rest", "--checkpoints", "elsewhere", cwd=folder)
    check_error(ran, "flow 'sums': checkpoint 1 of run", "cannot be read", "Give the store")
    await topic_in(folder, "sums").beside("streamiter-commits").delete()
    ran = streamiter("run", "job.py:rest", *KEPT, cwd=folder)
    check_error(ran, "has no commit record of this flow, so it is unknown what was committed")
    assert await committed(folder) == expected(10)


def test_a_broker_that_is_down_is_an_error_with_its_address(folder, monkeypatch):
    """A new user's first run ended with an error that did not name the broker's address."""
    [port] = free_ports(1)
    monkeypatch.setenv("ELSEWHERE", f"kafka://127.0.0.1:{port}/numbers?give_up_after_s=1")
    ran = streamiter("run", "job.py:elsewhere", *KEPT, cwd=folder)
    check_error(ran, "flow 'sums', step 'numbers'", f"127.0.0.1:{port}", "Is the broker running")


async def test_a_run_that_is_replaced_ends_with_a_line_and_a_failure(folder):
    """Two runs of one flow wrote all outputs twice."""
    with started("run", "job.py:service", *KEPT, cwd=folder) as older:
        for _ in range(10):
            older.stdout.readline()
        assert streamiter("run", "job.py:rest", *KEPT, cwd=folder).returncode == 0
        _, said = older.communicate(timeout=PATIENCE_S)
    assert older.returncode == 1
    [error] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: flow 'sums': ")
    assert "must end" in error
    assert "Traceback" not in said
    assert await committed(folder) == expected(10)
