"""Networks whose features come and go: admitted after some occurrences, expired by event time, and within a memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from networks.training_support import FIELDS, document
from support.waiting import PATIENCE_S, until

from streamiter import Checkpoints, Flow
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import GraphError, JobFailed
from streamiter.learn import Examples, SparseRows
from streamiter.models import model_updates
from streamiter.networks import Network, NetworkPredictor, Published, ServedNetwork, train_network_online
from streamiter.networks.serving import network_of_version
from streamiter.networks.training import NetworkTraining
from streamiter.parameter_server import ASP, BSP, Admission, ParameterServer
from streamiter.parameter_server.storage.feature_files import FeatureFiles
from streamiter.topics import MemoryBroker

RECORDS = 2_500
LIMIT = 2**52
EXPIRING = Admission(admit=2, expire=500, time="at", at_most="4 MB")
CAPPED = Admission(admit=2, at_most="1 MB")


def views(count: int = RECORDS) -> list[dict[str, Any]]:
    """Return views of items by users, who come and go, each with two ids that no other view has."""
    generator = np.random.default_rng(1)
    at, users = np.arange(count), generator.integers(0, 40, count) + np.arange(count) // 500 * 25
    items = generator.integers(0, 30, count)
    ids = generator.integers(0, LIMIT, (count, 3))
    likes = np.random.default_rng(2).normal(size=(200, 30))
    clicked = generator.random(count) < 1 / (1 + np.exp(-2 * likes[users, items]))
    features = np.column_stack([users * 1_000_003, LIMIT - 1 - items, ids[:, :2]])
    return [
        {"features": row.tolist(), "clicked": bool(label), "at": float(second)}
        for row, label, second in zip(features, clicked, at, strict=True)
    ]


VIEWS = views()


def examples(batch: Any) -> Examples:
    rows = SparseRows.from_rows(((sorted(each["features"]), np.ones(FIELDS)) for each in batch), LIMIT)
    return Examples(rows, np.where([each["clicked"] for each in batch], 1.0, -1.0))


def without_range(*, factors: int = 3, **data: Any) -> Network:
    sections = document(data={"indexrange": -1} | data, model={"modeltype": "T_FLOAT_SPARSE"})
    sections["layers"][1] |= {"numfactors": factors, "outputdim": factors * FIELDS}
    return Network.from_json(sections)


def training(flow: Flow, server: ParameterServer, admission: Admission | None, **options: Any) -> NetworkTraining:
    made = options.pop("network", None) or without_range()
    source = flow.from_items(VIEWS[: options.pop("views", RECORDS)], name="views")
    given = {"consistency": BSP(), "batch": 50, "extract": examples, "publish_every": 10} | options
    return train_network_online(source, made, server, admission=admission, **given)


class Run:
    """One run of a training."""

    def __init__(self, admission: Admission | None, *, shards: int = 1, **options: Any) -> None:
        self._flow, self.server = Flow("views"), ParameterServer(shards=shards)
        made = training(self._flow, self.server, admission, **options)
        self._models, self._losses = made.models.collect(name="models"), made.losses.collect(name="losses")

    async def start(self, checkpoints: Checkpoints | None = None) -> Any:
        given = {} if checkpoints is None else {"checkpoints": checkpoints}
        return await self._flow.start(channel_limits=ChannelLimits(records=1), **given)  # type: ignore[arg-type]

    async def whole(self) -> Run:
        await (await self.start()).wait()
        return self

    @property
    def losses(self) -> list[float]:
        return sorted(each["loss"] for each in self._losses.items)  # Workers report in any order.

    @property
    def last(self) -> dict[str, bytes]:
        return bits_of(self._models.items[-1].parameters)

    @property
    def stored(self) -> set[int]:
        return set(self._models.items[-1].parameters["features"].tolist())

    def count(self, name: str) -> int:
        shards = self.server.statistics().shards
        return sum(getattr(matrix, name) for shard in shards for matrix in shard.matrices)


def bits_of(parameters: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in parameters.items() if name != "network"}


def on_demand(store: MemoryStore) -> Checkpoints:
    return Checkpoints(store.another(), interval_s=1_000)


@pytest.mark.parametrize(("admission", "reason"), [(EXPIRING, "expired"), (CAPPED, "evicted")], ids=["expire", "cap"])
async def test_features_come_and_go_the_same_on_any_shards_and_after_a_restore(
    admission: Admission, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard let features leave by its own room, so a model depended on the number of shards."""
    monkeypatch.setitem(FeatureFiles.__init__.__kwdefaults__, "features_of_file", 300)
    options: dict[str, Any] = {
        "workers": 2,
        "network": without_range(factors=64),
    }  # With long vectors the room is full.
    whole = await Run(admission, **options).whole()
    assert whole.count(reason) > 1_000
    users, items = {each["features"][0] for each in VIEWS}, {each["features"][1] for each in VIEWS}
    assert items < whole.stored <= users | items, "an id with one occurrence has parameters of its own"
    cut, store = Run(admission, shards=3, **options), MemoryStore()
    job = await cut.start(on_demand(store))
    for steps in (15, 30):
        await until(lambda steps=steps: len(cut.losses) >= steps)  # type: ignore[misc]
        await job.checkpoint()
    await job.stop("abort")
    then = Run(admission, shards=2, **options)
    await (await then.start(on_demand(store))).wait()
    assert then.losses == whole.losses
    assert then.last == whole.last
    assert then.count(reason) == whole.count(reason)


@pytest.mark.parametrize("consistency", [BSP(), ASP()])
async def test_features_that_are_admitted_at_once_are_learned_as_those_of_a_hash_table(consistency: Any) -> None:
    """The first gradient of a feature was lost, or its slots began otherwise, where it was admitted."""
    made = without_range(indexrange=LIMIT)
    options: dict[str, Any] = {"network": made, "consistency": consistency, "views": 800}
    table = await Run(Admission(admit=1, at_most="40 MB"), **options).whole()
    cells = await Run(None, **options).whole()
    assert table.losses == cells.losses
    assert table.last == cells.last


async def test_versions_as_changes_remove_the_features_that_have_left() -> None:
    """A follower kept all features that had ever been published."""
    updates = MemoryBroker().topic("updates")
    await updates.create()
    flow = Flow("views")
    made = training(flow, ParameterServer(), EXPIRING)
    made.models.publish_model(updates, model="views", changes=True)
    models = made.models.collect()
    asked = examples(VIEWS[-200:]).features
    async with ServedNetwork(updates, "views") as served:
        await (await flow.start()).wait()
        await served.ready(timeout_s=PATIENCE_S)
        await until(lambda: served.statistics().version == len(models.items))
        predicted = served.predict(asked).value
    found, arrays = network_of_version(models.items[-1].parameters, "test")
    assert predicted.tolist() == NetworkPredictor(found, arrays)(asked).tolist()
    left = 0
    async for update in model_updates(updates, "views"):
        expected = models.items[update.version - 1].parameters
        assert bits_of(update.parameters) == bits_of(expected)
        if update.version == len(models.items):
            break
        left += len(set(expected["features"]) - set(models.items[update.version].parameters["features"]))
    assert left > 50


async def test_a_training_starts_with_the_features_of_a_version() -> None:
    """Features of a published version had to be admitted again, and began with drawn numbers."""
    updates = MemoryBroker().topic("updates")
    await updates.create()
    for start in (None, Published(updates, "views")):
        flow = Flow("views")
        made = training(flow, ParameterServer(), CAPPED, start=start, publish_every=1, views=1_000)
        made.models.publish_model(updates, model="views")
        models = made.models.collect()
        await (await flow.start()).wait()
        if start is None:
            before = models.items[-1].parameters
    after = models.items[0].parameters
    assert set(before["features"]) <= set(after["features"])
    moved = after["embedding.weight"][np.isin(after["features"], before["features"])] - before["embedding.weight"]
    assert np.count_nonzero(moved.any(axis=1)) < 0.75 * len(moved)  # Those that one mini-batch has.


@pytest.mark.parametrize(
    ("admission", "made", "says"),
    [
        ("30d", without_range(), r"expected Admission\(…\), .* given '30d'"),
        (
            Admission(expire="1d"),
            without_range(),
            "with the field time= of records if features expire, given Admission",
        ),
        (CAPPED, Network.from_json(document()), "given modeltype T_DOUBLE_DENSE, indexrange 24 and 4 numbers; set"),
        (CAPPED, without_range(indexrange=24), "given modeltype T_FLOAT_SPARSE, indexrange 24 and 4 numbers; set"),
        (CAPPED, without_range(factors=2_000), "indexrange None and 2,001 numbers; set modeltype"),
    ],
)
def test_admission_that_cannot_work_is_refused(admission: Any, made: Network, says: str) -> None:
    """Columns of features beyond int64 named other features, and features expired by times that no record had."""
    with pytest.raises(GraphError, match=says):
        training(Flow("views"), ParameterServer(), admission, network=made)


async def test_records_without_a_time_are_refused() -> None:
    """A record without a time would be of 1970, and all features would be expired for the next one."""
    flow = Flow("views")
    items = [each if number != 7 else each | {"at": None} for number, each in enumerate(VIEWS[:100])]
    given = {"consistency": BSP(), "extract": examples, "admission": EXPIRING}
    train_network_online(flow.from_items(items), without_range(), ParameterServer(), **given).models.collect()  # type: ignore[arg-type]
    with pytest.raises(JobFailed, match=r"expected a time in 'at', given nan \(row 7 of the batch\)"):
        await (await flow.start()).wait()
