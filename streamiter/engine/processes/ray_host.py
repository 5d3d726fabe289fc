"""Ray as the host of a flow's processes: it places an actor for each, and says when one has died.

No records and no messages go through Ray. An actor runs the part of its process as a single call, in its main thread,
in an event loop of its own; the call ends when the process does.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final, NamedTuple, final

import msgspec
import numpy as np

from streamiter.engine.graph.graph import RunnableFlow
from streamiter.engine.job.running import run_in_own_loop
from streamiter.engine.processes.host import ProcessSettings
from streamiter.engine.processes.link import Address
from streamiter.engine.processes.process import load_referenced, run_process
from streamiter.engine.processes.ray_cluster import Untyped, imported_ray
from streamiter.engine.processes.silence import ProcessLook, look_at_process
from streamiter.errors import ConfigurationError

_log = logging.getLogger("streamiter.processes")

# How often the cluster is asked whether it has room, and how long a node may take to accept a connection.
_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Room:
    """The room that the processes of a flow need on a cluster."""

    processes: int
    min_processes: int
    cpus: float
    resources: Mapping[str, float]
    strategy: str
    wait_s: float
    may_grow: bool
    """Whether nodes may join while the flow waits."""
    runtime_env: Mapping[str, Any] | None

    @property
    def of_one(self) -> dict[str, float]:
        """The resources of one process."""
        return {"CPU": self.cpus, **self.resources}

    def fitting(self, nodes: list[dict[str, Any]]) -> int:
        """Return how many processes fit on the nodes that are alive, if nothing else ran there.

        >>> room = Room(4, 1, 2.0, {}, "SPREAD", 60.0, True, None)
        >>> room.fitting([{"Alive": True, "Resources": {"CPU": 5.0}}, {"Alive": False, "Resources": {"CPU": 8.0}}])
        2
        """
        return sum(
            int(min(node["Resources"].get(name, 0.0) // each for name, each in self.of_one.items()))
            for node in nodes
            if node["Alive"]
        )

    def missing(self, nodes: list[dict[str, Any]]) -> str:
        """Return the end of an error: what is needed, and what is there."""
        needed = " and ".join(f"{each:g} {name}" for name, each in self.of_one.items())
        there = ", ".join(
            f"{node['NodeManagerAddress']}: "
            + " and ".join(f"{node['Resources'].get(name, 0.0):g} {name}" for name in self.of_one)
            for node in nodes
            if node["Alive"]
        )
        return f"expected room for {self.processes} processes with {needed} each, given the nodes {there or 'none'}"


class NodeFacts(NamedTuple):
    """What must be the same on all nodes, and whether the flow can be loaded there."""

    python: str
    streamiter: str
    numpy: str
    node: str = ""
    """The address of the node."""
    problem: str = ""
    """Why the flow cannot be loaded; empty if it can be."""

    @classmethod
    def here(cls, node: str = "", problem: str = "") -> NodeFacts:
        """Return the facts of this process."""
        python = ".".join(platform.python_version_tuple()[:2])
        return cls(python, version("streamiter"), np.__version__, node, problem)

    def check(self, flow: str, found: NodeFacts) -> None:
        """Raise ConfigurationError if another process differs from this one, or could not load the flow."""
        for what in ("streamiter", "numpy", "Python"):
            expected, given = getattr(self, what.lower()), getattr(found, what.lower())
            if given != expected:
                to_do = "install this version there"
                if what != "Python":
                    to_do += f', or give on=Ray(…, runtime_env={{"pip": ["{what}=={expected}"]}})'
                raise ConfigurationError(
                    f"flow {flow!r}: expected {what} {expected} on all nodes, as in this program, given {what} "
                    f"{given} on node {found.node}; {to_do}"
                )
        if found.problem:
            raise ConfigurationError(
                f"flow {flow!r}: expected to load the flow on node {found.node}, given {found.problem}; install the "
                'missing package there, or give on=Ray(…, runtime_env={"pip": ["package"]}); for modules beside the '
                'program give runtime_env={"working_dir": "."}'
            )


@dataclass(frozen=True, slots=True)
class ShippedFlow:
    """How a process gets the flow."""

    name: str
    reference: str | None
    """``module:flow``, which each process imports; None: ``pickled``."""
    pickled: bytes = field(repr=False, default=b"")
    """The flow in Ray's serialization, the same for all processes."""

    def load(self, ray: Untyped) -> RunnableFlow:
        """Return the flow. A run that its program would start is refused meanwhile."""
        if self.reference is not None:
            return load_referenced(self.reference)
        flow: RunnableFlow = ray.cloudpickle.loads(self.pickled)
        return flow


class _RayProcess:
    """One process of a flow: an actor whose main thread runs the part of this process."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._flow: RunnableFlow | None = None

    def __repr__(self) -> str:  # Ray writes it before each line of the log.
        return f"process {self._number}"

    def look(self, shipped: ShippedFlow) -> NodeFacts:
        """Load the flow; return the versions here, and why it cannot be loaded."""
        ray = imported_ray(repr(self))
        problem = ""
        try:
            self._flow = shipped.load(ray)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        return NodeFacts.here(ray.util.get_node_ip_address(), problem)

    def run(self, settings: ProcessSettings) -> None:
        """Do the part of this process in an attempt."""
        flow = self._flow
        assert flow is not None
        listen = (imported_ray(repr(self)).util.get_node_ip_address(), 0)
        run_in_own_loop(run_process(msgspec.structs.replace(settings, listen=listen), lambda: flow))


@final
class RayHost:
    """Starts the processes of a run in actors of a placement group, which is made for each attempt."""

    def __init__(self, ray: Untyped, room: Room, shipped: ShippedFlow, expected: NodeFacts) -> None:
        self._ray = ray
        self._room = room
        self._shipped = shipped
        self._expected = expected
        self._group: Untyped = None
        self._actors: list[Untyped] = []

    def address(self, name: str) -> Address:
        return self._ray.util.get_node_ip_address(), 0

    # -- room ------------------------------------------------------------------------------------------

    async def room(self) -> int:
        """Reserve room for the processes of an attempt; return their number, which may be smaller after a loss.

        Raises ConfigurationError if there is no room in time.
        """
        room = self._room
        self.release()
        until_s, has_told, size, avoided = time.monotonic() + room.wait_s, False, 0, ""
        while True:
            nodes = await self._nodes()
            silent = ", ".join(node["NodeID"] for node in nodes if not node["Alive"])
            fitting = room.fitting(nodes)
            # Ray starts further nodes only for a group that waits for them.
            goal = fitting if room.min_processes <= fitting < room.processes else room.processes
            if (goal, silent) != (size, avoided):
                self.release()
                size, avoided = goal, silent
                self._group = self._ray.util.placement_group(
                    [room.of_one] * size,
                    strategy=room.strategy,
                    bundle_label_selector=[{"ray.io/node-id": f"!in({avoided})"}] * size if avoided else None,
                )
            if await asyncio.to_thread(self._group.wait, _LOOK_S):
                if size < room.processes:
                    _log.warning("flow %r: starting %d processes: %s", self._shipped.name, size, room.missing(nodes))
                return size
            is_too_small = fitting < room.min_processes and not room.may_grow
            if is_too_small or time.monotonic() > until_s:
                self.release()
                raise ConfigurationError(
                    f"flow {self._shipped.name!r}: {room.missing(nodes)}"
                    f"{'' if is_too_small else f', after {room.wait_s:g} s'}; start fewer processes, give cpus= below "
                    "1, add nodes, or end other programs on the cluster"
                )
            if not has_told:
                has_told = True
                _log.warning(
                    "flow %r: %s; waiting up to %g s for more nodes, or for the end of other programs",
                    self._shipped.name,
                    room.missing(nodes),
                    room.wait_s,
                )

    async def _nodes(self) -> list[dict[str, Any]]:
        """Return the nodes of the cluster; a node that does not answer is not alive.

        Ray itself notes a lost node after 12 to 15 s, or after a minute if its machine is gone.
        """
        nodes = [node for node in await asyncio.to_thread(self._ray.nodes) if node["Alive"]]
        answers = await asyncio.gather(*map(_answers, nodes))
        return [{**node, "Alive": answer} for node, answer in zip(nodes, answers, strict=True)]

    def release(self) -> None:
        """Give back the room of an attempt."""
        if self._group is not None and self._ray.is_initialized():
            self._ray.util.remove_placement_group(self._group)
        self._group = None

    # -- processes -------------------------------------------------------------------------------------

    async def start(self, settings: ProcessSettings) -> _HostedActor:
        if settings.number == 0:
            await self._make_actors(settings.processes)
        actor = self._actors[settings.number]
        return _HostedActor(self._ray, actor, actor.run.remote(settings), self._look_from(settings.number))

    def _look_from(self, number: int) -> Untyped:
        """Return the task that looks at a process, from another one on the same node."""
        nodes = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(nodes[number], soft=False)
        env = self._room.runtime_env
        return self._ray.remote(look_at_process).options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=strategy,
            **({} if env is None else {"runtime_env": dict(env)}),
        )

    async def _make_actors(self, processes: int) -> None:
        """Start all actors at once, and check what is installed on their nodes."""
        placed = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        env = self._room.runtime_env
        self._actors = [
            self._ray.remote(_RayProcess)
            .options(
                num_cpus=self._room.cpus,
                resources=dict(self._room.resources),
                max_restarts=0,
                scheduling_strategy=placed(self._group, placement_group_bundle_index=number),
                **({} if env is None else {"runtime_env": dict(env)}),
            )
            .remote(number)
            for number in range(processes)
        ]
        shipped = self._ray.put(self._shipped)
        looks = [actor.look.remote(shipped) for actor in self._actors]
        try:
            for look in looks:
                if (facts := await self._facts(look)) is not None:
                    self._expected.check(self._shipped.name, facts)
        except BaseException:
            for actor in self._actors:
                self._ray.kill(actor)
            raise

    async def _facts(self, look: Untyped) -> NodeFacts | None:
        """Return the facts of a node; None if the process has died, which the end of its run tells again."""
        errors = self._ray.exceptions
        try:
            facts: NodeFacts = await look
        except errors.RayActorError as error:
            if not error.actor_init_failed:
                return None
            cause: Exception = error
        except (errors.RuntimeEnvSetupError, errors.RayTaskError) as error:
            cause = error
        else:
            return facts
        raise ConfigurationError(
            f"flow {self._shipped.name!r}: expected processes that Ray can start, given {cause}; install streamiter of "
            "this version on all nodes, or correct on=Ray(…, runtime_env=…)"
        ) from cause


@final
class _HostedActor:
    """The process of an actor."""

    def __init__(self, ray: Untyped, actor: Untyped, run: Untyped, look: Untyped) -> None:
        self._ray = ray
        self._actor = actor
        self._run = run
        self._look = look

    def kill(self) -> None:
        if self._ray.is_initialized():
            self._ray.kill(self._actor)

    async def look(self, process: int, note: int) -> ProcessLook | None:
        try:
            look: ProcessLook | None = await self._look.remote(process, note)
        except self._ray.exceptions.RayError:  # The node is gone, or refuses.
            return None
        return look

    async def ended(self) -> str:
        try:
            await self._run
        except self._ray.exceptions.RayError as error:
            return _in_short(error)
        self.kill()  # An actor lives on when its call has returned.
        return "it has ended"


async def _answers(node: dict[str, Any]) -> bool:
    """Return whether Ray accepts connections on a node."""
    try:
        async with asyncio.timeout(_LOOK_S):
            _, writer = await asyncio.open_connection(node["NodeManagerAddress"], node["NodeManagerPort"])
    except OSError:  # also TimeoutError
        return False
    writer.close()
    return True


def _in_short(error: BaseException) -> str:
    """Return the reason that Ray gives for the end of an actor, without its address and its advice."""
    reason = str(error).partition("The actor is dead because ")[2] or str(error).strip().splitlines()[-1]
    return f"Ray says: {reason.partition('Some common causes')[0].strip()}"
