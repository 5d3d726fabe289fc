"""Members with tables leave the mixture where they need too much memory, and outliers do not hide which is best."""

import numpy as np

from streamiter.learn import AdaptiveLinearModel


def test_a_member_that_leaves_within_a_mini_batch_ends_no_training() -> None:
    """With 20 classes and 30 columns a member left in the first mini-batch, and the training failed."""
    draw = np.random.default_rng(1)
    names = [f"class {number}" for number in range(20)]
    rows = [{f"x{column}": float(value) for column, value in enumerate(row)} for row in draw.normal(size=(300, 30))]
    labels = [names[number] for number in draw.integers(20, size=300)]
    whole, parts = AdaptiveLinearModel(classes=names), AdaptiveLinearModel(classes=names)
    predicted = whole.learn_each(rows, labels)
    in_parts = [parts.learn_each(rows[at : at + 7], labels[at : at + 7]) for at in range(0, 300, 7)]
    assert np.array_equal(np.concatenate(in_parts), predicted)


def test_one_wild_label_does_not_keep_the_tables_from_being_chosen() -> None:
    """One label of a million made all errors look small, so the linear member kept its share for ever."""
    draw = np.random.default_rng(2)
    x = draw.uniform(-3, 3, 6_000)
    y = np.sin(3 * x)
    given = y.copy()
    given[50] = 1e6
    predicted = AdaptiveLinearModel().learn_each([{"x": value} for value in x.tolist()], given)
    assert np.mean((predicted[3_000:] - y[3_000:]) ** 2) < 0.02 < np.var(y)
