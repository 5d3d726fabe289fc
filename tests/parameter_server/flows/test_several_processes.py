"""Flows with a parameter server in several processes: workers and shards are spread over them."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from learn.parameter_server_support import made_up_rows
from networks.training_support import arrays_of, network, rows
from parameter_server.flows.counting import MATRIX, Counts, Dealt
from parameter_server.psf import aggregate_cases, update_cases
from processes.linked_jobs import JoinedJobs, joined_jobs, run_joined
from processes.pipes import MovingPipe, Owner, identity, link_of
from support.soak import in_soak
from support.waiting import PATIENCE_S, until

from streamiter import Checkpoints, Flow, Operator
from streamiter.engine.plan.job_settings import JobOptions
from streamiter.engine.processes.link import ProcessLink
from streamiter.engine.storage.store import CheckpointStore, blobs_at
from streamiter.errors import ConfigurationError, OutOfRange, ParameterServerError, ShardLost
from streamiter.learn import train_on_parameter_server
from streamiter.networks.training import train_network
from streamiter.operators import Output
from streamiter.operators.operator import Context
from streamiter.parameter_server import ASP, BSP, SSP, Client, ParameterServer
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.divided import from_plain, importable, to_plain
from streamiter.parameter_server.requests import AggregateRequest, UpdateRequest
from streamiter.values.plain_data import PlainData

KINDS = [ASP(), BSP(), SSP(staleness=0), SSP(staleness=2)]
RECORDS = 60


class Drifts(Counts):
    """Adds numbers whose sum depends on their order, and emits what it reads."""

    async def process(self, record: int, out: Output) -> None:
        read = await self.client.get(MATRIX, row=0)
        await self.client.add(MATRIX, row=0, values=0.1 / (record + 1) + read[::-1] / 7)
        await self.client.clock(MATRIX)
        out.emit((self.client.worker, self.client.clock_of(MATRIX), record, read.tolist()))


@pytest.mark.parametrize("processes", [2, 3])
async def test_workers_in_step_read_the_same_numbers_in_any_number_of_processes(processes: int) -> None:
    """Under BSP the adds of workers in two processes were summed up in the order in which they had arrived."""

    def build(_: int) -> tuple[Flow, Any]:
        flow, server = Flow("f"), ParameterServer(shards=3)
        numbers = flow.from_source(lambda: Dealt(RECORDS), name="numbers", parallelism=3)
        drifting = numbers.process(lambda: Drifts(BSP(), columns=7), name="drift", parameter_server=server)
        return flow, drifting.collect()

    one, several = await run_joined(build, 1), await run_joined(build, processes)
    assert len(one.items) == RECORDS
    assert sorted(several.items) == sorted(one.items)


class Staleness:
    """The clocks that workers have begun, and the largest lead of a worker that has read."""

    def __init__(self) -> None:
        self.begun: dict[int, int] = {}
        self.lead = 0


class Watched(Counts):
    """Counts each record, and notes how far the worker is ahead of the slowest one when it has read."""

    def __init__(self, consistency: Consistency, seen: Staleness) -> None:
        super().__init__(consistency, columns=RECORDS)
        self._seen = seen

    async def open(self, context: Context) -> None:
        await super().open(context)
        self._seen.begun[self.client.worker] = 0

    async def process(self, record: int, out: Output) -> None:
        await self.client.get(MATRIX, row=0, columns=[record])
        begun = self._seen.begun
        self._seen.lead = max(self._seen.lead, begun[self.client.worker] - min(begun.values()))
        await self.client.add(MATRIX, row=0, columns=[record], values=[1.0])
        begun[self.client.worker] += 1
        await self.client.clock(MATRIX)
        out.emit(record)
        for _ in range(20 * (self.client.worker == 1)):  # One worker is slow.
            await asyncio.sleep(0)

    async def finish(self, out: Output) -> None:
        del self._seen.begun[self.client.worker]


class ReadsAtTheEnd(Operator):
    """Emits the row when all workers have ended, as a worker of its own."""

    def __init__(self, server: ParameterServer) -> None:
        self._server = server

    def process(self, record: int, out: Output) -> None:
        pass

    async def finish(self, out: Output) -> None:
        client = self._server.client(worker=99)
        out.emit((await client.get(MATRIX, row=0)).tolist())
        await client.leave()


def watched_flow(consistency: Consistency, seen: Staleness) -> tuple[Flow, Any]:
    flow, server = Flow("f"), ParameterServer(shards=4)
    numbers = flow.from_source(lambda: Dealt(RECORDS), name="numbers", parallelism=3)
    counted = numbers.process(lambda: Watched(consistency, seen), name="count", parameter_server=server)
    return flow, counted.process(lambda: ReadsAtTheEnd(server), name="read", parallelism=1).collect(name="all")


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("consistency", KINDS, ids=repr)
async def test_each_record_counts_once_and_no_worker_is_too_far_ahead(consistency: Consistency, processes: int) -> None:
    """A worker read numbers older than its staleness, because it had not heard of the clocks of another process."""
    seen = Staleness()
    async with asyncio.timeout(PATIENCE_S):
        collected = await run_joined(lambda _: watched_flow(consistency, seen), processes)
    assert collected.items == [[1.0] * RECORDS]
    assert seen.lead <= {BSP(): 1, SSP(staleness=0): 0, SSP(staleness=2): 2}.get(consistency, RECORDS)
    if consistency == SSP(staleness=2):
        assert seen.lead > 0


@pytest.mark.parametrize("processes", [2, 3])
async def test_models_are_equal_to_the_bit_in_any_number_of_processes(processes: int) -> None:
    """A network that was trained in two processes had other weights than in one."""

    def linear(_: int) -> tuple[Flow, Any]:
        flow = Flow("training")
        given = flow.from_items(made_up_rows(120), name="rows")
        options: dict[str, Any] = {"features": 40, "workers": 3, "batch": 10, "epochs": 2}
        training = train_on_parameter_server(given, ParameterServer(shards=2), consistency=BSP(), **options)
        return flow, training.models.collect()

    def of_network(_: int) -> tuple[Flow, Any]:
        flow, data = Flow("training"), rows(90)
        server = ParameterServer(shards=3)
        training = train_network(flow, data, network(), server, consistency=BSP(), validation=data, workers=3)
        return flow, training.models.collect()

    one, several = await run_joined(linear, 1), await run_joined(linear, processes)
    assert one.items[0].parameters["weights"].tolist() == several.items[0].parameters["weights"].tolist()
    one, several = await run_joined(of_network, 1), await run_joined(of_network, processes)
    assert len(one.items) == len(several.items) == 3
    for made, again in zip(one.items, several.items, strict=True):
        assert made.metrics["validation_loss"] == again.metrics["validation_loss"]
        for name, array in arrays_of(made).items():
            assert np.array_equal(array, arrays_of(again)[name])


# -- checkpoints ---------------------------------------------------------------------------------------------


def interrupted(consistency: Consistency, processes: int, folder: Path) -> tuple[JoinedJobs, Any]:
    """Return the jobs of one run, not started, and what they collect."""
    built = [watched_flow(consistency, Staleness()) for _ in range(processes)]
    options = JobOptions(checkpoints=Checkpoints(folder, interval_s=1000.0, alignment_timeout_s=PATIENCE_S))
    return joined_jobs([flow for flow, _ in built], options), built[0][1]


@pytest.mark.parametrize(("before", "after"), [(3, 1), (2, 3), *in_soak((2, 2), (1, 3))])
@pytest.mark.parametrize("consistency", KINDS, ids=repr)
async def test_a_checkpoint_of_all_shards_is_restored_in_another_number_of_processes(
    consistency: Consistency, before: int, after: int, tmp_path: Path
) -> None:
    """The checkpoint had the shards of process 0 only, or requests that a worker had sent behind its barrier."""
    for turns in (3, 151):
        folder = tmp_path / str(turns)
        run, _ = interrupted(consistency, before, folder)
        async with asyncio.timeout(PATIENCE_S):
            await run.start()
            for _ in range(turns):
                await asyncio.sleep(0)
            number = await run.jobs[0].checkpoint()
            await run.abort()
        [header] = [each for each in await CheckpointStore(blobs_at(folder)).list("f") if each.id.number == number]
        stored = await CheckpointStore(blobs_at(folder)).open("f", header.id)
        parts = [name for name in stored.part_names() if name.startswith("service")]
        assert sorted(parts) == [f"service parameter server[{process}]" for process in range(before)]
        stored.close()
        run, collected = interrupted(consistency, after, folder)
        async with asyncio.timeout(PATIENCE_S):
            await run.run()
        assert collected.items == [[1.0] * RECORDS]


async def test_workers_read_again_after_a_checkpoint_that_was_given_up() -> None:
    """The workers of other processes stood still for ever after a checkpoint that timed out."""
    built = [watched_flow(BSP(), Staleness()) for _ in range(2)]
    run = joined_jobs([flow for flow, _ in built])
    await run.start()
    seeking = asyncio.ensure_future(run.jobs[0]._follower.services.stop_reading())
    await until(seeking.done)
    received = [job.statistics().step("count").records_in for job in run.jobs]
    for _ in range(100):
        await asyncio.sleep(0)
    assert [job.statistics().step("count").records_in for job in run.jobs] == received
    assert max(received) < RECORDS
    run.jobs[0]._follower.services.resume_reading()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(job.wait() for job in run.jobs))
    assert built[0][1].items == [[1.0] * RECORDS]


# -- messages ------------------------------------------------------------------------------------------------


async def clients_over_a_link(shards: int = 2) -> tuple[list[ParameterServer], list[Client], Sequence[ProcessLink]]:
    """Return the server in two processes, with a worker in each; their messages go through a link in random pieces."""
    servers = [ParameterServer(shards=shards) for _ in range(2)]
    owners = Owner(), Owner()
    links = [link_of(owner, identity(number)) for number, owner in enumerate(owners)]
    MovingPipe(links[0], links[1], Random(shards))
    clients = []
    for own, server in enumerate(servers):
        owners[own].on_message = lambda _, message, own=own: servers[own].received(1 - own, *message)
        server.divide(own, 2, lambda _, *contents, own=own: links[own].send_message(list(contents)))
        clients += await server.begin_job("f", 2, [], here=[own], has_checkpoints=False)
    return servers, clients, links


async def test_requests_and_replies_pass_a_link_unchanged() -> None:
    """Large arrays of a message were damaged, or belonged to the link's buffer; a get of a cancelled task stayed.

    An add of a cancelled task had what the caller then wrote into its array.
    """
    servers, clients, links = await clients_over_a_link()
    columns = 300_000
    settings: dict[str, Any] = {"rows": 2, "columns": columns, "consistency": BSP()}
    await asyncio.gather(*(client.create_matrix("w", **settings) for client in clients))
    values = np.random.default_rng(0).normal(size=columns)
    for client in clients:
        given = values * (client.worker + 1)
        await client.add("w", row=1, values=given)
        given[:] = np.nan
    links[1].pause_writing()
    given = np.ones(columns)
    adding = asyncio.ensure_future(clients[1].add("w", row=0, values=given))
    await asyncio.sleep(0)
    adding.cancel()
    await asyncio.gather(adding, return_exceptions=True)
    given[:] = np.nan
    links[1].resume_writing()
    for client in clients:
        await client.clock("w")
    for client in clients:
        read = await client.get("w", row=1)
        assert np.array_equal(read, values + values * 2)
        read[:] = 0
        some = [columns - 1, 0, columns // 2]
        assert (await client.get("w", rows=[1, 0], columns=some)).tolist() == [(values[some] * 3).tolist(), [1.0] * 3]
    with pytest.raises(OutOfRange):
        await clients[1].get("w", row=2)
    await clients[0].clock("w")
    waiting = asyncio.ensure_future(clients[0].get("w", row=0))
    for _ in range(50):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await clients[1].clock("w")
    assert len(await clients[0].get("w", row=0)) == columns
    for server in servers:
        await server.end_job(went_well=True)
    with pytest.raises(ShardLost, match=r"shard 1 \(blocks of 'w'\).*process 1, where the shard was"):
        await servers[0].client(worker=7).get("w", row=0)


async def test_a_matrix_of_another_process_is_found_and_what_has_no_name_is_refused() -> None:
    """A worker could not use a matrix that a worker of another process had made."""
    servers, clients, _ = await clients_over_a_link()
    await clients[0].create_matrix("w", rows=1, columns=4, init=[[1.0, 2.0, 3.0, 4.0]])
    assert (await clients[1].get("w", row=0)).tolist() == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ConfigurationError, match="so that another process can import it"):
        await clients[0].update(update_cases.psf.Map("w", 0, 0, lambda x: x + 1))
    with pytest.raises(ParameterServerError, match="several processes"):
        await servers[0].snapshot()


CASES = [case.function for case in itertools.chain(update_cases.CASES, aggregate_cases.CASES)]


@pytest.mark.parametrize("function", CASES, ids=lambda function: type(function).__name__)
def test_functions_reach_another_process_as_plain_data(function: Any) -> None:
    """A function lost a setting on its way, or was pickled."""
    kind: Callable[..., Any] = UpdateRequest if isinstance(function, update_cases.UpdateFunction) else AggregateRequest
    parts: Sequence[Any] = [(0, None), (3, np.arange(3.0))]
    request = importable(kind("w", 0, -1, function=function, parts=parts))
    plain = PlainData()
    arrived = from_plain(plain.decode(plain.encode(to_plain(request))))
    assert type(arrived) is kind
    assert repr(arrived.function) == repr(request.function)  # NaN differs from itself.
    assert arrived.parts[1][1].tolist() == [0.0, 1.0, 2.0]
