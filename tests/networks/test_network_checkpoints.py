"""Training of networks resumes from a checkpoint and gives the same model as without the interruption."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from networks.training_support import arrays_of, document, records, rows
from support.processes import forked_run, process
from support.soak import in_soak
from support.waiting import until

from streamiter import Checkpoints, Flow
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import CheckpointError
from streamiter.learn.server_training import ParameterServerWorker, ServerWorkerOptions
from streamiter.networks.network import Network
from streamiter.networks.serving import network_of_version, save_network
from streamiter.networks.training import NetworkTraining, train_network, train_network_online
from streamiter.parameter_server import BSP, SSP, Admission, ParameterServer

RARELY_S = 1000.0
ROWS = 200


def with_dropout(**sections: Any) -> Network:
    """Return a network with dropout for each mini-batch, and with rows in another order in each epoch."""
    changed = document(**{"data": {"useshuffle": True, "indexrange": 24}, "train": {"epoch": 20}} | sections)
    changed["layers"][2]["transfuncs"] = ["tanhwithdropout", "identity"]
    return Network.from_json(changed)


def in_epochs(flow: Flow) -> NetworkTraining:
    return train_network(flow, rows(ROWS), with_dropout(), ParameterServer(shards=2), consistency=BSP(), seed=5)


def online(flow: Flow) -> NetworkTraining:
    return train_network_online(
        flow.from_items(records(rows(10 * ROWS)), name="records"),
        with_dropout(),
        ParameterServer(shards=2),
        consistency=SSP(staleness=1),
        batch=20,
        publish_every=5,
        seed=5,
    )


def with_admission(flow: Flow) -> NetworkTraining:
    """Learn rows of which each four have a feature of their own, besides those that stay."""
    items = [each | {"at": float(row)} for row, each in enumerate(records(rows(5 * ROWS)))]
    for row, each in enumerate(items):
        each["indices"][-1] = 2**40 + row // 4
    return train_network_online(
        flow.from_items(items, name="records"),
        with_dropout(data={"indexrange": -1}, model={"modeltype": "T_DOUBLE_SPARSE"}),
        ParameterServer(shards=2),
        consistency=BSP(),
        batch=20,
        admission=Admission(admit=2, expire=300, time="at", at_most="2 MB"),
        seed=5,
    )


def on_demand(store: MemoryStore | Path) -> Checkpoints:
    return Checkpoints(store if isinstance(store, Path) else store.another(), interval_s=RARELY_S)


Train = Callable[[Flow], NetworkTraining]


class Run:
    """One run of a flow that trains a network."""

    def __init__(self, train: Train) -> None:
        flow = Flow("training")
        training = train(flow)
        self._models = training.models.collect(name="models")
        self._losses = training.losses.collect(name="losses")
        self._flow = flow

    @property
    def models(self) -> list[Any]:
        return self._models.items

    @property
    def losses(self) -> list[Any]:
        return self._losses.items

    async def start(self, checkpoints: Checkpoints | None = None) -> Job:
        """Start from the last checkpoint, with channels of one record, so that the source advances with each step."""
        options = {} if checkpoints is None else {"checkpoints": checkpoints}
        return await self._flow.start(channel_limits=ChannelLimits(records=1), **options)  # type: ignore[arg-type]

    async def after(self, steps: int) -> None:
        """Wait until the run has learned from this many mini-batches."""
        await until(lambda: len(self.losses) >= steps)


_WHOLE: dict[Train, Run] = {}


async def never_cut(train: Train) -> Run:
    """Return the run without an interruption; all tests share one run."""
    if train not in _WHOLE:
        run = Run(train)
        await (await run.start()).wait()
        _WHOLE[train] = run
    return _WHOLE[train]


@pytest.mark.parametrize(
    ("train", "steps", "mode"),
    [(in_epochs, 1, "suspend"), (in_epochs, 4, "abort"), (online, 5, "suspend"), (online, 37, "abort")],
)
async def test_training_with_dropout_continues_to_the_same_bits(
    train: Train, steps: int, mode: Literal["abort", "suspend"]
) -> None:
    """After a restart, dropout counted mini-batches from 0 again, and omitted the same numbers as in the first mini-
    batches. An aborted run loses the steps after its checkpoint, and the next run repeats them.
    """
    whole, store = await never_cut(train), MemoryStore()
    cut = Run(train)
    job = await cut.start(on_demand(store))
    await cut.after(steps)
    await job.checkpoint()
    await cut.after(steps + 3)
    await job.stop(mode)
    assert len(cut.losses) < len(whole.losses)
    then = Run(train)
    made = (await (await then.start(on_demand(store))).wait()).step("train").records_in
    assert made <= len(whole.losses) - steps, "the second run started from the beginning"
    expected, found = whole.models[-1], then.models[-1]
    assert found.records == expected.records
    assert {name: array.tobytes() for name, array in arrays_of(found).items()} == {
        name: array.tobytes() for name, array in arrays_of(expected).items()
    }
    assert [each["loss"] for each in then.losses] == [each["loss"] for each in whole.losses]


WITHOUT_DROPOUT = document(data={"useshuffle": True, "indexrange": 24}, train={"epoch": 8})


def by_workers(workers: int) -> Train:
    def train(flow: Flow) -> NetworkTraining:
        network = Network.from_json(WITHOUT_DROPOUT)
        return train_network(flow, rows(ROWS), network, ParameterServer(), consistency=BSP(), seed=5, workers=workers)

    return train


def by_workers_on_a_stream(workers: int) -> Train:
    def train(flow: Flow) -> NetworkTraining:
        numbers = flow.from_items(records(rows(10 * ROWS)), name="records")
        network = Network.from_json(WITHOUT_DROPOUT)
        server, consistency = ParameterServer(), BSP()
        return train_network_online(numbers, network, server, consistency=consistency, batch=20, workers=workers)

    return train


@pytest.mark.parametrize(
    ("before", "after", "steps"), [(1, 3, 1), (3, 2, 30), (1, 3, 12), *in_soak((3, 1, 12), (2, 3, 30))]
)
async def test_other_workers_continue_the_training(before: int, after: int, steps: int) -> None:
    """A training was bound to the number of workers with which it had begun."""
    whole, store = await never_cut(ONE_WORKER), MemoryStore()
    cut = Run(by_workers(before))
    job = await cut.start(on_demand(store))
    await cut.after(steps)
    await job.checkpoint()
    await job.stop("abort")
    then = Run(by_workers(after))
    await (await then.start(on_demand(store))).wait()
    expected, found = whole.models[-1], then.models[-1]
    assert found.records == expected.records
    for name, array in arrays_of(expected).items():  # in another order the sums of gradients round differently
        assert arrays_of(found)[name] == pytest.approx(array, abs=1e-9), name


ONE_WORKER = by_workers(1)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
async def test_other_workers_continue_on_a_stream(before: int, after: int) -> None:
    """Mini-batches that waited before the old workers were lost, or learned twice."""
    store = MemoryStore()
    cut = Run(by_workers_on_a_stream(before))
    job = await cut.start(on_demand(store))
    await cut.after(9)
    await job.checkpoint()
    await job.stop("abort")
    then = Run(by_workers_on_a_stream(after))
    await (await then.start(on_demand(store))).wait()
    assert then.models[-1].records == 10 * ROWS


def test_workers_at_different_clocks_keep_their_number() -> None:
    """The clock of one worker was taken for that of all."""
    worker = ParameterServerWorker(ServerWorkerOptions(learner=None, publish_every=1))  # type: ignore[arg-type]
    assert worker.redistribute([{"clocks": 3}] * 2, 3) == [{"clocks": 3}] * 3
    with pytest.raises(CheckpointError, match="its workers are at different clocks: they do not wait for each other"):
        worker.redistribute([{"clocks": 3}, {"clocks": 4}], 3)


KILLED = """
import asyncio, sys
from pathlib import Path

sys.path[:0] = {path!r}
from networks.test_network_checkpoints import Run, on_demand, {way}

from streamiter.networks.serving import network_of_version, save_network


async def main(folder):
    run = Run({way})
    job = await run.start(on_demand(folder / "checkpoints"))
    if {is_killed!r}:
        await run.after(12)
        await job.checkpoint()
        await run.after(17)
        print("there", flush=True)
        sys.stdin.read()  # Wait for the kill.
    print((await job.wait()).step("train").records_in)
    save_network(folder / "model", *network_of_version(run.models[-1].parameters, "test"))


asyncio.run(main(Path({folder!r})))
"""


def program(folder: Path, train: Train, *, is_killed: bool = False) -> list[str]:
    path = [entry for entry in sys.path if entry]
    code = KILLED.format(path=path, folder=str(folder), is_killed=is_killed, way=train.__name__)
    return [sys.executable, "-c", code]


def ran(folder: Path, train: Train) -> int:
    """Run the program, and return the number of mini-batches that it has learned from."""
    return int(forked_run(program(folder, train), check=True).stdout)


@pytest.mark.parametrize("train", [in_epochs, with_admission])
async def test_a_process_that_was_killed_continues_to_the_same_bits(tmp_path: Path, train: Train) -> None:
    """After a kill -9 in the middle of an epoch and a second start, the saved files must be equal byte for byte."""
    whole, cut = await never_cut(train), tmp_path / "cut"
    assert len(whole.losses) >= 50
    save_network(tmp_path / "whole" / "model", *network_of_version(whole.models[-1].parameters, "test"))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with process(program(cut, train, is_killed=True), is_forked=True, **pipes) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "there\n"
        killed.send_signal(signal.SIGKILL)
    assert ran(cut, train) <= len(whole.losses) - 12
    saved = [(folder / "model" / "parameters.safetensors").read_bytes() for folder in (tmp_path / "whole", cut)]
    assert saved[0] == saved[1]
