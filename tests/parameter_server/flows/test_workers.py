"""Steps with a parameter server: each subtask is a worker from before its ``open`` until its input ends."""

import asyncio
from typing import Any

import pytest
from parameter_server.flows.counting import MATRIX, RECORDS, Counts, Dealt, count_of_each, counting_flow, ended, handled
from support.waiting import until

from streamiter import Flow, Operator, connect
from streamiter.errors import GraphError, JobFailed
from streamiter.operators import Context, Output
from streamiter.parameter_server import ASP, BSP, SSP, Client, ParameterServer
from streamiter.parameter_server.consistency import Consistency


class EmitsItsWorker(Operator):
    """Emits its subtask, the number of its worker, and the record."""

    def open(self, context: Context) -> None:
        assert isinstance(context.parameter_server, Client)
        self._place = (context.name, context.subtask_index, context.parameter_server.worker)

    def process(self, record: Any, out: Output) -> None:
        out.emit((*self._place, record))

    process_left = process_right = process


def test_subtasks_of_all_steps_are_workers_with_consecutive_numbers() -> None:
    """Two steps both started with worker 0 and were one worker for the server."""
    flow, server = Flow("numbered"), ParameterServer()
    numbers = flow.from_items(list(range(12)), name="numbers", parallelism=2)
    first = numbers.process(EmitsItsWorker, name="first", parallelism=2, parameter_server=server).collect()
    second = numbers.rebalance().process(EmitsItsWorker, name="second", parallelism=3, parameter_server=server)
    collected = second.collect()
    flow.run()
    assert {place[:3] for place in [*first.items, *collected.items]} == {
        ("first", 0, 0),
        ("first", 1, 1),
        ("second", 0, 2),
        ("second", 1, 3),
        ("second", 2, 4),
    }


def test_keyed_and_connected_streams_take_a_parameter_server() -> None:
    """Keyed and connected streams did not accept a parameter server, which training by user needs."""
    flow, server = Flow("kinds"), ParameterServer()
    left, right = flow.from_items([1, 2], name="left"), flow.from_items([3], name="right")
    keyed = left.key_by(lambda n: n).process(EmitsItsWorker, name="keyed", parameter_server=server).collect()
    both = connect(left=left, right=right).process(EmitsItsWorker, name="both", parallelism=1, parameter_server=server)
    collected = both.collect()
    flow.run()
    assert sorted(keyed.items) == [("keyed", 0, 0, 1), ("keyed", 0, 0, 2)]
    assert sorted(collected.items) == [("both", 0, 1, 1), ("both", 0, 1, 2), ("both", 0, 1, 3)]


def test_a_flow_has_several_servers() -> None:
    """Statistics and counts of one server were taken from the other."""
    users, items = ParameterServer(name="users"), ParameterServer(name="items", shards=2)
    flow = Flow("two servers")
    numbers = flow.from_items(list(range(RECORDS)), name="numbers")
    numbers.process(lambda: Counts(BSP()), name="of users", parameter_server=users).collect()
    numbers.process(lambda: Counts(ASP()), name="of items", parameter_server=items).collect()
    statistics = flow.run()
    assert list(statistics.parameter_servers) == ["users", "items"]
    assert statistics.parameter_servers["items"].matrix(MATRIX).adds == RECORDS
    assert asyncio.run(count_of_each(users)) == asyncio.run(count_of_each(items)) == [1.0] * RECORDS


async def test_statistics_of_the_job_include_the_server() -> None:
    """The statistics of a job did not show the server, so waiting workers could not be seen."""
    flow, _ = counting_flow(consistency=SSP(staleness=1), workers=3)
    job = await flow.start()
    await handled(job, 3)
    running = job.statistics().parameter_servers["parameter server"]
    assert running.workers == (0, 1, 2)
    assert len(running.shards) == 2
    statistics = (await ended(job)).parameter_servers["parameter server"]
    assert statistics.workers == ()
    matrix = statistics.matrix(MATRIX)
    assert (matrix.gets, matrix.adds) == (RECORDS, RECORDS)
    assert matrix.consistency == "SSP(staleness=1)"


# -- the end of a worker -------------------------------------------------------------------------------------


class UnequallyDealt(Dealt):
    """Gives the first three numbers to the first subtask and all others to the second."""

    def open(self, context: Context, positions: dict[Any, Any] | None) -> None:
        super().open(context, positions)
        self._step = 1
        if context.subtask_index == 0:
            self._next, self._count = 0, 3
        else:
            self._next = 3


@pytest.mark.parametrize("consistency", [BSP(), SSP(staleness=1), SSP(staleness=0)], ids=repr)
async def test_a_worker_leaves_at_the_end_of_its_input_and_the_others_continue(consistency: Consistency) -> None:
    """The others waited forever for a worker whose input had ended."""
    flow, server = Flow("unequal", parallelism=2), ParameterServer()
    numbers = flow.from_source(lambda: UnequallyDealt(RECORDS), name="numbers")
    numbers.process(lambda: Counts(consistency), name="count", parameter_server=server).collect()
    assert (await ended(await flow.start())).state == "finished"
    assert await count_of_each(server) == [1.0] * RECORDS
    assert server.workers == []


class ReadsAtTheEnd(Counts):
    """Reads once more when its input has ended."""

    async def finish(self, out: Output) -> None:
        row = await self.client.get(MATRIX, row=0)
        out.emit(float(row.sum()))


async def test_a_step_may_still_read_when_its_input_has_ended() -> None:
    """The worker left before the step had emitted its result."""
    flow, _ = counting_flow(lambda: ReadsAtTheEnd(SSP(staleness=3)), workers=2)
    collected = flow.steps[-1]
    assert collected.shape == "sink"
    statistics = await ended(await flow.start())
    assert statistics.step("count").records_out == RECORDS + 2


# -- refused servers -----------------------------------------------------------------------------------------


class WantsAClient(Operator):
    def open(self, context: Context) -> None:
        self.client = context.parameter_server

    def process(self, record: Any, out: Output) -> None: ...


def test_the_error_of_a_step_without_a_server_says_how_to_give_one() -> None:
    """A step without a server failed with an AttributeError on None."""
    flow = Flow("without")
    flow.from_items([1]).process(WantsAClient, name="train").collect()
    with pytest.raises(JobFailed) as failed:
        flow.run()
    assert "given step 'train' without; write .process(…, parameter_server=server)" in str(failed.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (ParameterServer, "given the class ParameterServer; make one before the flow"),
        ("weights", "given 'weights'; make one before the flow"),
        (3, "given 3; make one before the flow"),
    ],
)
@pytest.mark.parametrize("kind", ["process", "key_by", "connect"])
def test_a_value_that_is_no_server_is_refused_at_the_line_of_the_step(kind: str, given: Any, said: str) -> None:
    """A class given instead of a server was found only when the job started, somewhere in the engine."""
    numbers = Flow("refused").from_items([1], name="numbers")
    streams: dict[str, Any] = {
        "process": numbers,
        "key_by": numbers.key_by(lambda n: n),
        "connect": connect(left=numbers, right=numbers),
    }
    with pytest.raises(GraphError) as refused:
        streams[kind].process(EmitsItsWorker, name="train", parameter_server=given)
    assert f"step 'train': expected a ParameterServer as parameter_server=, {said}" in str(refused.value)
    assert "test_workers.py:" in str(refused.value)


async def test_two_servers_of_one_name_are_refused() -> None:
    """The state of one server was restored into the other."""
    flow = Flow("twins")
    numbers = flow.from_items([1], name="numbers")
    for name in ("one", "other"):
        numbers.process(EmitsItsWorker, name=name, parameter_server=ParameterServer()).collect()
    with pytest.raises(GraphError, match="'parameter server', which another one has; give ParameterServer"):
        await flow.start()


async def test_a_server_named_like_a_step_is_refused() -> None:
    """A server and a step had the same name, and a checkpoint mixed up their states."""
    flow = Flow("same")
    numbers = flow.from_items([1], name="numbers")
    numbers.process(EmitsItsWorker, name="train", parameter_server=ParameterServer(name="train")).collect()
    with pytest.raises(GraphError, match="given 'train', which a step has"):
        await flow.start()


async def test_a_server_serves_one_flow_at_a_time() -> None:
    """A second flow used the workers of a server whose first flow was still running."""
    flow, server = counting_flow(records=400)
    other = Flow("other")
    other.from_items([1]).process(EmitsItsWorker, name="train", parameter_server=server).collect()
    job = await flow.start()
    with pytest.raises(JobFailed, match="expected no workers yet as flow 'other' begins, given 2; one flow at a"):
        await other.start()
    assert (await ended(job)).state == "finished"
    assert await count_of_each(server) == [1.0] * 400


async def test_a_server_with_clients_of_its_own_is_refused() -> None:
    """Workers of a flow waited for a client outside of the flow."""
    flow, server = counting_flow()
    client = server.client(worker=0)
    with pytest.raises(JobFailed, match="given 1; one flow at a time, and no other clients"):
        await flow.start()
    await client.leave()
    await ended(await flow.start())
    assert await count_of_each(server) == [1.0] * RECORDS


async def test_a_server_that_was_closed_is_refused() -> None:
    """Workers on a closed server waited forever."""
    flow, server = counting_flow()
    await server.close()
    with pytest.raises(JobFailed, match="expected a server that is open, given one that was closed"):
        await flow.start()


async def test_a_job_whose_start_fails_leaves_no_worker_registered() -> None:
    """The next flow was refused because workers of a failed start were still registered."""

    class CannotBeOpened(Operator):
        def open(self, context: Context) -> None:
            raise ValueError("no such file")

        def process(self, record: Any, out: Output) -> None: ...

    flow, server = counting_flow(CannotBeOpened)
    with pytest.raises(JobFailed, match="no such file"):
        await flow.start()
    await until(lambda: server.workers == [])
    again, _ = counting_flow(server=server)
    assert (await ended(await again.start())).state == "finished"
