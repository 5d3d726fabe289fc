"""Networks with more features than any array could hold: only features that occur are stored."""

import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from networks.training_support import FEATURES, arrays_of, document, network, records, rows, trained
from support.examples import random_examples
from support.waiting import until

from streamiter import Checkpoints, Flow
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import ModelError, ParameterServerError
from streamiter.models import model_updates
from streamiter.networks import LabelledRows, Network, Published, ServedNetwork, fit_network, load_network, save_network
from streamiter.networks import network as network_module
from streamiter.networks.sparse import no_features, values_at
from streamiter.networks.training import train_network, train_network_online
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer, psf
from streamiter.topics import MemoryBroker
from streamiter.values.sparse_rows import SparseRows

HUGE = 10**9
OPTIMIZERS = [
    {"type": "sgd", "reg1": 0.01, "reg2": 0.02},
    {"type": "momentum", "reg2": 0.02},
    {"type": "adagrad", "reg1": 0.01},
    {"type": "adadelta"},
    {"type": "adam", "reg2": 0.01},
    {"type": "ftrl", "reg1": 0.001, "reg2": 0.01},
]


def huge(**sections: Any) -> Network:
    """Return the network of ``document`` for a billion features."""
    model = {"modeltype": "T_FLOAT_SPARSE_LONGKEY", **sections.pop("model", {})}
    return network(data={"indexrange": HUGE, **sections.pop("data", {})}, model=model, **sections)


def spread(data: LabelledRows, *, apart: int = HUGE // FEATURES) -> LabelledRows:
    """Return the rows with features that are far apart."""
    assert isinstance(data.rows, SparseRows)
    return LabelledRows(SparseRows(data.rows.indptr, data.rows.indices * apart, data.rows.values, HUGE), data.labels)


def same(given: Any, expected: Any) -> bool:
    """Whether all arrays have the same bits."""
    return given.keys() == expected.keys() and all(given[name].tobytes() == expected[name].tobytes() for name in given)


Example = tuple[dict[str, Any], dict[str, Any], bool]


def _example(random: Random) -> Example:
    sections = {
        "model": {
            "modeltype": f"T_{random.choice(['FLOAT', 'DOUBLE'])}_SPARSE",
            "init": random.choice(["xavier", "angel"]),
        },
        "default_optimizer": random.choice(OPTIMIZERS),
        "train": {"epoch": random.randint(1, 3), "lr": 0.05},
    }
    options = {
        "consistency": random.choice([BSP(), ASP(), SSP(staleness=1)]),
        "shards": random.randint(1, 4),
        "seed": random.getrandbits(64),
    }
    return sections, options, random.random() < 0.2


@random_examples(_example, examples=12)
def test_sparse_and_dense_storage_give_equal_results(example: Example) -> None:
    """A feature that was stored late had other slots than in an array, so a network learned something else."""
    sections, options, has_dense_rows = example
    optimizer = sections.pop("default_optimizer")
    given, data = {**document(**sections), "default_optimizer": optimizer}, rows(40)
    del given["layers"][1]["optimizer"]
    if has_dense_rows:
        assert isinstance(data.rows, SparseRows)
        array = np.zeros((len(data), FEATURES))
        array[np.repeat(np.arange(len(data)), np.diff(data.rows.indptr)), data.rows.indices] = 1.0
        data = LabelledRows(array, data.labels)
    made = Network.from_json(given)
    kept = network_module._ARRAYS_MAX
    network_module._ARRAYS_MAX = 0  # type: ignore[misc]
    try:
        graph = made.graph()
        way = graph.drawn_as
        assert way is not None
        every = np.arange(FEATURES)
        start = made.initial_parameters(options["seed"])
        whole = {
            parameter.name: values_at(every, parameter, start, way) if parameter.by_feature else start[parameter.name]
            for parameter in graph.parameters
        }
        sparse, _ = trained(made, data, **options)
    finally:
        network_module._ARRAYS_MAX = kept  # type: ignore[misc]
    dense, _ = trained(made, data, start=whole, **options)
    for found, expected in zip(map(arrays_of, sparse), map(arrays_of, dense), strict=True):
        filled = {
            parameter.name: values_at(every, parameter, found, way) if parameter.by_feature else found[parameter.name]
            for parameter in graph.parameters
        }
        assert same(filled, expected)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_billion_features_take_the_memory_of_those_that_occur(workers: int) -> None:
    """Embeddings for an index range of 10⁸ ended in a MemoryError, although 24 features occurred."""
    tracemalloc.start()
    try:
        fitted = fit_network(huge(), spread(rows(200)), workers=workers, shards=2, progress=False)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50 << 20
    assert {name: array.shape for name, array in fitted.parameters.items() if not name.startswith("deep")} == {
        "features": (FEATURES,),
        "seed": (1,),
        "wide.weight": (FEATURES, 1),
        "wide.bias": (1,),
        "embedding.weight": (FEATURES, 3),
    }
    assert fitted.results[-1].training_loss < fitted.results[0].training_loss  # type: ignore[operator]


def unseen(parameters: dict[str, Any]) -> LabelledRows:
    """Return rows with features that no training has had."""
    data = spread(rows(30), apart=1_000_003)
    assert isinstance(data.rows, SparseRows)
    assert not np.isin(data.rows.indices[data.rows.indices > 0], parameters["features"]).any()
    return data


def test_unseen_features_have_the_same_values_everywhere(tmp_path: Path) -> None:
    """A feature that came first after a restart, or in a prediction, was drawn again and had another vector."""
    made, data = huge(model={"modeltype": "T_DOUBLE_SPARSE"}), spread(rows(60))
    first = fit_network(made, data, seed=3, epochs=1, shards=1, progress=False)
    other = fit_network(made, data, seed=3, epochs=1, shards=4, progress=False)
    assert same(first.parameters, other.parameters)
    later = unseen(first.parameters)
    expected = first.predictor(later.rows)
    assert len(np.unique(expected)) > 20
    save_network(tmp_path / "model", first.network, first.parameters)
    saved = load_network(tmp_path / "model")
    assert same(saved.parameters, first.parameters)
    assert saved.predictor(later.rows).tobytes() == expected.tobytes()
    # In a training that resumes, the loss of the first mini-batch is that of the prediction.
    once = huge(model={"modeltype": "T_DOUBLE_SPARSE"}, train={"numupdateperepoch": 1})
    resumed = fit_network(once, later, start=saved.parameters, seed=99, epochs=1, progress=False)
    assert resumed.results[0].training_loss == pytest.approx(first.evaluate(later).loss, rel=1e-12)
    assert resumed.parameters["seed"].tolist() == [3]


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


async def test_a_checkpoint_has_the_features_that_occur_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """The snapshot of a server was as large as the index range; a restored run drew other initial values."""

    def run(epochs: int = 4) -> tuple[Flow, Any]:
        flow = Flow("training")
        training = train_network(
            flow, spread(rows(200)), huge(), ParameterServer(shards=2), consistency=BSP(), seed=5, epochs=epochs
        )
        return flow, (training.models.collect(name="models"), training.losses.collect(name="losses"))

    limits, checkpoints = ChannelLimits(records=1), Checkpoints(tmp_path, interval_s=1000.0)
    flow, (whole, _) = run()
    await (await flow.start(channel_limits=limits)).wait()
    flow, (_, losses) = run()
    job = await flow.start(channel_limits=limits, checkpoints=checkpoints)
    await until(lambda: len(losses.items) >= 7)
    await job.stop("suspend")
    flow, (models, losses) = run()
    resumed = await flow.start(channel_limits=limits, checkpoints=checkpoints)
    assert (await resumed.wait()).step("train").records_in <= 13
    assert size_of(tmp_path) < 200_000
    assert same(arrays_of(models.items[-1]), arrays_of(whole.items[-1]))


@pytest.mark.parametrize("changes", [False, True])
async def test_a_network_on_a_stream_is_published_and_served_and_resumes(changes: bool) -> None:
    """A service could not load a version without all features, or a new run drew its unseen features anew."""
    models, data = MemoryBroker().topic("models"), spread(rows(300))
    await models.create()

    async def learn(seed: int) -> list[Any]:
        flow = Flow("clicks")
        training = train_network_online(
            flow.from_items(records(data)),
            huge(),
            ParameterServer(shards=2),
            consistency=SSP(staleness=2),
            batch=20,
            workers=2,
            publish_every=3,
            start=Published(models, "clicks"),
            seed=seed,
        )
        training.models.publish_model(models, model="clicks", changes=changes)
        versions = training.models.collect()
        await (await flow.start()).wait()
        return versions.items

    first, second = await learn(seed=1), await learn(seed=2)
    assert len(first) > 2
    assert second[-1].parameters["seed"].tolist() == [1]
    updates = [update async for update in model_updates(models, "clicks", follow=False)]
    for update, made in zip(updates, first + second, strict=True):
        assert isinstance(update.parameters, dict)
        assert update.parameters.keys() == made.parameters.keys()
        assert all(np.array_equal(value, made.parameters[name]) for name, value in update.parameters.items())
    async with ServedNetwork(models, "clicks") as served:
        await served.ready(timeout_s=10)
        assert served.predict(([5, 77, 10**8, HUGE - 1], [1.0] * 4)).value > 0.0


WIDE = {"name": "wide", "type": "simpleinputlayer", "outputdim": 1}
CENTRES = {"name": "wide", "type": "kmeansinputlayer", "outputdim": 1}
LOSS = {"name": "loss", "type": "simplelosslayer", "inputlayer": "wide"}


@pytest.mark.parametrize(
    ("layer", "kind", "said"),
    [
        (WIDE, "T_DOUBLE_DENSE", "set modeltype to T_FLOAT_SPARSE, or lower indexrange"),
        (CENTRES, "T_DOUBLE_SPARSE", "lower indexrange"),
    ],
)
def test_a_network_that_does_not_fit_into_memory_is_refused_before_it_takes_any(
    layer: dict[str, Any], kind: str, said: str
) -> None:
    """A training ended in a MemoryError, or the system killed the process."""
    made = Network.from_json({"data": {"indexrange": 10**12}, "model": {"modeltype": kind}, "layers": [layer, LOSS]})
    name = "wide.weight" if layer is WIDE else "wide.centres"
    message = (
        f"training of all parameters, of which {name!r} is the largest: expected numbers that fit into the memory of "
    )
    with pytest.raises(ModelError, match=message) as refused:
        made.initial_parameters(seed=1)
    assert said in str(refused.value)
    with pytest.raises(ModelError, match=message):
        fit_network(made, LabelledRows(SparseRows.from_rows([([1], [1.0])], 10**12), np.ones(1)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"features": np.array([3, 3])}, "expected 'features', the ascending numbers from 0 to 999,999,999"),
        ({"features": np.array([3, HUGE])}, "expected 'features', the ascending numbers from 0 to 999,999,999"),
        ({"features": None}, "given none; load it with the network that it was trained as"),
        ({"seed": np.array([-1])}, "expected 'seed', the number that its other features are drawn from"),
        (
            {"wide.weight": np.ones((3, 1), np.float32)},
            r"expected 'wide.weight' of shape \(2, 1\), given shape \(3, 1\)",
        ),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(changed: dict[str, Any], said: str) -> None:
    """A model whose rows belonged to other features was trained further without an error."""
    made = Network.from_json(
        {"data": {"indexrange": HUGE}, "model": {"modeltype": "T_FLOAT_SPARSE"}, "layers": [WIDE, LOSS]}
    )
    start = {
        **no_features(1),
        "features": np.array([3, 5]),
        "wide.weight": np.ones((2, 1), np.float32),
        "wide.bias": np.zeros(1, np.float32),
    }
    save_ok = fit_network(made, spread(rows(4)), start=start, epochs=1, progress=False)
    assert np.isin([3, 5], save_ok.parameters["features"]).all()
    with pytest.raises(ModelError, match=said):
        fit_network(made, spread(rows(4)), start={**start, **changed}, progress=False)


async def test_functions_that_need_all_columns_refuse_a_drawn_row() -> None:
    """A sum of a row, of which a few numbers are stored, left out the numbers that are drawn."""
    async with ParameterServer(shards=2) as server:
        drawn = psf.RandomUniform("w", row=0, low=1.0, high=2.0, seed=7)
        await server.create_matrix("w", rows=2, columns=3 * 10**11, sparse=True, default=drawn, vector=3)
        client = server.client(worker=0)
        before = await client.get("w", row=0, columns=[0, 4 * 10**10, 7])
        await client.add("w", row=0, columns=[4 * 10**10], values=[1.0])
        after = await client.get("w", row=0, columns=[0, 4 * 10**10, 7])
        assert after.tolist() == [before[0], before[1] + 1.0, before[2]]
        for refused in (psf.Sum("w", row=0), psf.FullPull("w")):
            with pytest.raises(ParameterServerError, match="given row 0, whose default is drawn; use get and add with"):
                await client.aggregate(refused)
        for change in (psf.Fill("w", row=0, value=1.0), psf.Copy("w", 0, 1), psf.FullFill("w", 0.0)):
            with pytest.raises(ParameterServerError, match="given row 0, whose default is drawn"):
                await client.update(change)
        with pytest.raises(ParameterServerError, match="all columns of matrix 'w': expected numbers that fit"):
            await client.get("w", row=0)
        await client.update(psf.Put("w", row=0, values=[5.0, 6.0], columns=[1, 2]))
        stored = await client.aggregate(psf.PullSparse("w", row=0))
        assert stored.columns.tolist() == [0, 1, 2, *range(4 * 10**10 - 1, 4 * 10**10 + 2)]
        assert stored.values[:3].tolist() == [before[0], 5.0, 6.0]
        with pytest.raises(ParameterServerError, match=r"matrix 'd': .* make it with sparse=True"):
            await server.create_matrix("d", rows=1, columns=10**12)
