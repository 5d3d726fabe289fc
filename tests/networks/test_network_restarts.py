"""Trainings of networks that start from published versions learn what one long training learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from networks.training_support import document, network, records, rows
from support.waiting import until

from streamiter import Checkpoints, Flow
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import JobFailed, ModelError
from streamiter.networks import Network, NetworkPredictor, Published, train_network, train_network_online
from streamiter.networks.serving import network_of_version
from streamiter.networks.training import NetworkTraining
from streamiter.parameter_server import BSP, ParameterServer
from streamiter.topics import MemoryBroker

ROWS = 60


def shuffled(**sections: Any) -> Network:
    """Return a network with dropout, rows in another order in each epoch, and several optimizers."""
    settings = {"data": {"useshuffle": True, "indexrange": 24}, "train": {"lr": 0.05, "decayclass": "StandardDecay"}}
    changed = document(**{**settings, **sections})
    changed["layers"][2]["transfuncs"] = ["tanhwithdropout", "identity"]
    changed["layers"][0]["optimizer"] = {"type": "FTRL"}
    return Network.from_json(changed)


async def last_of(train: Callable[[Flow], NetworkTraining], updates: Any = None) -> dict[str, Any]:
    """Run a training to its end; return, and publish, the parameters of its last version."""
    flow = Flow("restarted")
    training = train(flow)
    models = training.models.collect()
    if updates is not None:
        training.models.publish_model(updates, model="pairs")
    await (await flow.start()).wait()
    parameters: dict[str, Any] = models.items[-1].parameters
    return parameters


def bits(parameters: dict[str, Any]) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in parameters.items() if name not in ("network", "state")}


def in_epochs(made: Network, epochs: int, workers: int, **options: Any) -> Callable[[Flow], NetworkTraining]:
    given = {"consistency": BSP(), "seed": 5, "workers": workers, "epochs": epochs, **options}
    return lambda flow: train_network(flow, rows(ROWS), made, ParameterServer(shards=2), **given)


def online(made: Network, first: int, last: int, workers: int, **options: Any) -> Callable[[Flow], NetworkTraining]:
    """Return a training on a part of the stream, of which each worker has every n-th record."""
    given = {"consistency": BSP(), "seed": 5, "workers": workers, "batch": 5, **options}
    part = records(rows(4 * ROWS))[first:last]
    return lambda flow: train_network_online(
        flow.from_items(part, parallelism=1), made, ParameterServer(shards=2), **given
    )


SPARSE = {"model": {"modeltype": "T_DOUBLE_SPARSE"}}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sections", [{}, SPARSE], ids=["dense", "sparse"])
async def test_restarts_from_versions_equal_one_training_to_the_last_bit(
    sections: dict[str, Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each deployment reset the moments of Adam, and the learning rate was that of the first step again."""
    monkeypatch.setattr("streamiter.networks.network._ARRAYS_MAX", 0)
    made, broker = shuffled(**sections), MemoryBroker()
    await broker.topic("updates").create()
    published = Published(broker.topic("updates"), "pairs")
    whole = await last_of(in_epochs(made, 3, workers))
    for _ in range(3):
        train = in_epochs(made, 1, workers, start=published, publish_state=True)
        found = await last_of(train, broker.topic("updates"))
    assert bits(found) == bits(whole)
    assert "state" not in whole
    predicting, arrays = network_of_version(found, "test")
    assert NetworkPredictor(predicting, arrays)(rows(3).rows).shape == (3,)


async def test_a_stream_that_is_learned_in_parts_gives_the_model_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout began with its first numbers again after each restart."""
    made = shuffled()
    whole = await last_of(online(made, 0, 80, 1))
    start: dict[str, Any] | None = None
    for first in (0, 35):
        start = await last_of(online(made, first, 35 if first == 0 else 80, 1, start=start, publish_state=True))
    assert start is not None
    assert bits(start) == bits(whole)


async def test_a_run_from_a_version_that_is_cut_continues_from_its_checkpoint() -> None:
    """After the cut, dropout and the order of the rows began as in a training without a start."""
    made, store = shuffled(), MemoryStore()
    whole = await last_of(in_epochs(made, 9, 1))
    start = await last_of(in_epochs(made, 1, 1, publish_state=True))
    flow = Flow("cut")
    losses = in_epochs(made, 8, 1, start=start)(flow).losses.collect(name="losses")
    job = await flow.start(checkpoints=Checkpoints(store, interval_s=1000), channel_limits=ChannelLimits(records=1))
    await until(lambda: len(losses.items) >= 7)
    await job.checkpoint()
    await job.stop("abort")
    then = Flow("cut")
    training = in_epochs(made, 8, 1, start=start)(then)
    models, again = training.models.collect(name="models"), training.losses.collect(name="losses")
    await (await then.start(checkpoints=Checkpoints(store.another(), interval_s=1000), changed_steps=["models"])).wait()
    assert bits(models.items[-1].parameters) == bits(whole)
    assert len(again.items) == 8 * 5


async def test_a_state_of_another_network_is_refused_and_can_be_left_out() -> None:
    """The slots of Adam were read as those of another optimizer."""
    given = await last_of(in_epochs(network(), 1, 1, publish_state=True))
    other = network(default_optimizer="FTRL")
    with pytest.raises(
        (JobFailed, ModelError), match=r"the state of the version does not fit: layers: 'wide' was .*ftrl"
    ):
        await last_of(in_epochs(other, 1, 1, start=given))
    without = {name: array for name, array in given.items() if name != "state"}
    assert bits(await last_of(in_epochs(other, 1, 1, start=without))).keys() == bits(given).keys()
