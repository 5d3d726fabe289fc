"""Cases of learners: weights, optimizer state, versions, counts, and questions that wait for labels."""

import functools
from typing import Any

import numpy as np
from restore.case import Case, fed, turns

from streamiter import Columns, Flow, Stream, connect
from streamiter.learn import (
    FTRL,
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    AdaptiveLinearModel,
    DelayedLabels,
    Embeddings,
    Examples,
    GradientDescent,
    Inverse,
    InverseSquareRoot,
    LinearModel,
    LinearRegression,
    LogisticRegression,
    Momentum,
    OnlineKMeans,
    OnlineTraining,
    RMSProp,
    SparseRows,
    StandardScaler,
    apriori,
    compare_online,
    k_means,
    k_means_on_parameter_server,
    online_k_means,
    online_standard_scaler,
    sampled_negatives,
    train_offline,
    train_on_parameter_server,
    train_online,
)
from streamiter.learn.clusters.clustering import _SomePoints
from streamiter.learn.clusters.online_centroids import _LearnFromStart
from streamiter.learn.gradients.offline_workers import KeptExamples, OfflineWorker, ReplayedExamples
from streamiter.learn.gradients.training import (
    BroadcastSteps,
    EpochSteps,
    GradientWorker,
    LearnMiniBatches,
    ParameterOwner,
    ReplySteps,
)
from streamiter.learn.item_sets import ChooseFrequent, CountItemSets
from streamiter.learn.late_labels.answer_delays import AnswerDelays, Answers
from streamiter.learn.late_labels.kept_questions import KeptQuestions
from streamiter.learn.late_labels.label_join import LabelJoin
from streamiter.learn.model_owner import ModelOwner, OneStart
from streamiter.learn.negatives import SampleNegatives
from streamiter.learn.online.comparison import Compare
from streamiter.learn.online.gradient_workers import DelayedLabelsWorker, OnlineWorker, OnlineWorkerOptions
from streamiter.learn.online.row_training import RowOwner
from streamiter.learn.quality.validation_step import MeanComparison, Validate
from streamiter.learn.ready_made.cell_columns import Categories, CellColumns
from streamiter.learn.ready_made.embedding_weights import EmbeddingWeights
from streamiter.learn.ready_made.expert_weights import ExpertWeights
from streamiter.learn.ready_made.label_fields import LabelFields
from streamiter.learn.ready_made.mixed_weights import MixedWeights
from streamiter.learn.ready_made.model_rows import FirstRows
from streamiter.learn.ready_made.row_columns import CrossStatistics
from streamiter.learn.ready_made.row_reading import NumberMiniBatches, ReadsLabels
from streamiter.learn.ready_made.table_weights import TableWeights
from streamiter.learn.rows import MiniBatches
from streamiter.learn.server_training import ParameterServerWorker, Repeater, Versions
from streamiter.learn.trees.tree_growing import HistogramWorker, TreeOptions, TreeOwner, grow_tree
from streamiter.operators.timed.in_order import InOrder, RecordOrder, SpansInOrder
from streamiter.parameter_server import ASP, BSP, ParameterServer
from streamiter.parameter_server.consistency import ProgressTracker
from streamiter.parameter_server.shard import Arrivals
from streamiter.parameter_server.storage.feature_table import FeatureTable
from streamiter.values.known_fields import KnownFields

TRUE_WEIGHTS = np.array([1.0, -2.0, 0.5])
OPTIMIZERS = {
    "sgd": SGD(0.1),
    "sgd_decaying": SGD(InverseSquareRoot(0.3), l1=0.01, l2=0.05),
    "ftrl": FTRL(0.3, 0.1, l1=0.01, l2=0.1),
    "gradient_descent": GradientDescent(Inverse(0.2, 3.0)),
    "momentum": Momentum(0.1, l1=0.01, l2=0.05),
    "adagrad": AdaGrad(0.3),
    "rmsprop": RMSProp(0.1, l2=0.05),
    "adadelta": AdaDelta(epsilon=1e-3),
    "adam": Adam(InverseSquareRoot(0.3), l1=0.01),
}


def table(count: int, seed: int = 0) -> Columns:
    """Return features, labels and weights other than 1."""
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(count, 3))
    labels = (generator.random(count) < 1 / (1 + np.exp(-(features @ TRUE_WEIGHTS)))).astype(float)
    return Columns({"x": features, "y": labels, "weight": generator.random(count) + 0.5})


def extract(rows: Any) -> Examples:
    return Examples(rows["x"], rows["y"], rows["weight"])


def classifier() -> LinearModel:
    return LogisticRegression(3, optimizer=FTRL(0.3, 0.1, l1=0.01, l2=0.1))


def regression() -> LinearModel:
    return LinearRegression(3, optimizer=SGD(InverseSquareRoot(0.2), l2=0.01))


# -- online training -------------------------------------------------------------------------------------------


def _outputs(training: OnlineTraining) -> dict[str, Stream]:
    return {"models": training.models, "validation": training.validation}


def online_training(mode: str, flow: Flow) -> dict[str, Stream]:
    make = classifier if mode == "asynchronous" else regression
    examples = fed(flow, table(14), batch=2)
    return _outputs(
        train_online(
            examples,
            make,
            extract=extract,
            mini_batch=4,
            mode=mode,  # type: ignore[arg-type]
            publish_every=2,
            scaler=StandardScaler() if mode == "synchronous" else None,
            window=6,
            report_every=4,
            name="ctr",
        )
    )


def online_training_by_two_workers(flow: Flow) -> dict[str, Stream]:
    examples = fed(flow, table(16), batch=2, parallelism=2)
    training = train_online(
        examples, regression, extract=extract, mini_batch=2, mode="synchronous", report_every=100, name="two"
    )
    return {"models": training.models}


def online_training_from_a_start(flow: Flow) -> dict[str, Stream]:
    start = fed(flow, [{"weights": np.array([0.5, 0.0, -0.5]), "intercept": 0.25}], name="start")
    examples = fed(flow, table(10), batch=2)
    training = train_online(
        examples, classifier, extract=extract, mini_batch=3, initial=start, report_every=4, name="warm"
    )
    return _outputs(training)


def online_training_with_delayed_labels(flow: Flow) -> dict[str, Stream]:
    rows = table(8)
    questions = [{"id": f"q{n}", "x": rows["x"][n]} for n in range(8)]
    answers = [{"id": f"q{n}", "label": rows["y"][n]} for n in range(8)]
    events = [*questions[:4], *answers[2:4], *questions[4:], *answers[:2], *answers[4:]]
    labels = DelayedLabels(
        key_of=lambda event: event["id"],
        is_answer=lambda event: "label" in event,
        features=lambda asked: SparseRows.from_dense(np.array([event["x"] for event in asked])),
        target_of=lambda answer: float(answer["label"]),
        waiting_max=6,
    )
    training = train_online(
        fed(flow, events, batch=2),
        classifier,
        labels=labels,
        mini_batch=3,
        report_every=2,
        on_error="skip",
        name="late",
    )
    return _outputs(training)


def worker_without_answers(flow: Flow) -> Stream:
    """Build a worker that waits for parameters which contain its gradients."""
    answers = [{"weights": np.zeros(3), "intercept": 0.0, "contained": {0: count, 1: 9}} for count in (1, 2, 1, 2)]
    model = fed(flow, [None, *answers], name="model")
    examples = fed(flow, table(24), batch=2, name="examples").batch(2)
    options = OnlineWorkerOptions(classifier, extract, synchronous=False)
    return connect(model=model, examples=examples).process(lambda: OnlineWorker(options), name="train")


def rows_with_fields(count: int) -> list[dict[str, Any]]:
    """Return records of which some have a new field, a new class, or a missing value."""
    rows = table(count)
    towns = ["Rome", "Kyiv", None]
    return [
        {"id": n, "km": x[0], "town": towns[n % 3], "kind": "abc"[n % (1 + n // 4) % 3], "price": 50 * x[1]}
        | ({"new": x[2]} if n > 5 else {})
        for n, x in enumerate(rows["x"].tolist())
    ]


def online_training_by_rows(mode: str, flow: Flow) -> dict[str, Stream]:
    # The price of the first rows only is a part of the label, so it is no feature of the others, too.
    label = (lambda row: row["kind"] if row["price"] or row["id"] < 4 else "") if mode == "asynchronous" else "price"
    training = train_online(
        fed(flow, rows_with_fields(14), batch=2, parallelism=1 if mode == "asynchronous" else 2),
        label=label,
        crosses=[("km", "town"), ("km", "new")],
        weight=lambda record: 0.5 + record["id"],
        mini_batch=4,
        mode=mode,  # type: ignore[arg-type]
        publish_every=2,
        window=6,
        report_every=4,
        # The owner takes mini-batches of two asynchronous workers as they come.
        workers=1 if mode == "asynchronous" else 2,
        name="rows",
    )
    return _outputs(training)


def online_training_with_embeddings(mode: str, flow: Flow) -> dict[str, Stream]:
    """Train on towns that are admitted, and expire, while the rows come."""
    rows = [row | {"at": 3 * row["id"], "town": f"town {row['id'] % 5}"} for row in rows_with_fields(14)]
    training = train_online(
        fed(flow, rows, batch=2, parallelism=1 if mode == "asynchronous" else 2),
        label="price",
        embeddings=Embeddings(factors=2, hidden=(3,), admit=2, expire=14, time="at", at_most="1 MB"),
        mini_batch=4,
        mode=mode,  # type: ignore[arg-type]
        publish_every=2,
        report_every=4,
        workers=1 if mode == "asynchronous" else 2,
        name="vectors",
    )
    return _outputs(training)


def online_training_by_rows_with_delayed_labels(mode: str, flow: Flow) -> dict[str, Stream]:
    questions = [{"q": row["id"], "km": row["km"], "town": row["town"]} for row in rows_with_fields(9)]
    answers = [{"q": row["id"], "label": row["kind"]} for row in rows_with_fields(9)]
    events = [*questions[:4], *answers[2:4], *questions[4:], *answers[:2], *answers[4:]]
    labels = DelayedLabels(
        key_of=lambda event: event["q"],
        is_answer=lambda event: "label" in event,
        features=["km", "town"],
        target_of=lambda answer: answer["label"],
        waiting_max=6,
    )
    training = train_online(
        fed(flow, events, batch=2),
        labels=labels,
        mini_batch=3,
        mode=mode,  # type: ignore[arg-type]
        report_every=2,
        on_error="skip",
        workers=1,
        name="late",
    )
    return _outputs(training)


def online_training_with_labels_in_event_time(
    mode: str, flow: Flow, *, model: Any = None, schedule: Any = None
) -> dict[str, Stream]:
    """Train with answers that come before their question, too late, or never."""
    rows = table(10)
    questions = [{"id": n, "x": x, "at": 10 * n} for n, x in enumerate(rows["x"].tolist())]
    answers = [{"id": n, "y": float(y), "at": 10 * n + 7 * n % 60} for n, y in enumerate(rows["y"])]
    events = sorted([*questions, *answers], key=lambda event: event["at"] + 13 * event["id"] % 31)
    labels = DelayedLabels(
        key_of=lambda event: event["id"],
        is_answer=lambda event: "y" in event,
        features=lambda asked: SparseRows.from_dense(np.array([event["x"] for event in asked])),
        target_of=lambda answer: answer["y"],
        within_s=0.045,
        otherwise=None if schedule is None else 1.0 if schedule == "end" else False,
        schedule=schedule,
    )
    timed = fed(flow, events, batch=2).event_time(
        "at", unit="ms", check_unit=False, out_of_orderness_s=0.031, name="times"
    )
    training = train_online(
        timed,
        model,
        labels=labels,
        mini_batch=3,
        mode=mode,  # type: ignore[arg-type]
        report_every=2,
        on_error="skip",
        workers=1,
        name="late",
    )
    return _outputs(training)


def online_training_behind_a_join(mode: str, flow: Flow) -> dict[str, Stream]:
    """Train on questions that a join has labelled: they are predicted at their time."""
    rows = table(10)
    questions = [{"id": n, "x": float(x[0]), "at": 10 * n} for n, x in enumerate(rows["x"])]
    answers = [{"id": n, "at": 10 * n + 7 * n % 60} for n in range(10) if n % 3]
    left, right = (
        fed(flow, sorted(events, key=lambda event: event["at"]), batch=2, name=name)
        .event_time("at", unit="ms", check_unit=False, name=f"times of {name}")
        .key_by(lambda event: event["id"])
        for name, events in (("questions", questions), ("answers", answers))
    )
    pairs = left.interval_join(right, lower_s=0, upper_s=0.045, how="left", name="join")
    examples = pairs.map(lambda pair: {"x": pair[0]["x"], "y": pair[1] is not None}, name="rows")
    training = train_online(
        examples,
        label="y",
        mini_batch=3,
        mode=mode,  # type: ignore[arg-type]
        report_every=2,
        workers=1,
        name="late",
    )
    return _outputs(training)


def comparison(mode: str, flow: Flow) -> dict[str, Stream]:
    """Compare three learners; in which order their versions reach the step depends on their speed."""
    compared = compare_online(
        fed(flow, rows_with_fields(16), batch=2),
        {
            "km": {"features": ["km"]},
            "all": None,
            "plain": {"model": lambda: LinearRegression(1), "features": lambda rows: [[row["km"]] for row in rows]},
        },
        label="price",
        mini_batch=3,
        mode=mode,  # type: ignore[typeddict-item]
        window=6,
        report_every=4,
        name="champion",
    )
    return {"metrics": compared.metrics}


# -- other learners on streams ---------------------------------------------------------------------------------


def scaling(flow: Flow) -> Stream:
    return online_standard_scaler(fed(flow, table(11)["x"], batch=2), window=4)


def negatives(flow: Flow) -> Stream:
    choices = [{"user": n % 2, "item": n * n % 7} for n in range(12)]
    return sampled_negatives(fed(flow, choices, batch=3), "item", each=2, items=3)


def clustering(flow: Flow) -> Stream:
    return online_k_means(fed(flow, table(14)["x"], batch=3), clusters=2, decay=0.8, mini_batch=4, seed=1)


def clustering_from_a_start(flow: Flow) -> Stream:
    start = fed(flow, [{"centroids": np.array([[0.0, 0, 0], [1.0, 1, 1]]), "weights": np.ones(2)}], name="start")
    return online_k_means(fed(flow, table(9)["x"], batch=2), clusters=2, mini_batch=4, initial=start)


def clustering_by_two_workers(flow: Flow) -> Stream:
    start = np.array([[0.0, 0, 0], [1.0, 1, 1]])
    points = fed(flow, table(14)["x"], batch=3)
    return online_k_means(points, clusters=2, decay=0.8, mini_batch=4, initial=start, workers=2)


# -- bounded ---------------------------------------------------------------------------------------------------


def offline_training(mode: str, flow: Flow) -> dict[str, Stream]:
    replay = mode == "replay"
    training = train_offline(
        fed(flow, table(12), batch=3, parallelism=2),
        classifier if mode == "asynchronous" else regression,
        extract=extract,
        rounds=4,
        mini_batch=6,
        mode="asynchronous" if mode == "asynchronous" else "synchronous",
        replay=replay,
        publish_every=2,
        # The result of two asynchronous workers depends on their speed.
        workers=1 if mode == "asynchronous" else 2,
        name="fit",
    )
    return {"models": training.models, "losses": training.losses}


def offline_k_means(flow: Flow) -> Stream:
    return k_means(fed(flow, table(20)["x"], batch=4, parallelism=2), clusters=3, rounds=3, seed=2)


def item_sets(flow: Flow) -> Stream:
    baskets = [["bread", "milk"], ["beer", "bread"], ["beer", "bread", "milk"], ["milk"], ["beer", "eggs", "milk"]]
    return apriori(fed(flow, baskets, parallelism=2), minimum_support=0.2)


def decision_tree(flow: Flow) -> dict[str, Stream]:
    rows = table(24)
    columns = Columns({"features": rows["x"], "label": rows["y"], "weight": rows["weight"]})
    options = TreeOptions(classes=2, maximum_depth=3, minimum_rows=2, minimum_gain=0.0, maximum_bins=8)
    return grow_tree(fed(flow, columns, batch=5, parallelism=2), options)


# -- on a parameter server -------------------------------------------------------------------------------------


def parameter_server_training(how: str, flow: Flow) -> dict[str, Stream]:
    training = train_on_parameter_server(
        fed(flow, table(14), batch=3, parallelism=2),
        ParameterServer(shards=2),
        features=3,
        consistency=BSP() if how == "BSP" else ASP(),
        optimizer=OPTIMIZERS["adam"],
        extract=extract_from_dicts,
        batch=2,
        epochs=3,
        # The result of two workers that do not wait for each other depends on their speed.
        workers=2 if how == "BSP" else 1,
        publish_every=2,
        name="fit",
    )
    return {"models": training.models}


def extract_from_dicts(rows: Any) -> Examples:
    """Return examples from dicts; records of two subtasks reach one worker as dicts."""
    return Examples(*(np.array([row[name] for row in rows]) for name in ("x", "y", "weight")))


def parameter_server_clustering(flow: Flow) -> dict[str, Stream]:
    clustering = k_means_on_parameter_server(
        fed(flow, table(12)["x"], batch=3, parallelism=2),
        ParameterServer(shards=2),
        initial=[[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]],
        consistency=BSP(),
        batch=2,
        decay=0.9,
        epochs=2,
        name="fit",
    )
    return {"models": clustering.models}


BY_SPARSE_ROWS = (
    AdaptiveLinearModel,
    KnownFields,
    ExpertWeights,
    CrossStatistics,
    Categories,
    RowOwner,
    Answers,
    NumberMiniBatches,
    ReadsLabels,
    Validate,
    MeanComparison,
)
BY_ROWS = (*BY_SPARSE_ROWS, CellColumns, MixedWeights, TableWeights)
ONLINE = (GradientWorker, OnlineWorker, ModelOwner, ParameterOwner, LinearModel, Validate)
OFFLINE = (GradientWorker, OfflineWorker, ParameterOwner, MiniBatches)
# Of a learner that has a case with all cuts, each of which is restored in a fresh process, too.
SOME_CUTS: dict[str, Any] = {"cuts": 6, "fresh_process": False}
ON_SERVER = (ParameterServerWorker, Versions, Repeater, Arrivals, ProgressTracker)

CASES = [
    Case(functools.partial(online_training, "asynchronous"), (*ONLINE, BroadcastSteps)),
    Case(functools.partial(online_training, "synchronous"), (*ONLINE, EpochSteps)),
    Case(functools.partial(online_training, "synchronous"), (*ONLINE, EpochSteps), turns(6)),
    Case(online_training_by_two_workers, (EpochSteps,), {"cuts": 5}),
    Case(online_training_by_two_workers, (EpochSteps,), turns(6)),
    Case(online_training_from_a_start, (*ONLINE, OneStart, BroadcastSteps), {"cuts": 6}),
    Case(online_training_with_delayed_labels, (*ONLINE, DelayedLabelsWorker, LabelJoin, AnswerDelays, KeptQuestions)),
    *(
        Case(
            functools.partial(online_training_with_labels_in_event_time, mode, model=regression, schedule=schedule),
            (*ONLINE, DelayedLabelsWorker, LabelJoin, InOrder, RecordOrder),
            SOME_CUTS,
        )
        for mode, schedule in (("asynchronous", "at once"), ("synchronous", "end"))
    ),
    *(
        Case(
            functools.partial(online_training_with_labels_in_event_time, mode, schedule=schedule),
            (*BY_SPARSE_ROWS, LabelJoin, AnswerDelays, InOrder, RecordOrder),
            SOME_CUTS,
        )
        for mode, schedule in (
            ("asynchronous", "weighted"),
            ("asynchronous", "expected"),
            ("synchronous", "end"),
            ("synchronous", "weighted"),
        )
    ),
    Case(functools.partial(online_training_by_rows, "asynchronous"), (LabelFields,), {"cuts": 4}),
    *(
        Case(
            functools.partial(online_training_behind_a_join, mode),
            (*BY_ROWS, LabelJoin, SpansInOrder, RecordOrder),
            SOME_CUTS,
        )
        for mode in ("asynchronous", "synchronous")
    ),
    *(
        # In synchronous mode the first case learns numbers, whose kind is certain from their first row.
        Case(functools.partial(build, mode), (*covers, FirstRows) if mode == "asynchronous" else covers, options)
        for build, covers in (
            (online_training_by_rows, BY_ROWS),
            (online_training_by_rows_with_delayed_labels, BY_ROWS),
            (online_training_with_labels_in_event_time, BY_SPARSE_ROWS),
        )
        for mode, options in (("asynchronous", {"cuts": 8}), ("synchronous", SOME_CUTS), ("synchronous", turns(4)))
    ),
    *(
        Case(functools.partial(online_training_with_embeddings, mode), (*BY_ROWS, EmbeddingWeights, FeatureTable), each)
        for mode, each in (("asynchronous", {"cuts": 4}), ("synchronous", turns(6)))
    ),
    Case(functools.partial(comparison, "asynchronous"), (Compare,), {"cuts": 4, "compare_state": False}),
    Case(functools.partial(comparison, "synchronous"), (Compare,), turns(3)),
    # With this seed ten mini-batches arrive between two models.
    Case(worker_without_answers, (OnlineWorker,), {"seed": 1555, "compare_state": False}),
    Case(scaling, (LearnMiniBatches, StandardScaler)),
    Case(negatives, (SampleNegatives,)),
    Case(clustering, (_LearnFromStart, LearnMiniBatches, OnlineKMeans)),
    Case(clustering_from_a_start, (_LearnFromStart,)),
    Case(clustering_by_two_workers, (OnlineWorker, EpochSteps, OnlineKMeans), turns(6)),
    Case(functools.partial(offline_training, "synchronous"), (*OFFLINE, KeptExamples, EpochSteps), turns(6)),
    Case(functools.partial(offline_training, "replay"), (*OFFLINE, ReplayedExamples, EpochSteps), turns(6)),
    Case(functools.partial(offline_training, "asynchronous"), (*OFFLINE, KeptExamples, ReplySteps), turns(6)),
    Case(offline_k_means, (_SomePoints,), turns(6)),
    Case(item_sets, (CountItemSets, ChooseFrequent), turns(6)),
    Case(item_sets, (CountItemSets, ChooseFrequent), {"cuts": 4, "compare_state": False}),
    Case(decision_tree, (HistogramWorker, TreeOwner), turns(6)),
    Case(decision_tree, (HistogramWorker, TreeOwner), {"cuts": 4}),
    # After a restore, the repeated data is cut into other pieces.
    *(
        Case(functools.partial(parameter_server_training, how), ON_SERVER, turns(6, compare_state=False))
        for how in ("BSP", "ASP")
    ),
    Case(parameter_server_clustering, ON_SERVER, turns(6, compare_state=False)),
]
