"""The frequent texts of a field have bins of their own, whatever texts came first."""

from typing import Any

import numpy as np
import pytest

from streamiter import Columns
from streamiter.learn import AdaptiveLinearModel
from streamiter.values.hashes import place_of_text

ROWS = 12_000
FREQUENT = 20
RARE_FIRST = 400


def stream(rows: int = ROWS) -> tuple[Columns, Any]:
    """Return rows whose first texts are rare; each frequent text has a threshold of its own."""
    draw = np.random.default_rng(5)
    numbers = draw.normal(size=rows)
    texts = draw.integers(0, FREQUENT, rows)
    texts[:RARE_FIRST] = draw.integers(1_000, 1_300, RARE_FIRST)
    texts[RARE_FIRST:][draw.random(rows - RARE_FIRST) < 0.2] = 7_000
    thresholds, signs = draw.normal(size=8_000), draw.choice([-1.0, 1.0], 8_000)
    scores = 3.0 * signs[texts] * np.sign(numbers - thresholds[texts])
    labels = draw.random(rows) < 1.0 / (1.0 + np.exp(-scores))
    return Columns({"item": np.char.add("i", texts.astype(np.str_)), "number": numbers}), labels


def bins_of(model: AdaptiveLinearModel) -> dict[int, int]:
    """Return the published bin of each place."""
    published = model.parameters(state=False)
    return dict(zip(published["places"].tolist(), published["shapes"]["categories"].tolist(), strict=True))


def test_frequent_texts_have_bins_of_their_own_whatever_came_first() -> None:
    """The first 59 texts of a field had a bin each for ever, and the items of a year shared one with all others."""
    features, labels = stream()
    model = AdaptiveLinearModel()
    model.learn(features, labels)
    bins = bins_of(model)
    frequent = [bins[place_of_text("item", f"i{text}", model.bits)] for text in (*range(FREQUENT), 7_000)]
    own = [place for place, found in bins.items() if found in frequent]
    assert len(set(frequent)) == len(own) == FREQUENT + 1
    assert len(set(bins.values())) == 60


@pytest.mark.parametrize("size", [7, 1_000])
def test_bins_of_frequent_texts_are_the_same_for_any_cut_and_after_a_restore(size: int) -> None:
    """Texts that came later in a batch would have had the bins of texts of a look in its middle."""
    features, labels = stream(9_000)
    whole = AdaptiveLinearModel()
    expected = whole.learn_each(features, labels)
    model, found = AdaptiveLinearModel(), []
    for start in range(0, len(labels), size):
        found.append(model.learn_each(features[start : start + size], labels[start : start + size]))
        if start // size in (1, 5, 8):
            restored = AdaptiveLinearModel()
            restored.restore(model.state())
            model = restored
    assert np.concatenate(found).tobytes() == expected.tobytes()
    assert bins_of(model) == bins_of(whole)


def test_a_start_from_a_version_keeps_the_bins_of_texts() -> None:
    """A model that starts without its state exchanged the bins of texts at its first look, and lost their tables."""
    features, labels = stream(9_000)
    earlier = AdaptiveLinearModel()
    earlier.learn(features, labels)
    model = AdaptiveLinearModel()
    model.start_from(earlier.parameters(state=False))
    before = bins_of(model)
    assert before == bins_of(earlier)
    later, labels = stream(14_000)
    model.learn(later[9_000:], labels[9_000:])
    kept = [place_of_text("item", f"i{text}", model.bits) for text in range(FREQUENT)]
    after = bins_of(model)
    assert [after[place] for place in kept] == [before[place] for place in kept]
