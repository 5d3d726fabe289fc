"""Records become rows of numbers and hashed features, as a simple model of each value says."""

import math
from random import Random
from typing import Any

import numpy as np
import pytest
from support.examples import random_examples

from streamiter import Columns
from streamiter.errors import ModelError
from streamiter.learn import BadRows
from streamiter.values.field_kinds import HUGE
from streamiter.values.hashes import hash_of
from streamiter.values.named_rows import ABSENT, FieldReader, NamedRows, named_matrix

BITS = 6


def fnv(data: bytes) -> int:
    """Return the hash as its authors write it down: FNV-1a of 64 bits, then half of MurmurHash3's last mixing."""
    value = 14_695_981_039_346_656_037
    for byte in data:
        value = (value ^ byte) * 1_099_511_628_211 % 2**64
    value = (value ^ value // 2**33) * 18_397_679_294_719_823_053 % 2**64
    return value ^ value // 2**33


def place_of(field: str, text: str | None) -> int:
    """Return the place of a text, or of the feature that says that the field is missing."""
    end = b"\xfe" if text is None else b"\xff" + text.encode("utf-8", "surrogatepass")
    return fnv(field.encode("utf-8", "surrogatepass") + end) % 2**BITS


def test_the_hash_is_the_published_one_in_all_versions() -> None:
    """A model that was published by one version found other places in another version."""
    assert hex(hash_of(b"")) == "0xecba3df2c3383c52"
    assert hex(hash_of(b"town\xffRome")) == hex(fnv(b"town\xffRome"))
    for data in (b"a", b"\xff" * 40, "Zürich".encode(), bytes(range(256))):
        assert hash_of(data) == fnv(data)


Value = Any


def row_of(record: dict[str, Value]) -> tuple[dict[str, float], list[int], int]:
    """Return the numbers, the places and the number of missing values of one record."""
    numbers, places, missing = {}, [], 0
    for field, value in record.items():
        if isinstance(value, (str, list)):
            texts = {value} if isinstance(value, str) else set(value)
            places += [place_of(field, text) for text in texts]
        elif value is None or not abs(value if isinstance(value, int) else float(value)) <= HUGE:
            places.append(place_of(field, None))
            missing += 1
        else:
            numbers[field] = float(value)
    return numbers, sorted(places), missing


def found_rows(rows: NamedRows) -> list[tuple[dict[str, float], list[int], int]]:
    """Return rows in the form of :func:`row_of`."""
    return [
        (
            {field: float(x) for field, x in zip(rows.fields, numbers, strict=True) if abs(x) <= HUGE},
            sorted(int(place) for place in places if place != ABSENT),
            int(missing),
        )
        for numbers, places, missing in zip(rows.numbers, rows.places, rows.missing, strict=True)
    ]


VALUES: list[Value] = [
    0, 1, -3, 2**53, 2**200, -(10**101), 10**400, True, False, 0.5, -0.0, 1e-300, 1e100, 1e101,
    math.nan, math.inf, -math.inf, None, np.float32(0.25), np.int8(-5), np.uint64(2**63), np.bool_(True),
    np.float64(math.nan), "", "Rome", "Zürich", "\ud800", "1", "nan", np.str_("Rome"),
    [], ["Rome"], ["b", "a", "b"],
]  # fmt: skip


def some_records(random: Random) -> list[dict[str, Value]]:
    names = random.sample(["a", "b", "ö", "", "a b"], random.randint(0, 5))
    is_regular = random.random() < 0.4
    kinds = {name: random.choice([VALUES, VALUES[:12], VALUES[-10:]]) for name in names}
    records = []
    for _ in range(random.randint(0, 6)):
        fields = names if is_regular else random.sample(names, random.randint(0, len(names)))
        records.append({name: random.choice(kinds[name]) for name in fields})
    return records


@random_examples(some_records)
def test_dicts_become_the_rows_that_their_values_say(records: list[dict[str, Value]]) -> None:
    """With other fields in each record, a value came into the column of another field, or None became a number."""
    reader = FieldReader(bits=BITS)
    for _ in range(2):  # The second time from the cache of places.
        rows = reader.rows(records)
        assert len(rows) == len(records)
        assert found_rows(rows) == [row_of(record) for record in records]
    chosen = list(range(0, len(records), 2))
    assert found_rows(rows[chosen]) == [row_of(records[row]) for row in chosen]


@random_examples(some_records, examples=1_000)
def test_only_the_wanted_fields_are_read(records: list[dict[str, Value]]) -> None:
    """The label was among the features, so that each model was perfect until it was served."""
    without = FieldReader(without=["a", "ö"], bits=BITS).rows(records)
    assert found_rows(without) == [
        row_of({name: value for name, value in record.items() if name not in ("a", "ö")}) for record in records
    ]
    wanted = FieldReader(["b", "a"], bits=BITS).rows(records)
    assert found_rows(wanted) == [
        row_of({name: value for name, value in record.items() if name in ("a", "b")}) for record in records
    ]


COLUMNS: dict[str, Any] = {
    "number": np.array([1.5, math.nan, -math.inf]),
    "int": np.array([1, -2, 3], dtype=np.int16),
    "bool": np.array([True, False, True]),
    "big": np.array([2**63, 1, 2], dtype=np.uint64),
    "text": np.array(["x", "Zürich", ""]),
}


def as_dicts(columns: dict[str, Any]) -> list[dict[str, Value]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_columns_and_tables_become_the_same_rows() -> None:
    """A table of pandas or polars gave other features than the dicts that the model was trained with."""
    pandas, polars, pyarrow = (pytest.importorskip(name) for name in ("pandas", "polars", "pyarrow"))
    expected = [row_of(record) for record in as_dicts(COLUMNS)]
    tables = (Columns(COLUMNS), pandas.DataFrame(COLUMNS), polars.DataFrame(COLUMNS), pyarrow.table(COLUMNS))
    for table in tables:
        assert found_rows(FieldReader(bits=BITS).rows(table)) == expected
    missing: dict[str, Any] = {"a": [1.0, None, 3.0], "t": ["x", None, "y"]}
    expected = [row_of(record) for record in as_dicts(missing)]
    tables = (pandas.DataFrame(missing), polars.DataFrame(missing), pyarrow.table(missing))
    for table in tables:
        assert found_rows(FieldReader(bits=BITS).rows(table)) == expected


def test_a_column_of_arrays_is_a_field_for_each_number() -> None:
    """A matrix as a column was refused, or read as one number."""
    rows = FieldReader(bits=BITS).rows(Columns({"x": np.array([[1.0, math.nan], [3.0, 4.0]]), "y": np.array([5, 6])}))
    assert rows.fields == ("x[0]", "x[1]", "y")
    assert found_rows(rows) == [({"x[0]": 1.0, "y": 5.0}, [], 1), ({"x[0]": 3.0, "x[1]": 4.0, "y": 6.0}, [], 0)]
    matrix = named_matrix(np.array([[1.0, math.inf]]))
    assert (matrix.fields, matrix.missing.tolist()) == (("0", "1"), [1])


def test_batches_without_rows_or_fields_have_no_columns() -> None:
    """The first batch after a filter may be empty."""
    reader = FieldReader(bits=BITS)
    for batch, count in (([], 0), ([{}, {}], 2), (Columns({"a": np.array([])}), 0)):
        rows = reader.rows(batch)
        assert (len(rows), rows.numbers.shape[0], rows.places.shape[0]) == (count, count, count)


def test_the_cache_of_places_is_bounded_and_gives_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field of unique texts, such as a user's id, filled the memory."""
    monkeypatch.setattr("streamiter.values.named_rows._CACHED_TEXTS", 10)
    reader = FieldReader(bits=BITS)
    for start in range(0, 60, 5):
        records = [{"id": f"user {number}"} for number in range(start, start + 5)]
        assert found_rows(reader.rows(records)) == [row_of(record) for record in records]
    assert len(reader._places["id"]) <= 15


def test_the_cache_of_places_has_few_fields() -> None:
    """Records with new names each took the memory of the service: places of their texts were kept for ever."""
    reader = FieldReader(bits=16)
    for number in range(20):
        reader.rows([{f"name {number} {n}": "x" for n in range(100)}])
    assert 100 <= len(reader.texts_at(range(2**16))) <= 1024


def test_categories_in_columns_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a service had numbers in place of the carriers: no text of an array had a name."""
    pytest.importorskip("numba")
    reader, by_lists = (FieldReader(bits=22, kinds=dict.fromkeys(("id", "town"), "category")) for _ in range(2))
    monkeypatch.setattr("streamiter.values.named_rows._CACHED_TEXTS", 60)
    for start in (0, 0, 50, 100, 50):
        columns = {"town": ["Rome", "Kyiv"] * 25, "id": [f"user {number}" for number in range(start, start + 50)]}
        rows = reader.rows(Columns(columns))
        dicts = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        assert np.array_equal(rows.places, by_lists.rows(dicts).places)
        names = reader.texts_at(rows.places.ravel().tolist())
        assert sorted(names.values()) == sorted({f"{name} = {text}" for name in columns for text in columns[name]})
        assert len(reader._places["id"]) <= 100


def test_the_parts_of_times_can_be_named() -> None:
    """The page of a service had numbers in place of the hours that moved the score."""
    reader = FieldReader(bits=16)
    reader.rows([{"at": "2024-05-01T10:00", "town": "Rome"}])
    reader.rows(Columns({"day": np.array(["2024-05-01"], "M8[D]")}))
    names = ["at[hour] = 10", "at[month] = 12", "day[weekday] = 7", "town = Rome"]
    wanted = [fnv("\xff".join(name.split(" = ")).encode("latin-1")) % 2**16 for name in names]
    assert [reader.texts_at([place])[place] for place in wanted] == names


@pytest.mark.parametrize(
    ("records", "rows", "message"),
    [
        ([{"a": 1}, {"a": [2]}], (1,), r"expected a number, a text or None in the field 'a', given \[2\]; convert it"),
        ([{"a": {}}, {"a": 1}], (0,), r"expected a number, a text or None in the field 'a', given \{\}"),
        ([{"a": b"x"}], (0,), "expected a number, a text or None in the field 'a', given b'x'"),
        ([{"a": 1j}], (0,), "expected a number, a text or None"),
        ([{"a": 1}, 7, {"a": 1}], (1,), "expected records with named fields, given 7"),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_is_no_feature_names_its_rows_and_field(records: Any, rows: Any, message: str) -> None:
    """One nested value in a million records ended the job, without the name of the field."""
    with pytest.raises(BadRows, match=f"^the step: {message}") as caught:
        FieldReader(bits=BITS, refuse=BadRows, owner="the step").rows(records)
    assert caught.value.rows == rows
    with pytest.raises(ModelError, match=f"^FieldReader: {message}"):
        FieldReader(bits=BITS).rows(records)
