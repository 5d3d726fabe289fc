"""A flow in processes on Ray: ``flow.run(on=Ray(4))``.

Without ``address=`` the supervisor is in the program that calls ``run``, and all ends with it. On a cluster it is in a
*detached* actor, which continues without the program and has no objects of the flow. Its name is the name of the flow,
so the next program that runs the flow finds it, and waits for its outcome.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, final

from streamiter.engine.graph.graph import RunnableFlow
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.engine.job.job import StopMode
from streamiter.engine.job.running import OnInterrupt, WhileRunning, stopping_on_signals
from streamiter.engine.plan.placement import Placement, fingerprint
from streamiter.engine.processes.host import LossLimits, PlainOptions, check_topics, limits_of
from streamiter.engine.processes.ray_cluster import RayCluster, Untyped
from streamiter.engine.processes.ray_host import NodeFacts, RayHost, Room, ShippedFlow
from streamiter.engine.processes.supervisor import Attempt, CollectedPart, Supervisor, put_collected, run_supervised
from streamiter.errors import ConfigurationError, ProcessLost
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.clock import SystemClock
from streamiter.values.numbers import one_of, positive, whole_number
from streamiter.values.plain_errors import error_from_plain, error_to_plain
from streamiter.values.times import Seconds, in_seconds

_log = logging.getLogger("streamiter.processes")

_NAMESPACE: Final = "streamiter"
"""The namespace of the detached actors in Ray."""

# The supervisor is on the node of Ray's own tables, without which there is no cluster: so the loss of another node is
# never the loss of the supervisor, which Ray would start again only when it has noted the loss.
_HEAD: Final = {"node:__internal_head__": 0.001}

# Ray keeps arguments of up to 100 KB with an actor, in all 10 MB, so that it can start the actor again when the program
# that has made it is gone. A larger argument would be lost with the program.
_ARGUMENT_BYTES: Final = 90_000
_FLOW_BYTES_MAX: Final = 8 << 20


@final
@dataclass(frozen=True, slots=True)
class Ray(LossLimits):
    """Runs a flow in processes on Ray: ``flow.run(on=Ray(4))``, or ``on=Ray(16, address="auto")`` on a cluster.

    The flow is sent in Ray's serialization: functions of the program by value, functions of modules by name. So
    each node needs the modules that the program imports: installed, or by ``runtime_env``. Before the flow starts,
    each node is asked whether it has the same versions and can load the flow. Records do not go through Ray, but
    over connections between the processes; they must be plain data, and the network of the cluster must be trusted.

    Without ``address`` Ray is started on this machine, and ends with the program; a program that has called
    ``ray.init`` uses that Ray. On a cluster the flow runs on when the program ends: the next ``run`` of the same flow
    waits for the flow that runs. SIGTERM and Ctrl-C stop it there, as on one machine.

    If a process is lost (killed, its node gone, or stopped for ``silence_s``), all are ended; with
    ``checkpoints`` in a folder or object store that all nodes see they start again from the last checkpoint, at most
    ``losses_max`` times.

    >>> Ray(4, cpus=0.5)
    Ray(processes=4, address=None, min_processes=None, cpus=0.5, resources=None, placement='spread', ...)
    """

    processes: int
    """The number of processes."""
    address: str | None = None
    """The address of a cluster: "auto" for the cluster of this machine, or host:port. None: Ray on this machine."""
    min_processes: int | None = None
    """With how few processes the flow may run if the cluster has no room for all; None: it waits for room for all."""
    cpus: float = 1.0
    """The CPUs that Ray reserves for each process."""
    resources: Mapping[str, float] | None = None
    """Further resources of Ray that each process needs, such as {"GPU": 1}."""
    placement: Literal["spread", "pack"] = "spread"
    """Whether the processes use many nodes, or few."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray's description of what a process needs, such as {"working_dir": ".", "pip": ["river"]}."""
    wait_s: Seconds = 60.0
    """How long the flow waits for room on the cluster, in seconds, or as a ``timedelta``."""
    flow: str | None = None
    """The flow as ``module:name``: each process imports it. None, or ``file.py:name``: it is sent to all processes."""

    def __post_init__(self) -> None:
        LossLimits.__post_init__(self)
        whole_number("Ray: processes", self.processes, 1)
        if self.min_processes is not None:
            whole_number("Ray: min_processes", self.min_processes, 1, self.processes)
        positive("Ray: cpus", self.cpus)
        one_of("Ray: placement", self.placement, "spread", "pack")

    def __repr__(self) -> str:
        return (
            f"Ray(processes={self.processes}, address={self.address!r}, min_processes={self.min_processes}, "
            f"cpus={self.cpus:g}, resources={self.resources}, placement={self.placement!r}, ...)"
        )

    async def _run_flow(
        self, flow: RunnableFlow, options: Mapping[str, Any], first: OnInterrupt, while_running: WhileRunning[Attempt]
    ) -> JobStatistics:
        """Run the flow to its end, or wait for the end of the flow that runs on the cluster.

        ``while_running`` has no effect on a cluster, where the program may come and go.
        """
        check_topics(flow, many_machines=self.address is not None)
        plain, limits = PlainOptions.of(flow.name, options), limits_of(self)
        cluster = await asyncio.to_thread(RayCluster, f"flow {flow.name!r}, on=Ray(…)", self.address, self.runtime_env)
        room = self._room(None if cluster.has_runtime_env else self.runtime_env)
        try:
            shipped = _shipped(cluster.ray, flow, self.flow)
            if self.address is None:
                host = RayHost(cluster.ray, room, shipped, NodeFacts.here())
                try:
                    given = flow, self.flow or "", host, options, first, while_running, limits
                    return await run_supervised(*given)
                finally:
                    host.release()
            run = _ClusterRun(flow.name, fingerprint(flow.name, flow.steps), plain, limits, room, NodeFacts.here())
            outcome = await _on_cluster(cluster.ray, run, shipped, first)
        finally:
            await asyncio.to_thread(cluster.close)
        if outcome.failure is not None:
            raise error_from_plain(outcome.failure)
        put_collected(flow, outcome.collected)
        assert outcome.statistics is not None
        return outcome.statistics

    def _room(self, runtime_env: Mapping[str, Any] | None) -> Room:
        return Room(
            self.processes,
            self.min_processes or self.processes,
            self.cpus,
            self.resources or {},
            self.placement.upper(),
            in_seconds(self.wait_s),
            self.address is not None,
            runtime_env,
        )


def _shipped(ray: Untyped, flow: RunnableFlow, reference: str | None) -> ShippedFlow:
    """Return what each process is sent. Functions of ``file.py`` go by value, as nodes may not have the file."""
    file = reference.rpartition(":")[0] if reference is not None else ""
    if reference is not None and not file.endswith(".py"):
        return ShippedFlow(flow.name, reference)
    module = sys.modules.get(Path(file).stem)
    try:
        if module is not None:
            ray.cloudpickle.register_pickle_by_value(module)
        try:
            return ShippedFlow(flow.name, None, ray.cloudpickle.dumps(flow))
        finally:
            if module is not None:
                ray.cloudpickle.unregister_pickle_by_value(module)
    except Exception as error:
        raise ConfigurationError(
            f"flow {flow.name!r}: expected a flow that Ray can send to other processes, given {type(error).__name__}: "
            f"{error}; open connections and files inside of operators, or have the processes import the flow: "
            'on=Ray(…, flow="module:flow")'
        ) from error


# -- on a cluster --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ClusterRun:
    """What the supervisor on a cluster is given."""

    flow: str
    """The name of the flow."""
    fingerprint: str
    options: PlainOptions
    limits: LossLimits
    room: Room
    facts: NodeFacts
    """The versions of the program that has started the run."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class _State(NamedTuple):
    """The state of a supervisor on a cluster."""

    run: _ClusterRun
    is_over: bool
    process_id: int
    """The process of the supervisor."""


class _Outcome(NamedTuple):
    """The end of a run on a cluster."""

    statistics: JobStatistics | None
    collected: list[CollectedPart]
    failure: PlainValue
    """The error of the run; None if it has ended well."""


async def _on_cluster(ray: Untyped, run: _ClusterRun, shipped: ShippedFlow, first: OnInterrupt) -> _Outcome:
    """Start the run, or find it; return its outcome."""
    actor = await _supervisor(ray, run, shipped)
    try:
        with stopping_on_signals(actor.stop.remote, first=first):
            outcome: _Outcome = await actor.outcome.remote()
    except ray.exceptions.RayActorError as error:
        raise ProcessLost(
            f"flow {run.flow!r}: expected its supervisor on the cluster to live, given its end: "
            f"{str(error).strip().splitlines()[-1]}; run the flow again: it resumes from the last checkpoint"
        ) from error
    await _end(ray, actor, run.flow)
    return outcome


async def _supervisor(ray: Untyped, run: _ClusterRun, shipped: ShippedFlow) -> Untyped:
    """Return the actor of the supervisor: a new one, or the actor of the same flow that runs already."""
    pickled, size = shipped.pickled, len(shipped.pickled)
    if size > _FLOW_BYTES_MAX:
        raise ConfigurationError(
            f"flow {run.flow!r}: expected a flow of at most {_FLOW_BYTES_MAX >> 20} MiB on a cluster, given "
            f"{size >> 20} MiB; read large inputs from topics or files instead of from_items"
        )
    chunks = [pickled[start : start + _ARGUMENT_BYTES] for start in range(0, size, _ARGUMENT_BYTES)]
    env = {} if run.room.runtime_env is None else {"runtime_env": dict(run.room.runtime_env)}
    made = ray.remote(_SupervisorActor).options(
        name=run.flow, namespace=_NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0, max_restarts=-1,
        max_task_retries=-1, resources=_HEAD, **env,
    )  # fmt: skip
    while True:
        actor = made.remote(run, shipped.reference, *chunks)
        found, is_over, process_id = await actor.state.remote()
        if found.id == run.id:
            return actor
        if found.fingerprint == run.fingerprint:
            _log.warning(
                "flow %r runs on the cluster already, in %d processes (supervisor: process %d): waiting for its end",
                run.flow,
                found.room.processes,
                process_id,
            )
            return actor
        if not is_over:
            raise ConfigurationError(
                f"flow {run.flow!r}: expected no other flow of this name on the cluster, given one whose steps differ; "
                "give this flow another name, or stop the other one: run its program again and press Ctrl-C, or end it "
                f'with ray.kill(ray.get_actor({run.flow!r}, namespace="{_NAMESPACE}"))'
            )
        await _end(ray, actor, run.flow)  # No program has fetched the outcome of this older flow.


async def _end(ray: Untyped, actor: Untyped, name: str) -> None:
    """End a supervisor; return when its name is free, some milliseconds later: the next run must not find it."""
    ray.kill(actor)
    while {"namespace": _NAMESPACE, "name": name} in ray.util.list_named_actors(all_namespaces=True):
        await SystemClock().sleep(0.05)


class _SupervisorActor:
    """The supervisor of a run on a cluster. When its process is lost, Ray starts it again with the same arguments."""

    def __init__(self, run: _ClusterRun, reference: str | None, *chunks: bytes) -> None:
        import ray

        self._ray = ray
        self._run = run
        shipped = ShippedFlow(run.flow, reference, b"".join(chunks))
        self._host = RayHost(ray, run.room, shipped, run.facts)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # within Ray
            self._is_again = ray.get_runtime_context().was_current_actor_reconstructed
        run_id = f"{run.id}-{uuid.uuid4().hex}" if self._is_again else run.id
        self._supervisor = Supervisor(
            run.flow, reference or "", self._host, run.options, self._check, run=run_id, limits=run.limits
        )
        self._outcome = asyncio.get_running_loop().create_task(self._run_to_end(), name=f"flow {run.flow}")

    def __repr__(self) -> str:
        return f"supervisor of {self._run.flow}"

    async def state(self) -> _State:
        """Return what runs here."""
        return _State(self._run, self._outcome.done(), os.getpid())

    async def outcome(self) -> _Outcome:
        """Wait for the end of the run."""
        return await asyncio.shield(self._outcome)

    async def stop(self, mode: StopMode) -> None:
        """Stop the run."""
        await self._supervisor.stop_on_signal(mode)

    async def _run_to_end(self) -> _Outcome:
        try:
            if self._is_again:
                self._check_can_resume()
            return _Outcome(await self._supervisor.run(), self._supervisor.collected, None)
        except Exception as error:
            return _Outcome(None, [], error_to_plain(error))
        finally:
            self._host.release()

    def _check_can_resume(self) -> None:
        what, options = f"flow {self._run.flow!r}: its supervisor was lost", self._run.options
        if options.checkpoints is None:
            raise ProcessLost(
                f"{what}; the results of this run are incomplete, so run the flow again. With checkpoints= it would "
                "resume by itself"
            )
        if options.restore != "last":
            raise ProcessLost(
                f"{what}, and it is unknown whether the run began with restore={options.restore!r} before; "
                'run the flow again, with restore="last" if "streamiter checkpoints list" shows checkpoints of this run'
            )
        if options.changed_steps and options.checkpoints["store"] is None:
            raise ProcessLost(
                f"{what}, and it is unknown whether the run has committed positions of {list(options.changed_steps)}; "
                "run the flow again, without changed_steps= if it has"
            )

    def _check(self, placement: Placement) -> None:
        if placement.fingerprint != self._run.fingerprint:
            raise ConfigurationError(
                f"flow {self._run.flow!r}: expected the flow of the program that has started the run, given another in "
                "process 0; give all nodes the same files"
            )
