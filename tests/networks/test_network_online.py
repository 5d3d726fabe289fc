"""A network learns from a stream, publishes versions to a topic, is served, and is trained further."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks.training_support import arrays_of, network, records, rows
from support.waiting import PATIENCE_S, until

from streamiter import Columns, Flow
from streamiter.errors import GraphError, ModelError
from streamiter.learn import Examples, SparseRows
from streamiter.models import ModelSnapshot, last_update, model_updates
from streamiter.networks.learner import Published
from streamiter.networks.network import Network
from streamiter.networks.serving import NetworkPredictor, ServedNetwork, network_of_version, version_of
from streamiter.networks.training import train_network_online
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer
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


@pytest.mark.parametrize("text", ["", '{"layers": [', "[]", "[" * 100_000], ids=["empty", "torn", "array", "deep"])
def test_a_version_whose_network_is_no_json_object_is_no_version(text: str) -> None:
    """A server skips a version with ModelError; arrays nested too deep raised another error and ended the updates."""
    version = version_of(network(), network().initial_parameters(seed=1)) | {"network": text}
    with pytest.raises(ModelError, match=r"^served: expected 'network' as a JSON object, given '"):
        network_of_version(version, "served")


def test_a_stream_needs_a_configured_number_of_features() -> None:
    """Features with higher numbers may come next year."""
    flow = Flow("f")
    with pytest.raises(GraphError, match=r"given indexrange -1, which a stream cannot tell; set indexrange"):
        train_network_online(
            flow.from_items([1]), network(data={"indexrange": -1}), ParameterServer(), consistency=ASP()
        )
