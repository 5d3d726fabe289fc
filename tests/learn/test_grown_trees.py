"""Trees and pairs are chosen by the errors of the last rows: those that explain most of them."""

import numpy as np
import pytest

from streamiter.learn import AdaptiveLinearModel
from streamiter.learn.ready_made import cell_steps
from streamiter.values.numbers import Floats, Indices


def test_each_level_of_a_tree_is_the_comparison_that_gains_most() -> None:
    """A tree whose cells are added up with those of another leaf would be a random one, and still learn a little."""
    draw = np.random.default_rng(1)
    bins = draw.integers(0, 61, size=(900, 5)).astype(np.uint8)
    errors = np.rint(256 * draw.normal(size=900)) + 300.0 * ((bins[:, 3] > 20) & (bins[:, 1] > 41)) - 90.0
    tried = np.stack([draw.permutation(5)[:3] for _ in range(cell_steps.DEPTH)])
    columns, thresholds = np.full((2, cell_steps.DEPTH), -1, np.int32)
    leaves, room = np.zeros(900, np.intp), np.empty(cell_steps.OF_TREE * cell_steps.FINE)
    cell_steps.choose_comparisons(bins, errors, tried, leaves, room, columns, thresholds)
    expected = np.zeros(900, np.intp)
    for level, candidates in enumerate(tried):
        tests = [(column, fine) for column in candidates for fine in range(2, 60, 2)]
        kept = [_explained(errors, 2 * expected + (bins[:, column] > fine)) for column, fine in tests]
        if max(kept) <= _explained(errors, expected):  # It stays as it is drawn.
            break
        assert (columns[level], thresholds[level]) == tests[int(np.argmax(kept))]
        expected = 2 * expected + (bins[:, columns[level]] > thresholds[level])
    assert 3 <= level < cell_steps.DEPTH - 1
    assert (columns[level:] == -1).all()
    assert np.array_equal(leaves, expected)


def _explained(errors: Floats, leaves: Indices) -> float:
    """Return how much less the squared errors are around the means of leaves, with ten rows of no error in each."""
    sums, rows = np.bincount(leaves, errors), np.bincount(leaves)
    return float((sums**2 / (rows + 10.0)).sum())


@pytest.mark.parametrize("kind", ["binary", "number", "classes"])
def test_a_pair_without_effects_of_its_own_is_found_among_many(kind: str) -> None:
    """Pairs of columns that matter were drawn, and neither column of this pair does alone: the share was predicted."""
    draw = np.random.default_rng(2)
    x = draw.normal(size=(6_000, 30))
    same = x[:, 7] * x[:, 19] > 0
    names = np.array(["same", "other", "third"])
    labels = {"binary": same, "number": same * 1.0, "classes": names[np.where(x[:, 0] > 1, 2, 1 - same)]}[kind]
    model = AdaptiveLinearModel()
    found = model.learn_each(x, labels)
    assert [7, 19] in model.parameters(state=False)["shapes"]["members"][1]["pairs"].tolist()
    if kind != "classes":
        assert np.mean((found - same)[5_000:] ** 2) < 0.06  # The share has .25.


def test_a_grown_tree_predicts_from_its_first_row_on() -> None:
    """A tree that had replaced another one predicted nothing, until each of its leaves had rows of its own."""
    draw = np.random.default_rng(3)
    x = draw.normal(size=(4_096, 4))
    model = AdaptiveLinearModel()
    model.learn_each(x, np.sign(x[:, 2] * x[:, 3]))  # Behind the last row trees are grown.
    member = model.parameters(state=False)["shapes"]["members"][1]
    trees = np.reshape(member["tables"][-len(member["tree_columns"]) * cell_steps.OF_TREE :], (-1, cell_steps.OF_TREE))
    assert (np.abs(trees).max(axis=1) > 0.0).all()
    assert np.abs(trees).max() < 2.0


def test_a_label_that_is_far_too_large_is_no_part_of_a_tree() -> None:
    """Trees that begin with a part of their rows' errors would begin with a part of 1e12 after one wrong label."""
    draw = np.random.default_rng(4)
    x = draw.normal(size=(2_000, 3))
    labels = np.abs(x[:, 0]) + 0.1 * draw.normal(size=2_000)
    errors = []
    for wrong in (labels[700], 1e12):
        given = np.where(np.arange(2_000) == 700, wrong, labels)
        errors.append(np.mean((AdaptiveLinearModel().learn_each(x, given) - labels)[1_024:] ** 2))
    assert errors[1] < 1.5 * errors[0]
