"""Decision trees are compared with a plain search for the best split and on known data, with any number of workers."""

import asyncio
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from files.files_support import data_file
from hypothesis import given, settings
from hypothesis import strategies as st
from iteration.iteration_support import SMALL, cut_items, ended, run, run_shuffled

from streamiter import Columns, Flow
from streamiter.learn import DecisionTree
from streamiter.learn.trees import decision_tree, tree_growing
from streamiter.learn.trees.decision_tree import Tree, grown_tree
from streamiter.learn.trees.tree_growing import TreeOptions, grow_tree
from streamiter.topics import topic
from streamiter.values.plain_data import PlainData

DAYS = """\
sunny hot high weak no
sunny hot high strong no
overcast hot high weak yes
rain mild high weak yes
rain cool normal weak yes
rain cool normal strong no
overcast cool normal strong yes
sunny mild high weak no
sunny cool normal weak yes
rain mild normal weak yes
sunny mild normal strong yes
overcast mild high strong yes
overcast hot normal weak yes
rain mild high strong no
"""
"""Outlook, temperature, humidity, wind, and whether tennis was played: Quinlan, Induction of Decision Trees, 1986."""
WEATHER = ["sunny", "overcast", "rain", "hot", "mild", "cool", "high", "strong"]


def tennis() -> tuple[list[list[float]], list[str]]:
    days = [line.split() for line in DAYS.splitlines()]
    return [[float(weather in day) for weather in WEATHER] for day in days], [day[-1] for day in days]


def made_up(rows: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return features with few, some and many values, labels that depend on them, and different weights."""
    generator = np.random.default_rng(seed)
    features = np.column_stack(
        [
            generator.integers(0, 2, rows),
            generator.integers(0, 9, rows) / 7,
            generator.normal(size=rows),
            np.exp(3 * generator.normal(size=rows)),
        ]
    )
    labels = features[:, 2] * (features[:, 0] - 0.5) + features[:, 1] + 0.1 * generator.normal(size=rows)
    return features, labels, generator.random(rows)


def same(first: Any, second: Any) -> bool:
    """Return whether two trees are equal to the bit."""
    plain = PlainData()
    return plain.encode(first) == plain.encode(second)


# -- the best split ------------------------------------------------------------------------------------------


def impurity(labels: Sequence[int], *, classes: bool) -> Fraction:
    """Return the Gini impurity or the variance, multiplied by the number of rows."""
    if not labels:
        return Fraction(0)
    if classes:
        return len(labels) - sum(Fraction(labels.count(label) ** 2, len(labels)) for label in set(labels))
    return sum(Fraction(label**2) for label in labels) - Fraction(sum(labels) ** 2, len(labels))


def gain(features: Any, labels: Any, column: int, threshold: float, *, classes: bool) -> Fraction:
    goes_left = features[:, column] <= threshold
    left, right = labels[goes_left].tolist(), labels[~goes_left].tolist()
    parts = impurity(left, classes=classes) + impurity(right, classes=classes)
    return impurity(labels.tolist(), classes=classes) - parts


def gains(features: Any, labels: Any, minimum_rows: int, *, classes: bool) -> Iterator[Fraction]:
    """Yield the gain of every split."""
    for column in range(features.shape[1]):
        for value in sorted(set(features[:, column].tolist()))[:-1]:
            left = np.count_nonzero(features[:, column] <= value)
            if minimum_rows <= left <= len(labels) - minimum_rows:
                yield gain(features, labels, column, value, classes=classes)


@st.composite
def small_tables(draw: st.DrawFn) -> tuple[Any, Any]:
    rows, columns = draw(st.integers(1, 14)), draw(st.integers(1, 3))
    value = st.sampled_from([-1.5, 0.0, 0.1, 2.0, 1e9])
    features = draw(st.lists(st.lists(value, min_size=columns, max_size=columns), min_size=rows, max_size=rows))
    labels = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    return np.array(features), np.array(labels)


@given(
    table=small_tables(),
    maximum_depth=st.integers(1, 4),
    minimum_rows=st.integers(1, 3),
    task=st.sampled_from(["classification", "regression"]),
    parallelism=st.integers(1, 3),
)
def test_every_split_is_a_best_split_and_no_leaf_has_a_split_with_gain(
    table: tuple[Any, Any], maximum_depth: int, minimum_rows: int, task: Any, parallelism: int
) -> None:
    """The test searches all splits of all nodes again, exactly, in fractions."""
    features, labels = table
    fitted = DecisionTree(task, maximum_depth=maximum_depth, minimum_rows=minimum_rows).fit(
        features, labels, parallelism=parallelism
    )
    tree = Tree.from_plain_data(fitted.parameters()["tree"])
    classes = task == "classification"

    def check(node: int, rows: Any, depth: int) -> None:
        here, there = features[rows], labels[rows]
        assert tree.rows[node] == len(rows)
        possible = max(gains(here, there, minimum_rows, classes=classes), default=Fraction(0))
        if tree.feature[node] < 0:
            assert depth == maximum_depth or possible == 0
            if classes:
                shares = [np.mean(there == label) for label in fitted.classes]
                assert tree.values[node].tolist() == pytest.approx(shares)
            else:
                assert tree.values[node, 0] == pytest.approx(there.mean())
            return
        column, threshold = int(tree.feature[node]), float(tree.threshold[node])
        assert gain(here, there, column, threshold, classes=classes) == possible > 0
        goes_left = here[:, column] <= threshold
        assert minimum_rows <= goes_left.sum() <= len(rows) - minimum_rows
        check(int(tree.child[node]), rows[goes_left], depth + 1)
        check(int(tree.child[node]) + 1, rows[~goes_left], depth + 1)

    check(0, np.arange(len(labels)), 0)


@settings(max_examples=30)
@given(table=small_tables(), task=st.sampled_from(["classification", "regression"]), data=st.data())
def test_a_row_of_weight_two_counts_as_two_rows_and_weight_zero_as_no_row(
    table: tuple[Any, Any], task: Any, data: st.DataObject
) -> None:
    """Weights that count in the splits must also count in the leaves."""
    features, labels = table
    weights = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(labels), max_size=len(labels)).filter(any)))
    weighted = DecisionTree(task).fit(features, labels, weights)
    repeated = DecisionTree(task).fit(np.repeat(features, weights, axis=0), np.repeat(labels, weights))
    assert weighted.predict(features).tolist() == pytest.approx(repeated.predict(features).tolist())
    assert (weighted.depth, weighted.leaves) == (repeated.depth, repeated.leaves)


def test_the_threshold_is_the_middle_of_two_values_of_the_node() -> None:
    """Rows of 1 and 5 were divided at 1.5, because another row has a 2, so 2.4 went to the side of 5."""
    features = [[0, 1], [0, 5], *([1, value] for value in range(1, 6))]
    fitted = DecisionTree().fit(features, [0, 1, 2, 2, 2, 2, 2])
    assert str(fitted).splitlines()[:3] == ["x[0] ≤ 0.5", "│   x[1] ≤ 2.5: 0 (1 row)", "│   x[1] > 2.5: 1 (1 row)"]


@pytest.mark.parametrize(
    ("low", "high"),
    [(1.0, np.nextafter(1.0, 2.0)), (-1e308, 1e308), (1.6e308, 1.7e308), (0.0, 5e-324), (-5e-324, -0.0)],
)
def test_any_two_values_can_be_divided(low: float, high: float) -> None:
    """The middle of two neighbouring floats is one of them, and the sum of two large floats is infinite."""
    fitted = DecisionTree().fit([[low], [high]], ["low", "high"])
    assert fitted.predict([[low], [high]]).tolist() == ["low", "high"]


# -- known answers -------------------------------------------------------------------------------------------


def test_when_tennis_is_played() -> None:
    """Gini chooses the overcast days first (gain 0.102; humidity has 0.092), and then the splits of the textbook."""
    features, played = tennis()
    fitted = DecisionTree(feature_names=WEATHER).fit(features, played)
    assert str(fitted).splitlines() == [
        "overcast ≤ 0.5",
        "│   high ≤ 0.5",
        "│   │   strong ≤ 0.5: yes (3 rows)",
        "│   │   strong > 0.5",
        "│   │   │   sunny ≤ 0.5: no (1 row)",
        "│   │   │   sunny > 0.5: yes (1 row)",
        "│   high > 0.5",
        "│   │   sunny ≤ 0.5",
        "│   │   │   strong ≤ 0.5: yes (1 row)",
        "│   │   │   strong > 0.5: no (1 row)",
        "│   │   sunny > 0.5: no (3 rows)",
        "overcast > 0.5: yes (4 rows)",
    ]
    assert fitted.predict(features).tolist() == played
    assert (fitted.depth, fitted.leaves) == (4, 7)
    stump = DecisionTree(maximum_depth=1, feature_names=WEATHER).fit(features, played)
    assert str(stump).splitlines() == ["overcast ≤ 0.5: no (10 rows, 50%)", "overcast > 0.5: yes (4 rows)"]
    assert (stump.depth, stump.leaves) == (1, 2)
    assert stump.predict_probability(features[:3]).tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 1.0]]


def test_steps_are_found_by_regression() -> None:
    """A step function is a tree, so regression must find exactly its steps."""
    x = np.arange(100.0)
    y = np.select([x < 20, x < 70], [3.0, -7.0], 1000.0)
    fitted = DecisionTree("regression", feature_names=["x"]).fit(x[:, np.newaxis], y)
    assert str(fitted).splitlines() == [
        "x ≤ 69.5",
        "│   x ≤ 19.5: 3 (20 rows)",
        "│   x > 19.5: -7 (50 rows)",
        "x > 69.5: 1000 (30 rows)",
    ]
    assert fitted.predict([[0], [50], [1e9]]).tolist() == [3.0, -7.0, 1000.0]


def test_census_incomes_are_predicted_as_well_as_by_scikit_learn() -> None:
    """Scikit-learn's tree of the same depth has an accuracy of 0.8397 on the test file, and as many leaves."""
    features, labels = census("a9a_123d_train.libsvm")
    fitted = DecisionTree(maximum_depth=8).fit(features, labels, parallelism=2)
    test_features, test_labels = census("a9a_123d_test.dummy")
    accuracy = np.mean(fitted.predict(test_features) == test_labels)
    assert accuracy == pytest.approx(0.8397, abs=0.005)
    assert fitted.leaves == 193


def census(name: str) -> tuple[Any, Any]:
    flow = Flow("census")
    rows = flow.source(topic(f"file:{data_file(f'a9a/{name}')}"), stop="latest").collect()
    flow.run()
    features = np.zeros((len(rows), 123))
    for row, record in zip(features, rows.items, strict=True):
        row[record["indices"]] = record["values"]
    return features, np.array([record["label"] for record in rows.items])


# -- the end of the growth -----------------------------------------------------------------------------------


def test_a_node_that_no_split_improves_is_a_leaf() -> None:
    """No split improves an exclusive or; equal proportions on both sides must not gain 1e-16 by rounding."""
    fitted = DecisionTree().fit([[0, 0], [0, 1], [1, 0], [1, 1]], [0, 1, 1, 0])
    assert str(fitted) == "0 (4 rows, 50%)"
    assert fitted.predict([[0, 1]]).tolist() == [0]
    fitted.fit([[0]] * 5 + [[1]] * 10, [0, 1, 2, 2, 2] * 3)
    assert str(fitted) == "2 (15 rows, 60%)"


def test_no_round_is_spent_on_leaves_without_a_split() -> None:
    """Every tree ended with a round over all rows that learned nothing."""
    flow = Flow("tree")
    features, label = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], [0.0, 0.0, 1.0, 1.0]
    rows = Columns({"features": features, "label": label, "weight": np.ones(4)})
    grow_tree(flow.from_items(rows), OPTIONS)
    # Epoch 0 sums up the rows and epoch 1 splits the root; that tree passes the loop in epoch 2.
    assert flow.run().loops[0].ended_in == 2


def test_minimum_gain_is_of_the_whole() -> None:
    """The gain counts in proportion to all rows: at the second split only a quarter of the rows gains."""
    features = [[0.0], [1.0], [2.0], [3.0]] * 2
    labels = [0, 1, 1, 1, 0, 0, 1, 1]
    leaves = [
        DecisionTree(minimum_gain=minimum_gain).fit(features, labels).leaves for minimum_gain in (0.0, 0.09, 0.3, 0.5)
    ]
    assert leaves == sorted(leaves, reverse=True)
    assert leaves[0] > leaves[1] > leaves[-1] == 1
    prices = DecisionTree("regression", minimum_gain=1e6).fit([[0], [1]], [0, 4_000])
    assert prices.leaves == 2  # The variance of 4,000,000 becomes 0.
    assert DecisionTree("regression", minimum_gain=5e6).fit([[0], [1]], [0, 4_000]).leaves == 1


# -- the same tree -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_tree_is_the_same_to_the_bit_for_any_number_of_workers(task: Any) -> None:
    """Sums of fractions depend on their order, so near ties were decided differently with three workers."""
    features, labels, weights = made_up(3_000)
    labels = labels if task == "regression" else np.digitize(labels, [-0.2, 0.3, 0.9])
    alone, *others = (
        DecisionTree(task, maximum_bins=40).fit(features, labels, weights, parallelism=parallelism).parameters()
        for parallelism in (1, 2, 3, 7)
    )
    assert alone["tree"]["feature"].max() == 3
    assert all(same(alone, other) for other in others)


OPTIONS = TreeOptions(classes=3, maximum_depth=4, minimum_rows=1, minimum_gain=0.0, maximum_bins=8)


def growing(seed: int = 0, rows: int = 60) -> tuple[Flow, Any]:
    """Build a flow in which a tree grows from batches of rows; return the flow and the sink that collects the tree."""
    features, labels, weights = made_up(rows)
    records = list(zip(features, np.digitize(labels, [0.0, 0.7]), weights, strict=True))
    flow = Flow("tree")
    stream = cut_items(flow, records, seed=seed, parallelism=2).map_batch(as_columns)
    return flow, grow_tree(stream, OPTIONS)["tree"].collect()


def as_columns(records: Any) -> Columns:
    features, labels, weights = zip(*records, strict=True)
    return Columns({"features": features, "label": np.array(labels, dtype=float), "weight": weights})


@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_changes_the_tree(seed: int) -> None:
    """The owner of a node used the histograms of one level for another level."""
    results = []
    for schedule in (0, seed + 1):
        flow, grown = growing(schedule)
        run(flow, seed=schedule, limits=SMALL)
        results.append(grown.items)
    assert same(*results)


def test_a_fit_stopped_early_gives_the_complete_levels() -> None:
    """Ctrl-C ends the loop with the current round; the result has all complete levels, if all rows were read."""
    flow, grown = growing()
    run(flow)
    whole = grown_tree(grown.items[0], OPTIONS)
    depths = set()

    async def after(turns: int) -> None:
        flow, grown = growing()
        job = await flow.start(channel_limits=SMALL)
        for _ in range(turns):
            await asyncio.sleep(0)
        await job.stop("drain")
        await ended(job)
        for so_far in grown.items:
            rows = so_far["tree"]["statistics"][0, 0]
            assert rows > 0
            if rows < 60:  # The job stopped while it read the rows.
                continue
            tree = grown_tree(so_far, OPTIONS)
            depths.add(tree.depth)
            known, inner = len(tree.feature), tree.feature >= 0
            assert same(tree.values, whole.values[:known])
            assert same(tree.threshold[inner], whole.threshold[:known][inner])

    for turns in range(0, 400, 9):
        run_shuffled(after(turns), turns)
    assert len(depths) > 2


def test_a_fit_stopped_before_its_first_tree_keeps_the_old_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree without rows would replace the fitted tree and predict only NaN."""

    def stopped_at_once(flow: Flow, **_: Any) -> None:
        async def main() -> None:
            job = await flow.start()
            await job.stop("drain")
            await ended(job)

        run_shuffled(main())

    fitted = DecisionTree().fit([[0], [1]], ["a", "b"])
    monkeypatch.setattr(decision_tree, "run_offline", stopped_at_once)
    with pytest.raises(KeyboardInterrupt):
        fitted.fit([[0], [1]], ["c", "d"])
    assert fitted.predict([[0], [1]]).tolist() == ["a", "b"]


def test_histograms_that_do_not_fit_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep tree with many bins would take gigabytes of histograms for one level."""
    features, labels, weights = made_up(300)
    expected = DecisionTree("regression").fit(features, labels, weights)
    monkeypatch.setattr(tree_growing, "_HISTOGRAM_BYTES", 100_000)
    one_by_one = DecisionTree("regression").fit(features, labels, weights)
    assert expected.leaves > 20
    assert same(one_by_one.parameters(), expected.parameters())


# -- bins ----------------------------------------------------------------------------------------------------


def test_the_cuts_of_many_values_are_quantiles() -> None:
    """Bins of equal width would put almost all of these rows into one bin."""
    x = np.exp(np.linspace(-300, 300, 1_001))
    fitted = DecisionTree("regression", maximum_bins=4, maximum_depth=2).fit(x[:, np.newaxis], np.arange(1_001))
    tree = fitted.parameters()["tree"]
    thresholds = np.sort(tree["threshold"][tree["feature"] >= 0])
    assert np.searchsorted(x, thresholds).tolist() == pytest.approx([250, 500, 750], abs=1)


def test_too_many_values_are_sampled_equally_at_any_subtask(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each worker sampled for itself, the tree would depend on the number of workers."""
    monkeypatch.setattr(tree_growing, "_VALUES_KEPT", 50)
    generator = np.random.default_rng(0)
    features, nothing, ones = generator.integers(0, 400, (2_000, 2)) / 3, np.zeros(2_000), np.ones(2_000)
    whole = tree_growing.FeatureSummary.of(features, nothing, ones)
    parts = [tree_growing.FeatureSummary.of(features[k::3], nothing[k::3], ones[k::3]) for k in range(3)]
    merged = parts[2].merged(parts[0]).merged(parts[1])
    assert same(merged._asdict(), whole._asdict())
    for column, values, counts in zip(features.T, whole.values, whole.counts, strict=True):
        assert len(values) == 50
        assert counts.tolist() == [np.count_nonzero(column == value) for value in values]
        assert np.median(values) == pytest.approx(np.median(column), abs=20)


# -- parameters and a second fit -----------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [[0, 1, 2], ["a", "b", "c"], [True, False, True], [-1.0, 1.0, 3.0]])
def test_parameters_are_plain_data_that_predict_the_same(labels: list[Any]) -> None:
    """Published parameters must be complete: the classes keep their type."""
    features = [[0.0, 1.0], [1.0, 1.0], [2.0, 0.0]]
    fitted = DecisionTree(feature_names=["x", "y"]).fit(features, labels)
    plain = PlainData()
    again = DecisionTree.from_parameters(plain.decode(plain.encode(fitted.parameters())))
    assert fitted.predict(features).tolist() == again.predict(features).tolist() == labels
    assert same(fitted.predict_probability(features), again.predict_probability(features))
    assert str(again) == str(fitted)


def test_a_second_fit_starts_again() -> None:
    """The second fit must not use the classes or the width of the first fit."""
    fitted = DecisionTree()
    assert str(fitted) == "DecisionTree('classification', not fitted)"
    fitted.fit([[0], [1]], ["a", "b"])
    fitted.fit([[0, 1], [1, 0], [2, 2]], [7, 8, 9])
    assert fitted.classes.tolist() == [7, 8, 9]
    assert fitted.predict([[2, 2]]).tolist() == [9]
