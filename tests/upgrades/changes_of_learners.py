"""The changes of learners, of trainings on a parameter server and of iterations on the page about upgrades."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from upgrades.changed_flows import REST, Build, Change, Inputs, clustered, trained, trained_later
from upgrades.changes import OF_STEPS

from streamiter import (
    IterationBodyResult,
    IterationConfig,
    Operator,
    OperatorLifeCycle,
    Stream,
    iterate_bounded_streams_until_termination,
    replayed,
)
from streamiter.iteration import all_reduce, last_round, map_with, terminate_after
from streamiter.learn import (
    ADWIN,
    AdaptiveLinearModel,
    Examples,
    FieldWatch,
    LinearRegression,
    LogisticRegression,
    SparseRows,
    StandardScaler,
    apriori,
    compare_online,
    k_means,
    k_means_on_parameter_server,
    online_standard_scaler,
    sampled_negatives,
    train_offline,
    train_on_parameter_server,
)
from streamiter.networks import LabelledRows, Network, train_network, train_network_online
from streamiter.parameter_server import ASP, BSP, SSP, Admission, ParameterServer, psf
from streamiter.parameter_server.optimizers import FTRL, SGD, Adam


def compared(*learners: str, **options: Any) -> Build:
    """Return a comparison of these learners, which differ in their names only."""
    of_learners: dict[str, Any] = {name: {"features": ["v"]} for name in learners}
    settings = {"label": "w", "task": "regression", "report_every": 2, "name": "step", **options}
    return lambda inputs: compare_online(inputs.plain(), of_learners, **settings).metrics


def examples_of(width: int, negative: float) -> Callable[[list[Any]], Examples]:
    """Return a function that makes examples of records: whether the key is 2."""

    def extract(records: list[Any]) -> Examples:
        rows = np.array([[float(record["v"])] * width for record in records])
        return Examples(rows, [1.0 if record["k"] == 2 else negative for record in records])

    return extract


def offline(**options: Any) -> Build:
    settings = {"rounds": 3, "name": "step", "publish_every": 1, **options}
    return lambda inputs: (
        train_offline(inputs.bounded(), lambda: LogisticRegression(1), extract=examples_of(1, 0.0), **settings).models
    )


def clusters(count: int, rounds: int = 3) -> Build:
    return lambda inputs: k_means(
        inputs.bounded().map(lambda record: [float(record["v"])]), clusters=count, rounds=rounds, name="step"
    )


def item_sets(**options: Any) -> Build:
    return lambda inputs: apriori(
        inputs.bounded().map(lambda record: [record["k"], record["id"]]), name="step", **options
    )


def on_server(**options: Any) -> Build:
    """Return a training on a parameter server."""
    settings = {"features": 1, "batch": 1, "consistency": BSP(), "epochs": 1, "name": "step", **options}
    extract = examples_of(settings["features"], -1.0 if settings.get("labels") == "-1/1" else 0.0)

    def build(inputs: Inputs) -> Stream:
        examples = inputs.plain() if settings["epochs"] == 1 else inputs.bounded()
        return train_on_parameter_server(examples, ParameterServer(), extract=extract, **settings).models

    return build


def clustered_on_server(*initial: float) -> Build:
    return lambda inputs: (
        k_means_on_parameter_server(
            inputs.bounded().map(lambda record: [float(record["v"])]),
            ParameterServer(),
            initial=[[each] for each in initial],
            consistency=BSP(),
            batch=1,
            epochs=1,
            name="step",
        ).models
    )


def network(width: int = 1, optimizer: Any = "Adam", transfer: str = "relu", **sections: Any) -> Network:
    """Return a network of two layers."""
    layers = [
        {"name": "hidden", "type": "simpleinputlayer", "outputdim": 2, "transfunc": transfer},
        {"name": "score", "type": "fclayer", "inputlayer": "hidden", "outputdims": [1], "transfuncs": ["identity"]},
        {"name": "loss", "type": "simplelosslayer", "inputlayer": "score", "lossfunc": "logloss"},
    ]
    data = {"format": "dense", "indexrange": width}
    return Network.from_json({"data": data, "default_optimizer": optimizer, "layers": layers, **sections})


def network_on_stream(made: Network, **options: Any) -> Build:
    settings = {"consistency": BSP(), "batch": 1, "name": "step", **options}
    return lambda inputs: (
        train_network_online(
            inputs.plain(), made, ParameterServer(), extract=examples_of(made.features or 1, -1.0), **settings
        ).models
    )


def come_and_go(admission: Admission | None) -> Build:
    """Return a training whose features are the keys of the records."""

    def extract(records: list[Any]) -> Examples:
        rows = SparseRows.from_rows((([record["k"]], [1.0]) for record in records), 2**52)
        return Examples(rows, [1.0 if record["k"] == 2 else -1.0 for record in records])

    made = network(2**52, model={"modeltype": "T_FLOAT_SPARSE"})
    settings = {"consistency": BSP(), "batch": 1, "name": "step", "extract": extract, "admission": admission}
    return lambda inputs: train_network_online(inputs.plain(), made, ParameterServer(), **settings).models


def network_in_epochs(*, updates: int = 2, epochs: int = 2, **options: Any) -> Build:
    """Return a training on rows in memory, which waits for the records of both runs before it publishes the last."""
    data = LabelledRows(np.array([[1.0], [2.0], [4.0], [8.0]]), np.array([1.0, -1.0, 1.0, -1.0]))
    made = network(train={"numupdateperepoch": updates})

    def build(inputs: Inputs) -> Stream:
        training = train_network(
            inputs.flow, data, made, ParameterServer(), consistency=BSP(), epochs=epochs, name="step", **options
        )
        return training.models.union(inputs.plain()).filter(lambda one: not isinstance(one, dict))

    return build


class Adds(Operator):
    """Adds each record to a matrix of its own."""

    settings: dict[str, Any]

    async def open(self, context: Any) -> None:
        self.client = context.parameter_server
        await self.client.create_matrix("sums", **{"rows": 4, "columns": 6, **self.settings})

    async def process(self, record: Any, out: Any) -> None:
        await self.client.add("sums", row=0, columns=[record["k"]], values=[1.0])
        await self.client.clock("sums")
        out.emit((await self.client.get("sums", row=0))[:6].tolist())


def matrix(shards: int = 1, **settings: Any) -> Build:
    operator = type("Adds", (Adds,), {"settings": settings})
    return lambda inputs: inputs.plain().process(
        operator, name="step", parallelism=1, parameter_server=ParameterServer(shards=shards)
    )


def rounds(
    criteria: Callable[[Stream], Stream] | None = None,
    middle: Callable[[list[Stream], list[Stream]], Stream] | None = None,
    *,
    marked: Callable[[Stream], Any] = replayed,
    **config: Any,
) -> Build:
    """Return a bounded iteration over the records of both runs, whose variable counts to three."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[list[Stream]]:
        counted = variables[0].map(lambda n: n + 1)
        results = data[0] if middle is None else middle(variables, data)
        ends = None if criteria is None else criteria(counted)
        return IterationBodyResult([counted.filter(lambda n: n < 3)], [results], ends)

    def build(inputs: Inputs) -> Stream:
        variable = inputs.flow.from_items([0], name="variable")
        data = marked(inputs.bounded().map(lambda record: record["v"]))
        settings = IterationConfig(name="loop", **config)
        return iterate_bounded_streams_until_termination([variable], [data], body, settings)[0]

    return build


ITERATION = "`iterate_bounded_streams_until_termination`, `iterate_unbounded_streams`"
OWNER = "step: "
"""The beginning of the names of the steps of a training."""


def records_of(count: int) -> dict[str, Any]:
    """Return what a training that keeps its state has learned from."""
    return {"results": lambda models: models[-1].records, "expected": count}


def learner(
    of: str, change: str, before: Build, after: Build, becomes: Literal["keep", "refuse"], says: str = "", **more: Any
) -> Change:
    """Return the change of a training in a loop."""
    settings = records_of(5) if becomes == "keep" else {"has_remedy": False, "step": OWNER}
    return Change((f"`{of}`", change), before, after, becomes, says, **{**settings, **more})


def online(change: str, before: Build, after: Build, becomes: Any, says: str = "", **more: Any) -> Change:
    return learner("train_online", change, before, after, becomes, says, **more)


def adaptive(**options: Any) -> Build:
    return trained(lambda: AdaptiveLinearModel(**options), features=["v"], label="w")


def on_a_server(of: str, change: str, before: Build, after: Build, becomes: Any, says: str = "") -> Change:
    """Return the change of a training on a parameter server, which starts again with its counts of versions."""
    settings = records_of(5) if becomes == "keep" else {"step": "step: train", "also": ("step: versions",)}
    return Change((f"`{of}`", change), before, after, becomes, says, **settings)


def looped(change: str, before: Build, after: Build, becomes: Any, says: str = "", of: str = ITERATION) -> Change:
    settings: dict[str, Any] = {"has_remedy": False, "step": ""} if becomes == "refuse" else {}
    return Change((of, change), before, after, becomes, says, **settings)


def helper(of: str, change: str, before: Build, after: Build, becomes: Any, says: str = "") -> Change:
    return looped(change, before, after, becomes, says, f"`{of}`")


LABEL, TASK = "the field of `label`", "`task`, `positive`, `classes`, `rates`, `loss` of the ready-made model"
FIELDS = "`bits`, `crosses`, `kinds`, `time_zone`"
ADAPTED = f'{FIELDS}, with `other_settings="keep"`'
FIXED = "the number of features, the optimizer, `loss`, `scaler`"
OTHERS = "learning rates, `mini_batch`, `workers`, `drift`, `watch`, `publish_every`, `report_every`"
MODEL = "`features`, `intercept`, `loss`, `labels`, `dtype`, the optimizer"
NETWORK = "layers, their functions, the optimizer, `indexrange`, `modeltype`, `seed`"
RATES = "learning rates, `batch`, `workers`, `publish_every`, `consistency`"

OF_LEARNERS: list[Change] = [
    online(
        "`model`",
        trained(lambda: LogisticRegression(1)),
        trained(lambda: LinearRegression(1)),
        "refuse",
        "model was LogisticRegression, now LinearRegression",
    ),
    online(LABEL, trained(features=["v"], label="w"), trained(features=["v"], label="id"), "refuse", "field 'w', now"),
    online(
        TASK,
        adaptive(bits=10),
        adaptive(bits=12, task="regression", rates=[0.5]),
        "refuse",
        r"task was None, now regression, bits was 10, now 12, rates was None, now \[0.5\]",
    ),
    online(TASK, adaptive(loss="absolute"), adaptive(loss="poisson"), "refuse", "loss was quantile 0.5, now poisson"),
    online(FIELDS, adaptive(), adaptive(kinds={"v": "category"}), "refuse", r"kinds: 'v' \(category\) is new"),
    online(
        ADAPTED,
        adaptive(bits=10, crosses=[("v", "id")]),
        adaptive(bits=12, kinds={"id": "category"}, other_settings="keep"),
        "keep",
    ),
    online("`features` and `weight` of the ready-made model", adaptive(), trained(label="w", weight="id"), "keep"),
    online(
        FIXED,
        trained(lambda: LogisticRegression(1)),
        trained(lambda: LogisticRegression(2, optimizer=SGD(0.1)), width=2, scaler=StandardScaler()),
        "refuse",
        "features was 1, now 2, optimizer was ftrl, now sgd, is_scaled was False, now True",
    ),
    online(
        OTHERS,
        trained(lambda: LogisticRegression(1, optimizer=SGD(0.1))),
        trained(lambda: LogisticRegression(1, optimizer=SGD(0.001)), publish_every=1, mini_batch=1),
        "keep",
    ),
    online(
        OTHERS,
        adaptive(),
        trained(features=["v"], label="w", drift=ADWIN(), watch=FieldWatch(), publish_every_s=60),
        "keep",
    ),
    online("`mode`", adaptive(), trained(label="w", mode="synchronous"), "refuse", "mode was asynchronous, now"),
    online(
        "`labels`: `time`",
        trained_later(),
        trained_later(time="processing"),
        "refuse",
        "labels was later, in event time, now later, by the clock",
    ),
    online("`labels`: `schedule`", trained_later(), trained_later(schedule="weighted"), "keep", expected=2),
    online("`labels`: `otherwise`", trained_later(), trained_later(otherwise=True), "keep", expected=2),
    online("`labels`: `weight_of`", trained_later(), trained_later(weight_of=lambda record: 2.0), "keep", expected=2),
    online(
        "`labels`: `within_s`, `waiting_max`", trained_later(), trained_later(50.0, waiting_max=10), "keep", expected=2
    ),
    learner(
        "compare_online",
        "the order of learners, `margin`, `report_every`, `window`",
        compared("a", "b"),
        compared("b", "a", margin=0.5, report_every=3, window=7),
        "keep",
        results=lambda reports: reports[-1]["learners"]["a"]["count"],
        expected=4,  # The first number was predicted before any was known.
    ),
    learner(
        "compare_online",
        "another learner, or one less",
        compared("a", "b"),
        compared("a", "c"),
        "refuse",
        r"no steps 'step: b: .*; new steps 'step: c: .*a changed step 'step: compare' \(learners was .*restore=None",
        step="step: compare",
    ),
    Change(
        ("`online_k_means`", "`clusters`"),
        clustered(2),
        clustered(3),
        "refuse",
        "clusters was 2, now 3",
        step="step: centroids",
    ),
    Change(
        ("`online_k_means`", "`decay`, `mini_batch`"),
        clustered(2),
        clustered(2, decay=0.5, mini_batch=3),
        "keep",
        **records_of(5),
    ),
    Change(
        ("`online_k_means`", "`workers`, from a number to another"),
        clustered(2, workers=2),
        clustered(2, workers=1),
        "keep",
        **records_of(5),
    ),
    Change(
        ("`online_standard_scaler`", "`window`"),
        lambda inputs: online_standard_scaler(inputs.plain().map(lambda one: [float(one["v"])]), name="step"),
        lambda inputs: online_standard_scaler(inputs.plain().map(lambda one: [float(one["v"])]), window=2, name="step"),
        "keep",
        **records_of(5),
    ),
    Change(
        ("`sampled_negatives`", "`item`"),
        lambda inputs: sampled_negatives(inputs.plain(), "v", name="step"),
        lambda inputs: sampled_negatives(inputs.plain(), ["v", "w"], name="step"),
        "refuse",
        "fields was .'v'., now .'v', 'w'.",
        step="step: negatives",
    ),
    Change(
        ("`sampled_negatives`", "`each`, `items`, `seed`, `label`"),
        lambda inputs: sampled_negatives(inputs.plain(), "v", name="step"),
        lambda inputs: sampled_negatives(inputs.plain(), "v", each=3, items=2, seed=1, label="is", name="step"),
        "keep",
        results=lambda rows: sum("is" in row for row in rows),
        expected=4 * len(REST),  # Also of the first one: it knows the items of before.
    ),
    learner("train_offline", "the model, `mode`, `replay`", offline(), offline(replay=True), "refuse", "now Replayer"),
    learner(
        "train_offline",
        "`rounds`, `mini_batch`, `publish_every`",
        offline(),
        offline(rounds=4),
        "keep",
        **records_of(20),
    ),
    learner("k_means", "`clusters`, `seed`", clusters(2), clusters(3), "refuse", "clusters=2, .* now .*clusters=3"),
    learner("k_means", "`rounds`", clusters(2), clusters(2, rounds=1), "keep"),
    learner(
        "apriori",
        "`minimum_support`",
        item_sets(minimum_support=0.5),
        item_sets(minimum_support=0.1),
        "refuse",
        "minimum_support was 0.5, now 0.1",
    ),
    learner(
        "apriori",
        "`maximum_size`",
        item_sets(minimum_support=0.2),
        item_sets(minimum_support=0.2, maximum_size=1),
        "keep",
        results=None,
        expected=None,
    ),
    on_a_server(
        "train_on_parameter_server",
        MODEL,
        on_server(optimizer=FTRL()),
        on_server(optimizer=Adam(), features=2, labels="-1/1"),
        "refuse",
        "features was 1, now 2, labels was 0/1, now -1/1, optimizer was ftrl, now adam",
    ),
    *(
        on_a_server(
            "train_on_parameter_server",
            RATES,
            on_server(optimizer=FTRL(0.3)),
            on_server(optimizer=FTRL(0.1), batch=2, consistency=consistency),
            "keep",
        )
        for consistency in (ASP(), SSP(staleness=1))
    ),
    Change(
        ("`train_on_parameter_server`", "`epochs`"),
        on_server(epochs=2),
        on_server(epochs=3),
        "refuse",
        "passes was 2, now 3",
        step="step: epochs",
    ),
    on_a_server(
        "k_means_on_parameter_server",
        "the number of clusters or coordinates",
        clustered_on_server(1.0, 9.0),
        clustered_on_server(1.0, 5.0, 9.0),
        "refuse",
        "clusters was 2, now 3",
    ),
    on_a_server(
        "train_network_online",
        NETWORK,
        network_on_stream(network()),
        network_on_stream(network(optimizer="Momentum", transfer="sigmoid"), seed=7),
        "refuse",
        "layers: 'hidden' was .* Relu, adam, now .* Sigmoid, momentum, layers: 'score' was .*, seed was 0, now 7",
    ),
    on_a_server(
        "train_network_online",
        RATES,
        network_on_stream(network()),
        network_on_stream(network(train={"lr": 0.5})),
        "keep",
    ),
    on_a_server(
        "train_network_online",
        "with `admission` or without",
        come_and_go(None),
        come_and_go(Admission()),
        "refuse",
        "admission is new",
    ),
    on_a_server(
        "train_network_online",
        "`admit`, `expire`, `at_most` and `time` of `admission`",
        come_and_go(Admission(admit=1, at_most="2 MB")),
        come_and_go(Admission(admit=2, at_most="1 MB", expire="1d", time="t")),
        "keep",
    ),
    on_a_server(
        "train_network",
        f"{NETWORK}, `numupdateperepoch`",
        network_in_epochs(),
        network_in_epochs(updates=4),
        "refuse",
        "steps of an epoch was 2, now 4",
    ),
    Change(
        ("`train_network`", "`epochs`"),
        network_in_epochs(epochs=2000),
        network_in_epochs(epochs=3),
        "keep",
        results=lambda models: models[-1].epoch >= 3,
        expected=True,
    ),
    *(
        Change(
            (
                "a matrix of a parameter server",
                "`rows`, `columns`, `dtype`, `sparse`, `default`, the function `on_clock`",
            ),
            matrix(**before),
            matrix(**after),
            "refuse",
            says,
            has_remedy=False,
        )
        for before, after, says in [
            ({}, {"rows": 5, "columns": 7, "dtype": "float32"}, "rows was 4, now 5, columns was 6, now 7, dtype was"),
            ({"sparse": True}, {"sparse": True, "default": 1.0}, "default was 0.0, now 1.0"),
            (
                {"on_clock": psf.Optimize("sums", FTRL())},
                {"on_clock": psf.Optimize("sums", Adam())},
                "on_clock was Optimize with ftrl, now Optimize with adam",
            ),
        ]
    ),
    *(
        Change(
            ("a matrix of a parameter server", "`consistency`, `block`, `init`, `shards`"),
            matrix(),
            matrix(**after),
            "keep",
            results=lambda sums: sums[-1],
            expected=[0.0, 4.0, 1.0, 0.0, 0.0, 0.0],
        )
        for after in ({"shards": 2, "block": (4, 2)}, {"consistency": SSP(staleness=2), "init": 7.0})
    ),
]

OF_ITERATIONS: list[Change] = [
    looped("`max_epochs_ahead`, from one number to another", rounds(), rounds(max_epochs_ahead=2), "keep"),
    looped(
        "`max_epochs_ahead`, None or not",
        rounds(),
        rounds(max_epochs_ahead=None),
        "refuse",
        "max_epochs_ahead was a number, now None",
    ),
    looped(
        "`operator_life_cycle`",
        rounds(middle=lambda variables, data: last_round(data[0], name="step")),
        rounds(
            middle=lambda variables, data: last_round(data[0], name="step"),
            operator_life_cycle=OperatorLifeCycle.PER_ROUND,
        ),
        "refuse",
        "operator_life_cycle is new",
    ),
    looped(
        "`replayed`, `epochs_every` or neither",
        rounds(),
        rounds(marked=lambda stream: stream),
        "refuse",
        "it was Replayer, now Entrance",
    ),
    looped(
        "variables, data, termination criteria: whether they are there",
        rounds(),
        rounds(lambda counted: terminate_after(counted, rounds=2, name="step")),
        "refuse",
        r"new steps 'step', 'loop: termination criteria', .*: restore=None",
    ),
    looped("`feedback_limits`, `replay_memory_bytes`", rounds(), rounds(replay_memory_bytes=0), "keep"),
    helper(
        "terminate_after",
        "`rounds`, the `tolerance` to another number",
        rounds(lambda counted: terminate_after(counted, rounds=9, tolerance=-5, name="step")),
        rounds(lambda counted: terminate_after(counted, rounds=2, tolerance=-1, name="step")),
        "keep",
    ),
    helper(
        "terminate_after",
        "whether there is a `tolerance`",
        rounds(lambda counted: terminate_after(counted, rounds=9, name="step")),
        rounds(lambda counted: terminate_after(counted, rounds=9, tolerance=1.0, name="step")),
        "refuse",
        "tolerance was None, now a number",
    ),
    helper(
        "all_reduce",
        "a function of Python or numpy",
        rounds(middle=lambda variables, data: all_reduce(data[0], max, name="step")),
        rounds(middle=lambda variables, data: all_reduce(data[0], min, name="step")),
        "refuse",
        "f was max, now min",
    ),
    helper(
        "map_with",
        "its function",
        rounds(middle=lambda variables, data: map_with(data[0], variables[0], lambda n, batch: batch, name="step")),
        rounds(middle=lambda variables, data: map_with(data[0], variables[0], lambda n, batch: [*batch], name="step")),
        "keep",
    ),
]

CHANGES = [*OF_STEPS, *OF_LEARNERS, *OF_ITERATIONS]
