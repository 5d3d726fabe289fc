"""Each option in seconds takes a ``timedelta`` as well, with the same effect."""

import asyncio
import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from test_public_names import NAMES

from streamiter import Checkpoints, Flow, LocalProcesses, Ray, epochs_every, hopping, session, sliding, topic, tumbling
from streamiter.engine.processes.host import PlainOptions
from streamiter.flow.stream import Stream
from streamiter.learn import (
    DelayedLabels,
    Embeddings,
    PublishSchedule,
    online_k_means,
    online_standard_scaler,
    train_online,
)
from streamiter.learn.late_labels.label_join import LabelJoin
from streamiter.models import ServedModel
from streamiter.operators import Context, KeyedState, MapAsync, MiniBatch, Operator, Output, Source, SourceBatch
from streamiter.parameter_server import Admission, ParameterServer
from streamiter.service.settings import tables as settings
from streamiter.testing import (
    RestoreMismatch,
    Simulation,
    SimulationFailed,
    VirtualClock,
    check_flow_restore,
    check_restore,
    simulate,
)
from streamiter.topics import MemoryBroker

Seconds = float | timedelta

NO_OPTIONS = {
    "MemoryTopic.open_transactions(timeout_s)": "the engine calls it",
    "Topic.open_transactions(timeout_s)": "the engine calls it",
    "ReadRequest(refresh_s)": "the engine makes it",
    "Prediction(age_s)": "a result",
    "ServedModelStatistics(age_s)": "a result",
    "SimulationResult(elapsed_s)": "a result",
}

# Two numbers that all of these options allow.
FIRST, SECOND = 2.0, 3.0


def plain(value: Any, depth: int = 6) -> Any:
    """Return the numbers and texts in an object, and in those that it has."""
    if value is None or isinstance(value, (bool, int, float, str, timedelta)):
        return repr(value)
    if depth == 0:
        return type(value).__name__
    if isinstance(value, dict):
        return {str(key): plain(each, depth - 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, depth - 1) for each in value]
    if inspect.isfunction(value):
        return [plain(cell.cell_contents, depth - 1) for cell in value.__closure__ or ()]
    names = [*getattr(value, "__dict__", ()), *(getattr(type(value), "__slots__", None) or ())]
    return {name: plain(getattr(value, name, None), depth - 1) for name in names if name not in ("flow", "upstream")}


def steps(build: Callable[[Stream], object]) -> Any:
    """Return what the steps of a flow are made of."""
    flow = Flow("f")
    build(flow.from_items([{"at": 1, "x": 1.0, "y": True}]))
    return [
        (plain(step.keys and step.keys.time_to_live_s), plain((step.source or step.factory)())) for step in flow.steps
    ]


def keyed(build: Callable[[Any], object]) -> Any:
    return steps(lambda stream: build(stream.event_time("at", unit="s").key_by("x")))


def joined(**labels: Any) -> Any:
    return plain(
        LabelJoin(DelayedLabels(key_of="at", target_of=bool, is_answer=bool, features=["x"], **labels), is_timed=False),
        1,
    )


async def same(record: Any) -> Any:
    return record


def waited(call: Callable[[ServedModel], Any]) -> list[float]:
    """Return how long calls of a served model wait."""
    given: list[float] = []

    async def wait(timeout_s: float) -> None:
        given.append(timeout_s)

    async def run() -> None:
        async with ServedModel(await made(), "m") as model:
            model._waiting.wait = model._follower.searched = wait  # type: ignore[method-assign]
            with contextlib.suppress(Exception):
                await call(model)

    async def made() -> Any:
        updates = MemoryBroker().topic("updates")
        await updates.create()
        return updates

    asyncio.run(run())
    return given


def advanced(seconds: Seconds) -> float:
    clock = VirtualClock()
    asyncio.run(clock.advance(seconds))
    return clock.monotonic_s()


async def slept(seconds: Seconds) -> float:
    clock = VirtualClock()
    sleeping = asyncio.create_task(clock.sleep(seconds))
    await asyncio.sleep(0)
    while not sleeping.done():
        await clock.advance(0.5)
    return clock.monotonic_s()


def timer(seconds: Seconds) -> list[float]:
    given: list[float] = []
    unused: Any = None
    context = Context(
        name="s", subtask_index=0, parallelism=1, clock=VirtualClock(), progress=unused, statistics=unused,
        scope=unused, post=unused, set_timer=lambda delay_s, payload, key: given.append(delay_s), in_iteration=False,
        keyed=None, encode=unused,
    )  # fmt: skip
    context.set_timer(seconds)
    return given


SEEN: list[tuple[float, Any]] = []


class Notes(Operator):
    """Notes when its records come, and the state of their key."""

    def open(self, context: Context) -> None:
        self.context = context

    def process(self, record: int, out: Output) -> None:
        SEEN.append((self.context.clock.monotonic_s(), dict(self.context.state)))
        self.context.state["last"] = record


class Numbers(Source):
    """Four batches of a record each."""

    def open(self, context: Context, positions: dict[str, int] | None) -> None:
        self.number = (positions or {}).get("number", 0)

    def read(self) -> SourceBatch | None:
        self.number += 1
        return None if self.number > 4 else SourceBatch([self.number], {"number": self.number})


def key_of(record: int) -> int:
    return 0


def noted(flow: Flow) -> Stream:
    return flow.from_source(Numbers, parallelism=1).key_by(key_of).process(Notes, parallelism=1)


def seen_by(check: Callable[[], object]) -> list[tuple[float, Any]]:
    """Return the times and states that the operator has noted in a check of restores."""
    SEEN.clear()
    with contextlib.suppress(RestoreMismatch):
        check()
    return SEEN.copy()


def restored(**options: Any) -> list[tuple[float, Any]]:
    records: list[Any] = [[1], [2], [3], [4]]
    return seen_by(lambda: check_restore(Notes, records, key=key_of, fresh_process=False, **options))


def fed(over_s: Seconds) -> Any:
    """Return how a simulation feeds an input."""
    inputs: list[Any] = []
    world: Any = SimpleNamespace(seed=1, inputs={}, feed=inputs.append, connection=None)
    with contextlib.suppress(AttributeError):  # There is no cluster to return a topic of.
        Simulation(world, world).input("n", [1, 2, 3], over_s=over_s)
    return plain(inputs)


def simulated(over_s: float = 1.0, **options: Any) -> str:
    """Return how a simulation ends, and when."""

    def build(simulation: Simulation) -> Flow:
        flow = Flow("f")
        flow.source(simulation.input("n", [1, 2, 3], over_s=over_s)).sink(simulation.output("out"))
        return flow

    try:
        return str(simulate(build, seed=1, **options).elapsed_s)
    except SimulationFailed as failure:
        return str(failure)


BY_OPTION: dict[str, Callable[[Any], object]] = {
    "Admission(expire)": lambda s: Admission(expire=s, time="at").expire_ms,
    "Checkpoints(alignment_timeout_s)": lambda s: plain(Checkpoints("f", alignment_timeout_s=s)),
    "Checkpoints(interval_s)": lambda s: plain(Checkpoints("f", interval_s=s)),
    "Checkpoints(transaction_timeout_s)": lambda s: plain(Checkpoints("f", transaction_timeout_s=s)),
    "CheckpointSettings(interval_s)": lambda s: plain(settings.CheckpointSettings(interval_s=s)),
    "Context.set_timer(delay_s)": timer,
    "DelayedLabels(within_s)": lambda s: joined(within_s=s),
    "Embeddings(expire)": lambda s: Embeddings(expire=s, time="at").expire_ms,
    "HealthSettings(loop_limit_s)": lambda s: plain(settings.HealthSettings(loop_limit_s=s)),
    "HealthSettings(quality_limit_s)": lambda s: plain(settings.HealthSettings(quality_limit_s=s)),
    "HealthSettings(source_limit_s)": lambda s: plain(settings.HealthSettings(source_limit_s=s)),
    "HealthSettings(stall_limit_s)": lambda s: plain(settings.HealthSettings(stall_limit_s=s)),
    "HttpSettings(timeout_s)": lambda s: plain(settings.HttpSettings(timeout_s=s)),
    "KeyedState(time_to_live_s)": lambda s: plain(KeyedState(VirtualClock(), s, name="s", encode=repr)),  # type: ignore[arg-type]
    "KeyedStream.deduplicate(within_s)": lambda s: keyed(lambda each: each.deduplicate("x", within_s=s)),
    "KeyedStream.process(time_to_live_s)": lambda s: keyed(lambda each: each.process(Notes, time_to_live_s=s)),
    "KeyedStream.window(allowed_lateness_s)": lambda s: keyed(
        lambda each: each.window(tumbling(9), allowed_lateness_s=s).aggregate(n="count")
    ),
    "KeyedStream.window(early_every_s)": lambda s: keyed(
        lambda each: each.window(tumbling(9), early_every_s=s).aggregate(n="count")
    ),
    "LabelSettings(within_s)": lambda s: plain(settings.LabelSettings("y", within_s=s)),
    "LocalProcesses(lock_s)": lambda s: plain(asdict(LocalProcesses(2, lock_s=s))),
    "LocalProcesses(losses_within_s)": lambda s: plain(asdict(LocalProcesses(2, losses_within_s=s))),
    "LocalProcesses(silence_s)": lambda s: plain(asdict(LocalProcesses(2, silence_s=s))),
    "LogSettings(every_s)": lambda s: plain(settings.LogSettings(every_s=s)),
    "MapAsync(backoff_max_s)": lambda s: plain(MapAsync(same, backoff_max_s=s)),
    "MapAsync(backoff_s)": lambda s: plain(MapAsync(same, backoff_s=s)),
    "MapAsync(timeout_s)": lambda s: plain(MapAsync(same, timeout_s=s)),
    "MiniBatch(timeout_s)": lambda s: plain(MiniBatch(5, s)),
    "ParameterServer(heartbeat_timeout_s)": lambda s: plain(ParameterServer(1, heartbeat_timeout_s=s)._heartbeats),
    "PublishSchedule(every_s)": lambda s: plain(PublishSchedule(every_s=s)),
    "PublishSchedule.change(every_s)": lambda s: plain([(each := PublishSchedule()).change(every_s=s), each]),
    "PublishSettings(every_s)": lambda s: plain(settings.PublishSettings("memory:m", every_s=s)),
    "PublishSettings(roll_back_s)": lambda s: plain(settings.PublishSettings("memory:m", roll_back_s=s)),
    "Ray(lock_s)": lambda s: plain(asdict(Ray(2, lock_s=s))),
    "Ray(losses_within_s)": lambda s: plain(asdict(Ray(2, losses_within_s=s))),
    "Ray(silence_s)": lambda s: plain(asdict(Ray(2, silence_s=s))),
    "Ray(wait_s)": lambda s: Ray(2, wait_s=s)._room(None).wait_s,
    "ServedModel.predict_when_ready(timeout_s)": lambda s: waited(lambda m: m.predict_when_ready([1], timeout_s=s)),
    "ServedModel.ready(timeout_s)": lambda s: waited(lambda model: model.ready(timeout_s=s)),
    "ServedModel.searched(timeout_s)": lambda s: waited(lambda model: model.searched(timeout_s=s)),
    "ServiceSettings(standby_s)": lambda s: plain(
        settings.ServiceSettings(
            "s",
            settings.InputSettings("memory:i"),
            settings.LearnSettings("regression", settings.LabelSettings("y")),
            settings.PublishSettings("memory:m"),
            standby_s=s,
        )
    ),
    "Simulation.input(over_s)": fed,
    "Stream.batch(timeout_s)": lambda s: steps(lambda each: each.batch(5, s)),
    "Stream.event_time(idle_after_s)": lambda s: steps(lambda each: each.event_time("at", unit="s", idle_after_s=s)),
    "Stream.event_time(max_ahead_s)": lambda s: steps(lambda each: each.event_time("at", unit="s", max_ahead_s=s)),
    "Stream.event_time(out_of_orderness_s)": lambda s: steps(
        lambda each: each.event_time("at", unit="s", out_of_orderness_s=s)
    ),
    "Stream.map_async(backoff_max_s)": lambda s: steps(lambda each: each.map_async(same, backoff_max_s=s)),
    "Stream.map_async(backoff_s)": lambda s: steps(lambda each: each.map_async(same, backoff_s=s)),
    "Stream.map_async(timeout_s)": lambda s: steps(lambda each: each.map_async(same, timeout_s=s)),
    "VirtualClock.advance(seconds)": advanced,
    "VirtualClock.sleep(delay_s)": lambda s: asyncio.run(slept(s)),
    "check_flow_restore(interval_s)": lambda s: seen_by(
        lambda: check_flow_restore(noted, interval_s=s, fresh_process=False)
    ),
    "check_restore(interval_s)": lambda s: restored(interval_s=s),
    "check_restore(time_to_live_s)": lambda s: restored(time_to_live_s=s, interval_s=2.5),
    "epochs_every(idle_timeout)": lambda s: steps(lambda each: epochs_every(each, records=5, idle_timeout=s)),
    "epochs_every(seconds)": lambda s: steps(lambda each: epochs_every(each, seconds=s)),
    "hopping(offset_s)": lambda s: plain(hopping(9, 9, offset_s=s)),
    "hopping(size_s)": lambda s: plain(hopping(s, 1)),
    "hopping(step_s)": lambda s: plain(hopping(6, s)),
    "online_k_means(timeout_s)": lambda s: steps(lambda each: online_k_means(each, clusters=1, timeout_s=s)),
    "online_standard_scaler(timeout_s)": lambda s: steps(lambda each: online_standard_scaler(each, timeout_s=s)),
    "session(gap_s)": lambda s: plain(session(s)),
    "simulate(settle_s)": lambda s: simulated(settle_s=s),
    "simulate(within_s)": lambda s: simulated(over_s=60.0, within_s=s),
    "sliding(size_s)": lambda s: plain(sliding(s)),
    "topic(give_up_after_s), of Kafka": lambda s: plain(topic("kafka://a:1/t", give_up_after_s=s).options),
    "topic(lock_timeout_s), of SQLite": lambda s: plain(topic("sqlite:///a.db?topic=t", lock_timeout_s=s)),
    "train_online(publish_every_s)": lambda s: steps(lambda each: train_online(each, label="y", publish_every_s=s)),
    "train_online(report_every_s)": lambda s: steps(lambda each: train_online(each, label="y", report_every_s=s)),
    "tumbling(offset_s)": lambda s: plain(tumbling(9, offset_s=s)),
    "tumbling(size_s)": lambda s: plain(tumbling(s)),
    "Flow.run(stall_after_s)": lambda s: plain(PlainOptions.of("f", {"stall_after_s": s}).job_options().stall_after_s),
}


def options_in_seconds() -> Iterator[str]:
    """Yield the public parameters that are seconds by their name or by their type."""
    for module in NAMES:
        for name in NAMES[module]:
            public = getattr(importlib.import_module(module), name)
            methods = {f"{name}.{key}": each for key, each in vars(public).items()} if inspect.isclass(public) else {}
            for called, each in {name: public, **methods}.items():
                if "._" not in called and (inspect.isroutine(each) or inspect.isclass(each)):
                    with contextlib.suppress(ValueError, TypeError):
                        for option in inspect.signature(each).parameters.values():
                            if option.name.endswith("_s") or "Seconds" in str(option.annotation):
                                yield f"{called}({option.name})"


def test_each_public_option_in_seconds_is_tried() -> None:
    """Durations were tried where the first ones were asked for, and an option of a host refused them."""
    tried = {option for option in BY_OPTION if not option.startswith(("topic(", "Flow.run("))}
    assert set(options_in_seconds()) - set(NO_OPTIONS) == tried


@pytest.mark.parametrize("option", BY_OPTION)
def test_a_timedelta_does_what_the_same_seconds_do(option: str) -> None:
    """``time_to_live_s=timedelta(hours=1)`` was a TypeError in the middle of a run."""
    effect = BY_OPTION[option]
    assert effect(timedelta(seconds=FIRST)) == effect(FIRST)
    assert effect(FIRST) != effect(SECOND)  # What is compared shows the option.
