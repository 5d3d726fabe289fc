"""Feature hashing gives the same features at the same places, from dicts and from columns."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamiter.errors import ModelError
from streamiter.learn import BadRows, FeatureHasher
from streamiter.values.records import Columns

RECORDS = [
    {"city": "Zürich", "hour": 7, "price": 12.5, "rush": True},
    {"city": "Bern", "hour": 7, "price": 3.0, "rush": False},
    {"city": "", "hour": 23, "price": 0.0, "rush": True},
]


def hasher(**options):
    return FeatureHasher(["city", "hour", "rush"], numeric=["price"], crosses=[("city", "hour")], **options)


def features(rows):
    return [dict(zip(indices, values, strict=True)) for indices, values in rows.rows()]


def test_each_field_gives_its_feature():
    """The row must equal one that is built by hand from the places of ``index``."""
    made = hasher()
    [first, second, _] = features(made.rows(RECORDS))
    for found, record in ((first, RECORDS[0]), (second, RECORDS[1])):
        assert found == {
            made.index("city", record["city"]): 1.0,
            made.index("hour", record["hour"]): 1.0,
            made.index("rush", record["rush"]): 1.0,
            made.index(("city", "hour"), (record["city"], record["hour"])): 1.0,
            made.index("price"): record["price"],
        }
    assert len(first) == 5
    assert set(first) & set(second) == {made.index("hour", 7), made.index("price")}


def test_places_never_change():
    """With other places a restored model would silently read other features' weights: places are part of the format."""
    made = FeatureHasher(["a"], numeric=["n"], crosses=[("a", "b")], bits=18)
    assert [made.index("a", "x"), made.index("a", 5), made.index("n"), made.index(("a", "b"), ("x", "y"))] == PLACES
    assert FeatureHasher(["a"], bits=18, seed=1).index("a", "x") != PLACES[0]


PLACES = [48082, 62726, 86443, 136113]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "city": st.text(max_size=3),
                "hour": st.integers(-3, 3),
                "rush": st.booleans(),
                "price": st.floats(-1e6, 1e6),
            }
        ),
        min_size=1,
        max_size=4,
    )
)
def test_columns_and_dicts_give_the_same_rows(records):
    """Online the records come as dicts, in a backfill as columns; both must give the same features."""
    columns = Columns({name: np.array([record[name] for record in records]) for name in records[0]})
    made = hasher(bits=6)
    assert made.rows(records) == made.rows(columns) == made.rows(list(columns))
    one_by_one = [features(made.rows([record]))[0] for record in records]
    assert features(made.rows(records)) == one_by_one


def test_equal_values_are_one_feature_whichever_came_first():
    """1, 1.0 and True are one key of a dict, so the cache made the place depend on their order."""
    values = [1, 1.0, True, "1", np.int64(1), np.float32(1.0), np.bool_(True), np.str_("1")]
    for first in values:
        made = FeatureHasher(["a"])
        made.rows([{"a": first}])
        assert {index for row, _ in made.rows([{"a": value} for value in values]).rows() for index in row} == {
            made.index("a", "1")
        }
    assert FeatureHasher(["a"]).index("a", 1.5) == FeatureHasher(["a"]).index("a", "1.5")
    assert FeatureHasher(["a"]).index("a", b"x") == FeatureHasher(["a"]).index("a", "x")


def test_a_text_that_ends_in_nul_is_the_same_in_a_column():
    """Numpy drops a final NUL, so a backfill gave other features than the live stream."""
    made = FeatureHasher(["a"])
    assert made.rows([{"a": "x\0"}]) == made.rows(Columns({"a": np.array(["x\0"])}))


def test_the_same_text_in_two_fields_is_two_features():
    """Origin JFK and destination JFK are two features; so are the crosses ("a", "bc") and ("ab", "c")."""
    made = FeatureHasher(["from", "to"], crosses=[("from", "to")], bits=30)
    assert made.index("from", "JFK") != made.index("to", "JFK")
    assert made.index(("from", "to"), ("a", "bc")) != made.index(("from", "to"), ("ab", "c"))


@pytest.mark.parametrize("missing", [None, math.nan])
def test_a_missing_value_leaves_its_feature_out(missing):
    """JSON has None and tables have NaN; a missing value must not become a feature or a 0."""
    made = FeatureHasher(["city", "hour"], numeric=["price"], crosses=[("city", "hour")])
    [row] = features(made.rows([{"city": missing, "hour": 7, "price": missing}]))
    assert row == {made.index("hour", 7): 1.0}
    column = Columns({"city": np.array([missing]), "hour": np.array([7]), "price": np.array([math.nan])})
    assert features(made.rows(column)) == [row]


def test_features_on_one_place_are_added():
    """With few places features collide; the row must still name each place once."""
    made = FeatureHasher([f"f{i}" for i in range(40)], bits=3)
    [row] = features(made.rows([{f"f{i}": "x" for i in range(40)}]))
    assert len(row) <= 8
    assert sum(row.values()) == 40.0


def test_collisions_are_as_rare_as_the_documentation_says():
    """The documentation promises about f²/2**(b+1) collisions of f features at 2**b places: 8 for 2,000 at 18 bits."""
    made = FeatureHasher(["a"])
    places = {made.index("a", value) for value in range(2000)}
    assert 0 < 2000 - len(places) < 20


def test_the_cache_is_bounded_and_changes_nothing():
    """Without a limit, the cache of a field of user names would grow for ever."""
    small, large = FeatureHasher(["a"], cached=10), FeatureHasher(["a"])
    records = [{"a": number % 37} for number in range(500)]
    assert small.rows(records) == large.rows(records)
    assert max(len(places) for places in small._places.values()) <= 10
    large.rows([{"a": float("nan")} for _ in range(100)])  # no NaN equals another
    assert len(large._places["a"]) == 37


def test_no_records_give_no_rows():
    """A batch behind a filter may be empty."""
    assert len(hasher().rows([])) == 0
    assert len(hasher().rows(Columns({"city": np.array([])}))) == 0


def test_a_number_beyond_any_float_is_refused():
    """One bad value must cost one record, not the whole job."""
    with pytest.raises(BadRows, match="numeric field 'price', given 1000"):
        hasher().rows([RECORDS[0] | {"price": 10**400}])


def test_scales_multiply_the_values_of_categorical_fields_and_crosses() -> None:
    """A mapping of scales was read as a list of fields, and the scales were ignored."""
    hasher = FeatureHasher({"a": np.float32(2.0), "b": 0.5}, crosses={("a", "b"): 3.0}, numeric={"x": 10.0}, bits=16)
    rows = hasher.rows([{"a": "p", "b": "q", "x": 4.0}])
    values = dict(zip(rows.indices.tolist(), rows.values.tolist(), strict=True))
    assert values == {
        hasher.index("a", "p"): 2.0,
        hasher.index("b", "q"): 0.5,
        hasher.index(("a", "b"), ("p", "q")): 3.0,
        hasher.index("x"): 40.0,
    }


def test_the_largest_numbers_stay_finite_also_on_one_place() -> None:
    """Features that share a place are added, and their sum can be infinite."""
    fields = [f"f{number}" for number in range(10)]
    made = FeatureHasher(numeric=fields, bits=1)
    largest = sys.float_info.max / 20
    rows = made.rows([dict.fromkeys(fields, largest)])
    assert len(rows.values) <= 2
    assert np.isfinite(rows.values).all()
    with pytest.raises(BadRows, match="'f0'"):
        made.rows([dict.fromkeys(fields, largest * 1.01)])


@pytest.mark.parametrize("price", ["１２", "1_0", b"1_0", "٣", "1" * 400])
@pytest.mark.parametrize("others", [[], [1.5], [None]], ids=["alone", "with a number", "with none"])
def test_only_texts_of_plain_digits_are_numbers(price: str | bytes, others: list[float | None]) -> None:
    """The hasher and the file format must both refuse digits of other scripts."""
    made = FeatureHasher(numeric=["price"])
    records = [{"price": each} for each in [*others, price]]
    with pytest.raises(ModelError, match=r"expected finite numbers .*'price', given"):
        made.rows(records)
    fine = made.rows([{"price": "12"}, {"price": 12}])
    assert fine.values.tolist() == [12.0, 12.0]
