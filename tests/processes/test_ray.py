"""A flow in processes on a real Ray: results, errors, losses, and programs that end before the flow."""

import asyncio
import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from processes import flows_on_hosts, ray_flows
from support.processes import forked_run, process
from support.ray_fixtures import TESTS, children, raylet_of
from support.waiting import until

from streamiter import Checkpoints, Flow, Ray
from streamiter.engine.processes.ray_host import NodeFacts
from streamiter.errors import ConfigurationError, JobFailed, ProcessLost

pytestmark = [pytest.mark.skipif(sys.platform == "win32", reason="Ray's support for Windows is incomplete")]


def test_the_results_are_those_of_one_process(cluster: Any) -> None:
    """Records that were collected stayed in an actor. A function of the program could not be imported by others.

    After the loss of a node, a flow that could run with fewer processes waited for a new node.
    """
    added = 7
    flow = Flow("squares on Ray", parallelism=2)
    squares = flow.from_items(range(200)).rebalance().map(lambda n: n * n + added).key_by(lambda n: n % 5)
    collected = squares.map(str, name="texts").collect()
    statistics = flow.run(on=Ray(3, address=cluster.address, min_processes=2))  # There is room for two.
    assert sorted(collected.items) == sorted(str(number * number + 7) for number in range(200))
    assert (statistics.state, statistics.step("texts").records_in) == ("finished", 200)


def test_an_error_of_a_step_is_raised_as_in_one_process(cluster: Any) -> None:
    """The user saw an error of Ray, but neither the step, nor the record, nor the line of the function."""
    flow = flows_on_hosts.failing
    with pytest.raises(JobFailed, match=r"on record 57, in process [01]: ZeroDivisionError") as raised:
        flow.run(on=Ray(2, address=cluster.address, flow="processes.flows_on_hosts:failing"))
    assert raised.value.step == "divide"
    assert raised.value.__cause__ is not None
    assert 'name="divide"' in raised.value.__cause__.__notes__[0]  # the line of the user


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whether a silent process works")
def test_a_silent_process_is_looked_at_on_its_node(cluster: Any) -> None:
    """A step that held Python's lock was a loss on a cluster, where the program cannot ask the kernel of a node."""
    on = Ray(2, silence_s=1, flow="processes.flows_on_hosts:busy")
    assert flows_on_hosts.busy.run(on=on).state == "finished"
    with pytest.raises(ProcessLost, match=r"has held Python's lock for .* s while step 'hang' ran; give lock_s="):
        flows_on_hosts.hanging.run(on=Ray(2, silence_s=1, lock_s=2, flow="processes.flows_on_hosts:hanging"))


async def test_a_killed_process_is_a_loss_with_the_reason_of_ray(cluster: Any, tmp_path: Path) -> None:
    """The flow waited for ever for an actor that the kernel had killed."""
    running = asyncio.create_task(asyncio.to_thread(ray_flows.endless(tmp_path).run, on=Ray(2)))
    try:
        await until(lambda: len(ray_flows.noted(tmp_path)) == 2 or running.done())
        os.kill(max(ray_flows.noted(tmp_path)), signal.SIGKILL)
        with pytest.raises(ProcessLost, match=r"was lost: Ray says: its worker process has died.*run the flow again"):
            await running
    finally:
        (tmp_path / "end").touch()


async def test_a_flow_goes_on_without_its_program_and_the_next_one_waits_for_it(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The flow ended with the terminal of the user; started again, a second one wrote to the same topics."""
    program = [sys.executable, ray_flows.__file__, cluster.address, str(tmp_path)]
    with process(program, stderr=subprocess.PIPE) as first:
        await until(lambda: len(ray_flows.noted(tmp_path)) == 2 or first.poll() is not None)
        first.kill()
        first.wait()
    other = ray_flows.endless(tmp_path, name="another step")
    with pytest.raises(ConfigurationError, match=r"given one whose steps differ; .* ray.kill\(ray.get_actor\('endless"):
        await asyncio.to_thread(other.run, on=Ray(2, address=cluster.address))
    (tmp_path / "end").touch()
    with caplog.at_level(logging.WARNING):
        statistics = await asyncio.to_thread(ray_flows.endless(tmp_path).run, on=Ray(1, address=cluster.address))
    assert statistics.state == "finished"
    assert "runs on the cluster already, in 2 processes" in caplog.text
    assert len(ray_flows.noted(tmp_path)) == 2  # The flow was not started a second time.
    import ray

    assert "endless on Ray" not in str(ray.util.list_named_actors(all_namespaces=True))  # The name is free.


def test_more_processes_than_cpus_are_refused(cluster: Any) -> None:
    """Ray waited for ever for CPUs that the machine does not have."""
    expected = r"expected room for 3 processes with 1 CPU each, given the nodes [\d.]+: 2 CPU, after 0.5 s; start fewer"
    with pytest.raises(ConfigurationError, match=expected):
        flows_on_hosts.squares.run(on=Ray(3, address=cluster.address, wait_s=0.5))


def test_a_module_that_a_node_does_not_have_is_named(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow failed after its start, on one node only, with a traceback of Ray."""
    (tmp_path / "beside_program.py").write_text("def double(n):\n    return 2 * n\n")
    monkeypatch.syspath_prepend(tmp_path)
    double = importlib.import_module("beside_program").double
    flow = Flow("f", parallelism=2)
    flow.from_items(range(4)).rebalance().map(double).collect()
    with pytest.raises(ConfigurationError, match=r"No module named 'beside_program'.*runtime_env={\"working_dir\""):
        flow.run(on=Ray(1))
    assert flow.run(on=Ray(1, runtime_env={"env_vars": {"PYTHONPATH": f"{TESTS}:{tmp_path}"}})).state == "finished"


SENDS_A_FOLDER = """
import sys
from streamiter import Flow, Ray

sys.path.insert(0, {folder!r})
import beside_program  # The workers have another path.

flow = Flow("f", parallelism=2)
doubled = flow.from_items(range(4)).rebalance().map(beside_program.double).collect()
flow.run(on=Ray(2, runtime_env={{"py_modules": [{folder!r} + "/beside_program"]}}))
print(sorted(doubled.items))
"""


def test_folders_of_the_program_are_sent(tmp_path: Path) -> None:
    """Ray refused a folder ("not a valid URI"), since it takes folders only when a program connects."""
    package = tmp_path / "beside_program"
    package.mkdir()
    (package / "__init__.py").write_text("def double(n):\n    return 2 * n\n")
    program = [sys.executable, "-c", SENDS_A_FOLDER.format(folder=str(tmp_path))]
    ran = forked_run(program, cwd=TESTS)
    assert ran.stdout == "[0, 2, 4, 6]\n", ran.stderr


def test_a_flow_that_cannot_be_sent_is_refused(cluster: Any) -> None:
    """A lock in a function gave an error of the serialization, without a word on what to do."""
    lock = threading.Lock()
    flow = Flow("f", parallelism=2)
    flow.from_items(range(4)).rebalance().map(lambda n: lock and n).collect()
    with pytest.raises(
        ConfigurationError, match=r"cannot pickle '_thread.lock' object.*; open connections and files in"
    ):
        flow.run(on=Ray(2))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (("3.11", "1", "2.0"), r"numpy 2.1 on all nodes.*given numpy 2.0 on node n; .*\"pip\": \[\"numpy==2.1\"\]"),
        (("3.11", "0", "2.1"), r"streamiter 1 on all nodes.*given streamiter 0 on node n"),
        (("3.12", "1", "2.1"), r"Python 3.11 on all nodes.*given Python 3.12 on node n; install this version there$"),
    ],
)
def test_other_versions_on_a_node_are_refused(found: tuple[str, str, str], expected: str) -> None:
    """Two versions of numpy added numbers in another order, and results depended on the node."""
    with pytest.raises(ConfigurationError, match=expected):
        NodeFacts("3.11", "1", "2.1").check("f", NodeFacts(*found, node="n"))


def test_ray_that_is_not_installed_or_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray tried for minutes to connect to a cluster that was gone."""
    script = "import sys; from processes import flows_on_hosts; from streamiter import Ray\n"
    dead = [sys.executable, "-c", f"{script}flows_on_hosts.squares.run(on=Ray(2, address='127.0.0.1:1'))"]
    absent = [sys.executable, "-c", f"{script}sys.modules['ray'] = None; flows_on_hosts.squares.run(on=Ray(2))"]
    for program, expected in (
        (dead, r"a Ray cluster that answers, given '127.0.0.1:1' \([\d.]+:1\): .*; start Ray"),
        (absent, r"on=Ray\(…\): expected the package ray, found none; install it with: pip install"),
    ):
        ran = forked_run(program, cwd=TESTS)
        assert re.search(expected, ran.stderr), ran.stderr


def stored(folder: Path) -> set[Path]:
    """Return the checkpoints in the store."""
    return set(folder.glob("store/**/*.checkpoint"))


@pytest.mark.parametrize("victim", ["the supervisor", "a node"])
async def test_a_loss_on_the_cluster_is_followed_by_an_attempt_from_the_last_checkpoint(
    cluster: Any, tmp_path: Path, victim: str
) -> None:
    """After the loss of a node, the flow waited until Ray noted it, 15 s later. Without its supervisor, it ended; later
    it read all again, since the new supervisor dropped the state of changed_steps= for the second time.
    """
    import ray

    store = Checkpoints(tmp_path / "store", interval_s=0.1)
    if victim == "a node":  # Each node has room for one process.
        node = cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
        on, again = Ray(2, address=cluster.address, cpus=2, min_processes=1), 1
    else:
        on, again = Ray(2, address=cluster.address), 2
    options = {"on": on, "checkpoints": store, "changed_steps": ["numbers"]}
    running = asyncio.create_task(asyncio.to_thread(ray_flows.endless(tmp_path).run, **options))
    try:
        await until(lambda: len(ray_flows.noted(tmp_path)) == 2 or running.done())
        first = stored(tmp_path)
        # The second one that is newer was begun behind the commit of the first, which has records.
        await until(lambda: len(stored(tmp_path) - first) >= 2 or running.done())
        before = ray_flows.noted(tmp_path)
        supervisor = ray.get_actor("endless on Ray", namespace="streamiter")
        state = await supervisor.state.remote()
        if victim == "a node":
            raylet = raylet_of(node)
            lost = before.keys() & children(raylet).keys()
            assert len(lost) == 1
            for process_id in (raylet, *lost):
                os.kill(process_id, signal.SIGKILL)
        else:
            os.kill(state.process_id, signal.SIGKILL)
        await until(lambda: len(ray_flows.noted(tmp_path)) == 2 + again or running.done())
        if victim == "a node":  # Not Ray has noted it, but the link of the process.
            assert [each["Alive"] for each in ray.nodes()].count(True) == 2
    finally:
        (tmp_path / "end").touch()
    assert (await running).state == "finished"
    after = {process: first for process, first in ray_flows.noted(tmp_path).items() if process not in before}
    assert len(after) == again
    assert min(after.values()) > 100  # Not from the beginning.
