"""The statistics of every kind of job are a JSON document at any time."""

import asyncio
import dataclasses
import json
import math
from typing import Any

import orjson
import pytest
from restore import iteration_cases, learner_cases, model_cases, operator_cases, parameter_server_cases, topic_cases
from restore.case import Case
from simulation.flows import FLOWS, MakeFlow, bulk_synchronous_server
from simulation.flows_with_loops import per_round_operators
from simulation.flows_without_loops import history_first
from simulation.simulation_runs import settle_s
from support.soak import in_soak

from streamiter import Flow
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.engine.job.job import Job
from streamiter.testing import simulate
from streamiter.topics import MemoryBroker, OutgoingBatch

CASES: dict[str, Case] = {
    case.name: case
    for module in (operator_cases, iteration_cases, learner_cases, model_cases, topic_cases, parameter_server_cases)
    for case in module.CASES
}


def checked(statistics: JobStatistics) -> JobStatistics:
    """Return the statistics, after a check that their JSON has the same content."""
    document = dataclasses.asdict(statistics)
    as_read = _as_read(document, "statistics")
    assert json.loads(json.dumps(document, allow_nan=False)) == as_read
    assert orjson.loads(orjson.dumps(document)) == as_read
    assert orjson.loads(orjson.dumps(statistics)) == as_read
    return statistics


def _as_read(value: Any, path: str) -> Any:
    """Return the value as JSON returns it, without tuples; raise an error for any other change."""
    if type(value) is dict:
        assert all(type(key) is str for key in value), f"{path} has keys that are no texts: {list(value)[:3]}"
        return {key: _as_read(part, f"{path}.{key}") for key, part in value.items()}
    if type(value) in (list, tuple):
        return [_as_read(part, f"{path}[{place}]") for place, part in enumerate(value)]
    assert value is None or type(value) in (str, int, bool, float), f"{path} is a {type(value).__name__}"
    assert not isinstance(value, float) or math.isfinite(value), f"{path} is {value}"
    return value


# In these, the statistics have all fields that they have in any case or flow, and each type of value.
COVERING = ("bounded_with_criteria", "parameter_server_training-BSP", "timed_joins", "memory_source")


@pytest.mark.parametrize("name", [*COVERING, *in_soak(*(name for name in CASES if name not in COVERING))])
def test_the_statistics_of_every_kind_of_job_are_json(name: str) -> None:
    """A service could not log the statistics of one kind of job, from operators to parameter servers, as JSON."""
    flow = Flow("job")
    CASES[name].build(flow)
    asyncio.run(_run_checked(flow))


async def _run_checked(flow: Flow) -> None:
    job = await flow.start()
    checked(job.statistics())
    ended = asyncio.create_task(job.wait())
    turns = 0
    while not ended.done():
        turns += 1
        if turns.bit_count() == 1:  # The interval between the checked turns grows.
            checked(job.statistics())
        await asyncio.sleep(0)
    assert checked(await ended).state == "finished"
    checked(job.statistics())


COVERING_FLOWS = (per_round_operators, bulk_synchronous_server, history_first)


@pytest.mark.parametrize("flow", [*COVERING_FLOWS, *in_soak(*(each for each in FLOWS if each not in COVERING_FLOWS))])
def test_the_statistics_of_a_job_with_checkpoints_are_json(flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics were no JSON before the start, after a commit, after a restart, or with several partitions."""
    jobs: list[Job] = []
    start = Job.start

    async def observed_start(job: Job, *arguments: Any) -> None:
        checked(job.statistics())
        jobs.append(job)
        await start(job, *arguments)

    monkeypatch.setattr(Job, "start", observed_start)

    def look(_: object) -> None:
        checked(jobs[-1].statistics())

    simulate(flow, 1, check=look, settle_s=settle_s(flow))  # undisturbed, and then under faults
    for job in jobs:
        checked(job.statistics())


async def test_the_lag_of_each_partition_is_in_the_json() -> None:
    """The lag was a mapping that neither asdict nor json accepts, with keys that JSON does not have."""
    clicks = MemoryBroker().topic("clicks")
    await clicks.create(partitions=2)
    writer = await clicks.open_writer()
    for partition, records in ((0, 3), (1, 1)):
        await writer.write(OutgoingBatch([b"1"] * records, partition=partition))
    await writer.close()
    flow = Flow("lag")
    flow.source(clicks, stop="latest").collect()
    job = await flow.start()
    assert json.loads(json.dumps(dataclasses.asdict(job.statistics())))["tasks"][0]["lag"] == {"0": 3, "1": 1}
    assert checked(await job.wait()).tasks[0].lag == {"0": 0, "1": 0}
