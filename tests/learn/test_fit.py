"""The ``fit`` of every model treats arrays, topics, parallelism, progress and Ctrl-C in the same way."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from streamiter import topic
from streamiter.errors import JobFailed, ModelError
from streamiter.learn import DecisionTree, Examples, KMeans, LinearRegression, SparseRows
from streamiter.topics import MemoryBroker, OutgoingBatch, Raw, Topic

POINTS = [[0.0, 0.0], [0.0, 1.0], [9.0, 0.0], [9.0, 2.0]]
LABELS = [0.0, 0.0, 1.0, 1.0]


def topic_of(records: list[dict[str, Any]]) -> Topic:
    async def written() -> Topic:
        topic = MemoryBroker().topic("rows")
        await topic.create()
        writer = await topic.open_writer()
        await writer.write(OutgoingBatch([orjson.dumps(record) for record in records]))
        await writer.close()
        return topic

    return asyncio.run(written())


def rows_topic() -> Topic:
    return topic_of([{"at": point, "label": label} for point, label in zip(POINTS, LABELS, strict=True)])


def points_of(batch: Any) -> list[Any]:
    return [row["at"] for row in batch]


def examples_of(batch: Any) -> Examples:
    return Examples(points_of(batch), [row["label"] for row in batch])


def linear(*data: Any, **options: Any) -> Any:
    model = LinearRegression(2)
    model.fit(*data, rounds=20, **options)
    return model


def clusters(points: Any, labels: Any = None, **options: Any) -> Any:
    return KMeans(clusters=2, rounds=3, initial=POINTS[1:3]).fit(points, **options)


def tree(*data: Any, **options: Any) -> Any:
    return DecisionTree().fit(*data, **options)


MODELS: list[tuple[Callable[..., Any], Callable[[Any], Any]]] = [
    (linear, examples_of),
    (clusters, points_of),
    (tree, examples_of),
]
NAMES = ["LinearRegression", "KMeans", "DecisionTree"]
NAMED = list(zip([linear, clusters, tree], NAMES, strict=True))
each_model = pytest.mark.parametrize(("fitted", "extract"), MODELS, ids=NAMES)


@each_model
@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_topic_gives_the_same_model_as_arrays(
    fitted: Callable[..., Any], extract: Callable[[Any], Any], parallelism: int
) -> None:
    expected = fitted(POINTS, LABELS).predict(POINTS)
    model = fitted(rows_topic(), extract=extract, parallelism=parallelism)
    assert model.predict(POINTS) == pytest.approx(expected, rel=1e-12)


@each_model
def test_every_fit_accepts_a_decoder(fitted: Callable[..., Any], extract: Callable[[Any], Any]) -> None:
    """One model accepted a decoder, and the others read JSON only."""
    expected = fitted(POINTS, LABELS).predict(POINTS)
    read = fitted(rows_topic(), decode=Raw(), extract=lambda batch: extract([orjson.loads(value) for value in batch]))
    assert read.predict(POINTS) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("fitted", "name"), NAMED, ids=NAMES)
def test_progress_is_shown_on_request(fitted: Callable[..., Any], name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Each model had its own option for progress."""
    fitted(POINTS, LABELS, progress=True)
    shown = capfd.readouterr().err.splitlines()
    assert shown[-1].startswith(f"{name}.fit: round ")
    fitted(POINTS, LABELS, progress=False)
    fitted(POINTS, LABELS)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("fitted", "name"), [(linear, r"LinearRegression\.fit"), (tree, r"DecisionTree\.fit")], ids=["linear", "tree"]
)
@pytest.mark.parametrize("returned", [(POINTS, LABELS), None])
def test_a_function_that_makes_no_examples_is_at_fault_and_not_the_records(
    fitted: Callable[..., Any], name: str, returned: Any
) -> None:
    """The error showed the first record, which was correct, and not the function."""
    message = rf"{name}\(extract=\): expected a function that returns Examples, given one that returned "
    with pytest.raises(JobFailed, match=message) as caught:
        fitted(rows_topic(), extract=lambda batch: returned)
    assert "record" not in str(caught.value).partition("expected")[0]


def test_progress_counts_the_rounds_that_were_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    """The pass that chooses the centroids was counted: progress showed round 4 of 4, although 3 were configured."""
    model = KMeans(clusters=2, rounds=3, tolerance=None).fit(POINTS, progress=True)
    assert model.rounds_made == 3
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("KMeans.fit: round 3 of 3, inertia ")


# -- trees, which need all rows before the first split -------------------------------------------------------


def test_a_tree_grows_from_a_file_of_which_the_first_rows_lack_a_feature(tmp_path: Path) -> None:
    """The width of the rows is known only after the last row has been read."""
    generator = np.random.default_rng(1)
    features = (generator.random((20_000, 4)) < 0.5).astype(float)
    features[:19_000, 3] = 0.0
    labels = (features[:, 0] + 2 * features[:, 3] > 1).astype(float)
    lines = [
        " ".join([f"{label:g}", *(f"{place + 1}:{row[place]:g}" for place in np.flatnonzero(row))])
        for row, label in zip(features, labels, strict=True)
    ]
    (tmp_path / "rows.libsvm").write_text("\n".join(lines) + "\n")
    grown = DecisionTree().fit(topic(f"file:{tmp_path / 'rows.libsvm'}"))
    assert (grown.predict(features) == labels).all()
    assert str(grown) == str(DecisionTree().fit(features, labels))


def test_a_tree_takes_sparse_rows_and_gives_the_same_answers() -> None:
    sparse = SparseRows.from_dense(POINTS)
    grown = DecisionTree().fit(sparse, LABELS)
    assert str(grown) == str(DecisionTree().fit(POINTS, LABELS))
    assert grown.predict(sparse).tolist() == LABELS


@pytest.mark.parametrize("weighted", [False, True])
def test_weights_of_a_topic_count(weighted: bool) -> None:
    rows = topic_of([{"at": [0.0], "label": "a", "w": 1}, {"at": [0.0], "label": "b", "w": 5}])

    def weighted_examples(batch: Any) -> Examples:
        weights = [row["w"] for row in batch] if weighted else None
        return Examples(points_of(batch), [row["label"] for row in batch], weights)

    grown = DecisionTree().fit(rows, extract=weighted_examples)
    assert grown.predict([[0.0]]).tolist() == ["b" if weighted else "a"]


def test_an_interrupt_during_reading_keeps_the_old_tree() -> None:
    """A tree of only the first rows of a topic would replace the fitted tree."""
    grown = DecisionTree().fit(POINTS, LABELS)
    before = str(grown)

    def interrupt(batch: Any) -> Examples:
        signal.raise_signal(signal.SIGINT)
        return examples_of(batch)

    with pytest.raises(KeyboardInterrupt):
        grown.fit(rows_topic(), extract=interrupt)
    assert str(grown) == before


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], r"a matrix \(rows, features\) with at least one of each, given shape \(0,\)"),
        ([{"at": [np.nan], "label": 1}], "numbers|finite"),
    ],
)
def test_a_topic_without_rows_to_learn_from_is_refused(records: list[Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        DecisionTree().fit(topic_of(records), extract=examples_of)


def test_records_that_are_no_examples_end_the_reading() -> None:
    with pytest.raises(JobFailed, match=r"DecisionTree\.fit: expected records with label, indices and values"):
        DecisionTree().fit(rows_topic())
