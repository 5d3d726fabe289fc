"""Networks that learn online, also from published versions, as one long training does."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks.training_support import arrays_of, document, network, records, rows
from support.waiting import PATIENCE_S, until

from streamiter import Checkpoints, Columns, Flow
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import JobFailed, ModelError
from streamiter.learn import Examples, SparseRows
from streamiter.models import ModelSnapshot, last_update, model_updates
from streamiter.networks import Network, NetworkPredictor, Published, train_network, train_network_online
from streamiter.networks.serving import ServedNetwork, network_of_version, version_of
from streamiter.networks.training import NetworkTraining
from streamiter.parameter_server import BSP, SSP, ParameterServer
from streamiter.topics import Json, MemoryBroker, OutgoingBatch, Topic


async def topics() -> tuple[Topic, Topic]:
    broker = MemoryBroker()
    events, updates = broker.topic("events"), broker.topic("updates")
    for each in (events, updates):
        await each.create()
    return events, updates


async def write(to: Topic, data: Any) -> None:
    writer = await to.open_writer()
    encoded = Json().encode(
        [{"fields": record["indices"].tolist(), "label": record["label"]} for record in records(data)]
    )
    await writer.write(OutgoingBatch(encoded.values))
    await writer.close()


def examples(batch: Any) -> Examples:
    features = SparseRows.from_rows(((each["fields"], np.ones(len(each["fields"]))) for each in batch), 24)
    return Examples(features, np.array([each["label"] for each in batch]))


def online(flow: Flow, events: Topic, made: Network, *, stop: Any = None, **options: Any) -> Any:
    given = {"consistency": SSP(staleness=1), "batch": 20, "extract": examples} | options
    return train_network_online(flow.source(events, stop=stop), made, ParameterServer(), **given)


async def test_an_endless_stream_is_served_while_it_is_learned_from() -> None:
    """A reader that knows only the name of the topic must get a prediction of an existing version."""
    events, updates = await topics()
    made, flow, data = network(), Flow("online"), rows(2_000)
    online(flow, events, made, publish_every=10).models.publish_model(updates, model="pairs")
    job = await flow.start()
    asking = rows(1, seed=9).rows.to_dense()[0]  # type: ignore[union-attr]
    async with ServedNetwork(updates, "pairs") as served:
        await write(events, data)
        await served.ready(timeout_s=PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S), model_updates(updates, "pairs") as following:
            async for update in following:
                if update.version == 9:
                    break
        await until(lambda: served.predict(asking).version >= 9)
        prediction = served.predict(asking)
        await job.stop("drain")
    assert 0 < prediction.value < 1
    last = await last_update(updates, "pairs")
    assert last is not None
    assert (last.version, last.records) == (10, 2_000)
    restored, arrays = network_of_version(last.parameters, "test")
    assert restored.to_json() == made.to_json()
    held_out = rows(500, seed=3)
    right = (NetworkPredictor(restored, arrays)(held_out.rows) > 0.5) == (held_out.labels > 0)
    assert right.mean() > 0.7


async def test_a_new_run_resumes_from_the_version_published_last() -> None:
    """After a deployment the model must not start from its initial values again."""
    events, updates = await topics()
    made = network()
    await write(events, rows(400))

    async def run() -> list[Any]:
        flow = Flow("run")
        training = online(flow, events, made, stop="latest", publish_every=1, start=Published(updates, "pairs"))
        training.models.publish_model(updates, model="pairs", format="safetensors")
        models = training.models.collect()
        await (await flow.start()).wait()
        return list(models.items)

    first = await run()
    published = await last_update(updates, "pairs")
    then = await run()
    assert published is not None
    begin = network().initial_parameters(seed=0)["deep_0.weight"]
    moved = np.abs(arrays_of(first[0])["deep_0.weight"] - begin).max()
    went_on = np.abs(arrays_of(then[0])["deep_0.weight"] - published.parameters["deep_0.weight"]).max()  # type: ignore[index]
    from_the_start = np.abs(arrays_of(then[0])["deep_0.weight"] - begin).max()
    assert went_on < 2 * moved < from_the_start
    assert then[-1].metrics["loss"] < first[0].metrics["loss"]


async def test_each_invalid_row_is_skipped_alone() -> None:
    """One event without its fields must neither end the training nor remove other events."""
    events, _ = await topics()
    good = records(rows(50))
    bad = [{"fields": [1, 2], "label": 1.0}, {"fields": [0, 6, 12, 18], "label": 0.0}, {"fields": [0, 6, 12, 99]}]
    mixed = [{"fields": each["indices"].tolist(), "label": each["label"]} for each in good]
    mixed[10:10] = bad
    writer = await events.open_writer()
    await writer.write(OutgoingBatch(Json().encode(mixed).values))
    await writer.close()
    flow = Flow("some are bad")
    training = online(flow, events, network(), stop="latest", on_error="skip", workers=2, consistency=BSP())
    models: Any = training.models.collect()
    job = await flow.start()
    statistics = await job.wait()
    assert models.items[-1].records == 50
    assert sum(step.counts.rejected for task in statistics.tasks for step in task.steps) == 3


def test_each_dense_row_that_does_not_fit_an_embedding_is_skipped_alone() -> None:
    """One row with a missing field ended the job, in spite of on_error."""
    data = rows(12)
    x = data.rows.to_dense()  # type: ignore[union-attr]
    x[7, x[7].argmax()] = 0.0
    flow = Flow("some are short")
    training = train_network_online(
        flow.from_items(Columns({"x": x, "y": data.labels})),
        network(),
        ParameterServer(),
        consistency=BSP(),
        extract=lambda batch: Examples(batch["x"], batch["y"]),
        on_error="skip",
    )
    models: Any = training.models.collect()
    flow.run()
    assert models.items[-1].records == 11


def test_records_of_another_form_are_skipped_and_rows_without_features_are_learned() -> None:
    """One record without its keys, or one row with an empty list, ended the job, as if all records were wrong."""
    layers = {
        "wide": {"type": "simpleinputlayer", "outputdim": 1},
        "loss": {"type": "simplelosslayer", "inputlayer": "wide"},
    }
    made = Network.from_json({"data": {"indexrange": 24}, "layers": layers})
    mixed: list[Any] = [
        {"label": each["label"], "indices": each["indices"].tolist(), "values": each["values"].tolist()}
        for each in records(rows(10))
    ]
    mixed[3:3] = [{"other": 1}, {"label": 1.0, "indices": [], "values": []}]
    flow = Flow("some are of another form")
    training = train_network_online(flow.from_items(mixed), made, ParameterServer(), consistency=BSP(), on_error="skip")
    models: Any = training.models.collect()
    flow.run()
    assert models.items[-1].records == 11


def test_a_version_with_a_text_for_its_network_reads_no_file(tmp_path: Path) -> None:
    """A program that may write to the topic could make the servers open a local file."""
    made = network()
    made.to_json(tmp_path / "network.json")
    version = {**made.initial_parameters(seed=1), "network": json.dumps(str(tmp_path / "network.json"))}
    with pytest.raises(ModelError, match=r"^served: expected 'network' as a JSON object, given '\"/"):
        network_of_version(version, "served")


async def test_versions_that_are_no_network_leave_the_last_good_one_in_place() -> None:
    """A linear model under the same name is a user's mistake, and must not end the service."""
    _, updates = await topics()
    made = network()
    flow = Flow("versions")
    good = ModelSnapshot(version_of(made, made.initial_parameters(seed=1)))
    flow.from_items([good, {"weights": np.zeros(3)}]).publish_model(updates, model="pairs")
    await (await flow.start()).wait()
    async with ServedNetwork(updates, "pairs") as served:
        await until(lambda: bool(served.statistics().failed))
        assert "expected 'network' with the arrays of a network, given 'weights'" in str(served.statistics().last_error)


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


def resumed_online(
    made: Network, first: int, last: int, workers: int, **options: Any
) -> Callable[[Flow], NetworkTraining]:
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
    whole = await last_of(resumed_online(made, 0, 80, 1))
    start: dict[str, Any] | None = None
    for first in (0, 35):
        start = await last_of(resumed_online(made, first, 35 if first == 0 else 80, 1, start=start, publish_state=True))
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
