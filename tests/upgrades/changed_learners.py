"""Flows with one training or one iteration to change between two runs, as `changed_flows`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from upgrades.changed_flows import Build, Inputs

from streamiter import (
    IterationBodyResult,
    IterationConfig,
    Operator,
    Stream,
    iterate_bounded_streams_until_termination,
    replayed,
)
from streamiter.learn import (
    Examples,
    LogisticRegression,
    apriori,
    compare_online,
    k_means,
    k_means_on_parameter_server,
    train_offline,
    train_on_parameter_server,
)
from streamiter.networks import LabelledRows, Network, train_network, train_network_online
from streamiter.parameter_server import BSP, ParameterServer


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
