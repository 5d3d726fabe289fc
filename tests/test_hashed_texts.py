"""Texts in arrays have the hashes of the same texts in lists."""

from random import Random

import numpy as np
import pytest
from checkpoints.plain_values import some_text
from support.examples import random_examples

from streamiter.values import named_rows
from streamiter.values.helpers.compiled import is_compiling
from streamiter.values.named_rows import FieldReader
from streamiter.values.records import Columns

EDGES = "\x00\x7f\x80\u07ff\u0800\ud7ff\ud800\udfff\ue000\uffff\U00010000\U0010ffff"


def texts(random: Random) -> list[str]:
    """Return texts, some of them from the characters at which UTF-8 becomes longer."""
    return [
        some_text(random) if random.random() < 0.5 else "".join(random.choices(EDGES, k=random.randint(0, 5)))
        for _ in range(random.randint(1, 8))
    ]


@pytest.fixture(autouse=True)
def hashed_in_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiling():
        pytest.skip("texts are hashed in arrays only where Numba is installed")
    monkeypatch.setattr(named_rows, "_HASHED_TOGETHER", 1)


@random_examples(texts)
def test_an_array_of_texts_has_the_places_of_a_list_of_texts(given: list[str]) -> None:
    """A model that had learned from dicts did not know the towns of the same records in columns."""
    array = np.array(given)
    expected = FieldReader(bits=20).rows([{"town": text} for text in array.tolist()])
    for same in (array, array.astype(array.dtype.newbyteorder(">")), np.repeat(array, 2)[::2]):
        rows = FieldReader(bits=20).rows(Columns({"town": same}))
        assert rows.text_fields == ("town",)
        assert rows.places.tolist() == expected.places.tolist()


def test_an_array_of_texts_becomes_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text of a column became a Python object, and a new text needed a microsecond for each of its bytes."""
    monkeypatch.setattr(named_rows.FieldReader, "_text_places", None)
    assert FieldReader(bits=4).rows(Columns({"town": np.array(["Rom", "Köln"])})).places.shape == (2, 1)
