"""A flow on a Ray cluster whose processes and nodes are killed has the outputs of a flow that was never killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final

import pytest
from crash.cases import Case, trainer, training_pieces
from crash.feed import Feed
from crash.programs import running
from crash.test_kill_9 import seed
from crash.test_killed_processes import EVENTS, PARTITIONS, check_counts, check_sums, check_training, kafka
from support.ray_fixtures import TESTS, children, raylet_of
from support.waiting import PATIENCE_S

__all__ = ["kafka"]

# The supervisor gives up after three losses in ten minutes. The end of a node may be two, since Ray notes it late.
_KILLS_MAX: Final = 2
_LIVES_FOR_S_MAX: Final = 4.0
_NODE: Final = {"num_cpus": 2, "object_store_memory": 80 << 20}


class Victims:
    """The processes of a cluster of two nodes that may be killed; the first node must survive."""

    def __init__(self, cluster: Any, random: Random) -> None:
        self._cluster = cluster
        self._random = random
        self._second = cluster.add_node(**_NODE)

    def kill(self) -> tuple[str, bool]:
        """Kill a process of the flow, the supervisor, or the second node; return what, and if the flow was on it."""
        what = self._random.choice(["process", "process", "supervisor", "node"])
        word = "ray::_SupervisorActor" if what == "supervisor" else "ray::_RayProcess"
        raylets = [raylet_of(self._cluster.head_node), raylet_of(self._second)]
        names = children(raylets[1]) if what == "node" else children(raylets[0]) | children(raylets[1])
        found = sorted(number for number, name in names.items() if name.startswith(word))
        killed = [raylets[1], *names] if what == "node" else self._random.sample(found, min(len(found), 1))
        for number in killed:
            os.kill(number, signal.SIGKILL)
        if what == "node":
            self._second = self._cluster.add_node(**_NODE)
        return f"{what} {killed}", bool(found)


async def killed(case: Case, cluster: Any, random: Random, done: list[str], **options: Any) -> None:
    """Run a flow on a cluster whose processes are killed, then to its end here; ``done`` gets what was killed."""
    feed = Feed(case.topic("events"), training_pieces(EVENTS, PARTITIONS))
    victims = Victims(cluster, random)
    given = {"mode": "asynchronous", "parallelism": 3, **options}
    # One process on each node: a node is replaced, or the flow goes on with one process.
    on_ray = {"ray": cluster.address, "min_processes": random.choice([1, 2])}
    ray = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    program = trainer(case, "killed", **given, processes=2, **on_ray, changed_steps=["events"])
    async with running(program.given(PYTHONPATH=str(TESTS), **ray)) as process:
        feeding = asyncio.create_task(feed.during(lambda: process.is_over, 1))
        await process.reaches(process.has_committed)
        for _ in range(random.randint(1, _KILLS_MAX)):
            await process.lives_for(random.random() * _LIVES_FOR_S_MAX)
            before = program.record().committed_run
            what, is_lost = victims.kill()
            done.append(what)
            if not is_lost:  # The flow was between two attempts, or not on that node.
                continue
            await process.reaches(lambda before=before: program.record().committed_run != before, 2 * PATIENCE_S)
        await feeding
        process.send(signal.SIGTERM)
        code, printed = await process.ends()
    assert code == 0, printed
    await feed.rest()
    async with running(trainer(case, "killed", **given, processes=3, stop="latest")) as process:
        code, printed = await process.ends()
    assert code == 0, printed


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "check"),
    [({"kind": "sums"}, check_sums), ({"kind": "counts"}, check_counts), ({"mode": "synchronous"}, check_training)],
    ids=["sums", "parameter server", "synchronous loop"],
)
async def test_a_flow_on_a_cluster_survives_any_kills(
    cluster: Any, kafka: Case, options: dict[str, Any], check: Callable[[Case], Awaitable[None]]
) -> None:
    """Only one loss of a node was tested, at one moment, and no output was compared after it."""
    random, done = Random(f"{seed()} {options}"), list[str]()
    try:
        await killed(kafka, cluster, random, done, **options)
        await check(kafka)
    except BaseException as error:
        error.add_note(f"again: make soak SEED={seed()}; killed: {done}")
        raise
