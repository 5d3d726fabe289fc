"""The rows of tables of pandas, polars and Arrow are records of a flow."""

from __future__ import annotations

import datetime
import decimal
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas
import polars
import pyarrow
import pytest
from support.waiting import PATIENCE_S, until

from streamiter import Checkpoints, Columns, Flow, Operator, Stream
from streamiter.errors import ConfigurationError, GraphError, JobFailed, PlainDataError
from streamiter.operators import Output
from streamiter.operators.source import Source, SourceBatch
from streamiter.testing import Simulation, check_flow_restore, check_restore, simulate
from streamiter.values.records import rows_of_table

Table = Callable[[dict[str, Any]], Any]

TABLES: dict[str, Table] = {
    "pandas": pandas.DataFrame,
    "pandas backed by Arrow": lambda data: pandas.DataFrame(data).convert_dtypes(dtype_backend="pyarrow"),
    "pandas, nullable": lambda data: pandas.DataFrame(data).convert_dtypes(),
    "polars": polars.DataFrame,
    "Arrow": pyarrow.table,
    "Arrow in chunks": lambda data: pyarrow.concat_tables(
        [pyarrow.table(data).slice(0, 1), pyarrow.table(data).slice(1)]
    ),
    "an Arrow batch": pyarrow.RecordBatch.from_pydict,
}

tables = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


def items_of(given: Any, parallelism: int = 1) -> list[Any]:
    """Run a flow of these items, and return the items that it collects."""
    flow = Flow("items")
    items = flow.from_items(given, parallelism=parallelism).collect()
    flow.run()
    return items.items


def refusal_of(given: Any) -> str:
    """Return the error of from_items for these items."""
    with pytest.raises(GraphError) as caught:
        Flow("items").from_items(given)
    return str(caught.value)


@tables
def test_the_items_of_a_table_are_its_rows(table: Table) -> None:
    """from_items took the names of a DataFrame's columns for its records, without an error."""
    given = {"n": [1, 2, 3], "x": [0.5, 1.5, -2.0], "word": ["a", "bc", ""], "is": [True, False, True]}
    rows = rows_of_table("items", table(given), GraphError)
    assert isinstance(rows, Columns)
    assert rows == Columns(given)
    flow = Flow("items")
    seen = flow.from_items(table(given)).map(lambda row: (row["n"] + row["x"], row["word"], row["is"])).collect()
    flow.run()
    assert seen.items == [(1.5, "a", True), (3.5, "bc", False), (1.0, "", True)]


@tables
def test_the_rows_of_a_table_travel_as_columns(table: Table) -> None:
    """The rows of a table were sent record by record, which is fifty times slower than arrays."""
    batches: list[Any] = []

    class Look(Operator):
        def process_batch(self, batch: Any, out: Output) -> None:
            batches.append(batch)

    flow = Flow("items")
    flow.from_items(table({"n": list(range(100))})).process(Look)
    flow.run()
    assert {type(batch) for batch in batches} == {Columns}
    assert len(batches) < 10
    assert batches[0]["n"].dtype == np.int64


@tables
@pytest.mark.parametrize("parallelism", [2, 3])
def test_row_i_of_a_table_goes_to_subtask_i_modulo_their_number(table: Table, parallelism: int) -> None:
    """The rows of a table went to other subtasks than the items of a list."""
    for given in ({"n": list(range(11))}, {"n": list(range(11)), "word": [None, *map(str, range(10))]}):
        flow = Flow("items")
        rows = flow.from_items(table(given), parallelism=parallelism)
        placed = rows.process(_Place, parallelism=parallelism).collect()
        flow.run()
        assert sorted(placed.items) == [(n, n % parallelism) for n in range(11)]


class _Place(Operator):
    def open(self, context: Any) -> None:
        self._subtask = context.subtask_index

    def process(self, record: Any, out: Output) -> None:
        out.emit((int(record["n"]), self._subtask))


WORDS = ["a", "b", "c", "d", "e"]
WITH_MISSING = ["a", None, "c", None, "e"]


def rows_as_texts(library: str, words: list[Any], parallelism: int, flow: Flow) -> Any:
    """Return texts of rows; a fresh process can import this function, because it is at the top level."""
    given = TABLES[library]({"n": [5, 6, 7, 8, 9], "word": words})
    rows = flow.from_items(given, name="rows", parallelism=parallelism)
    return rows.map(lambda row: f"{row['n']} {row['word']}", name="texts")


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("words", [WORDS, WITH_MISSING], ids=["columns", "dicts"])
@pytest.mark.parametrize("library", ["pandas", "polars", "Arrow in chunks"])
def test_a_table_is_restored_in_the_middle(library: str, words: list[Any], parallelism: int) -> None:
    """A restart lost rows of a table, or gave them twice."""
    check_flow_restore(partial(rows_as_texts, library, words, parallelism), fresh_process=False, cuts=4)


@pytest.mark.parametrize("missing", [False, True], ids=["columns", "dicts"])
async def test_the_rest_of_a_table_is_read_by_another_number_of_subtasks(missing: bool, tmp_path: Path) -> None:
    """A suspended job resumed with another parallelism, and rows were lost or doubled."""
    count = 40_000
    words = [None if missing and n % 7 == 0 else f"w{n}" for n in range(count)]
    for parallelism, stops in ((1, True), (3, True), (2, False)):
        flow = Flow("table")
        table = polars.DataFrame({"n": range(count), "word": words})
        rows = flow.from_items(table, name="rows", parallelism=parallelism)
        collected = rows.map(lambda row: (int(row["n"]), row["word"]), name="pairs").collect(name="collected")
        job = await flow.start(checkpoints=Checkpoints(tmp_path, interval_s=100.0))
        if stops:
            await until(lambda: job.statistics().step("pairs").records_in > 0)  # noqa: B023 (it is awaited at once)
            suspended = await job.stop("suspend")
            assert suspended.step("pairs").records_in < count
        else:
            await job.wait()
    assert sorted(collected.items) == list(enumerate(words))


@tables
def test_missing_values_are_nan_or_none(table: Table) -> None:
    """A missing number made its column one of objects, or a missing text was NaN, which is a float."""
    rows = items_of(
        table({"n": [1, None, 3], "x": [None, 0.5, 1.0], "word": ["a", None, "b"], "is": [None, True, False]})
    )
    assert [row["word"] for row in rows] == ["a", None, "b"]
    assert [row["is"] for row in rows] == [None, True, False]
    assert [type(row["n"]) for row in rows] == [np.float64] * 3
    assert (rows[0]["n"], rows[2]["n"], rows[1]["x"], rows[2]["x"]) == (1.0, 3.0, 0.5, 1.0)
    assert math.isnan(rows[1]["n"])
    assert math.isnan(rows[0]["x"])


LARGE = 2**53 + 1


@pytest.mark.parametrize(
    "table",
    [
        pandas.DataFrame({"id": pandas.array([LARGE, None], dtype="Int64")}),
        polars.DataFrame({"id": [LARGE, None]}),
        pyarrow.table({"id": [-LARGE, None]}),
    ],
)
def test_large_integers_with_missing_ones_are_refused(table: Any) -> None:
    """2**53 + 1 became 2**53, and two users had one id."""
    assert refusal_of(table).startswith(
        "from_items: column 'id': expected integers of at most 2**53 where some are missing, because these become "
        "NaN and the others floats, given larger ones; fill the missing ones, or convert the column to texts"
    )


@tables
def test_large_integers_stay_exact(table: Table) -> None:
    """Large integers became floats although none was missing."""
    assert [row["id"] for row in items_of(table({"id": [LARGE, -LARGE, 2**63 - 1]}))] == [LARGE, -LARGE, 2**63 - 1]


NOON = datetime.datetime(2024, 7, 1, 12)


@pytest.mark.parametrize(
    "table",
    [
        lambda times: pandas.DataFrame({"at": times}),
        lambda times: polars.DataFrame({"at": times}),
        lambda times: pyarrow.table({"at": times}),
    ],
    ids=["pandas", "polars", "Arrow"],
)
@pytest.mark.parametrize("zone", [None, "Europe/Paris"])
def test_times_are_datetimes_of_numpy_in_utc(table: Any, zone: str | None) -> None:
    """A time with a time zone was read as another moment, because numpy has no time zones."""
    times = pandas.Series([NOON, None], dtype="datetime64[us]").dt.tz_localize(zone)
    given = polars.Series(times) if table({}).__class__.__module__.startswith("polars") else times
    rows = items_of(table(given))
    in_utc = NOON if zone is None else NOON - datetime.timedelta(hours=2)
    assert rows[0]["at"] == np.datetime64(in_utc)
    assert np.isnat(rows[1]["at"])
    assert rows[0]["at"].dtype.kind == "M"


def test_dates_and_durations_are_those_of_numpy() -> None:
    """A date or a duration was no plain data, and could not be stored in a checkpoint."""
    day, hour = datetime.date(2024, 7, 1), datetime.timedelta(hours=1)
    for table in (polars.DataFrame, pyarrow.table):
        [row] = items_of(table({"day": [day], "took": [hour]}))
        assert row == {"day": np.datetime64(day), "took": np.timedelta64(hour)}


@pytest.mark.parametrize(
    "table",
    [
        pandas.DataFrame({"color": pandas.Categorical(["red", "blue", "red", None])}),
        polars.DataFrame({"color": ["red", "blue", "red", None]}, schema={"color": polars.Categorical}),
        polars.DataFrame({"color": ["red", "blue", "red", None]}, schema={"color": polars.Enum(["blue", "red"])}),
        pyarrow.table({"color": pyarrow.array(["red", "blue", "red", None]).dictionary_encode()}),
    ],
    ids=["pandas", "polars", "Enum of polars", "Arrow"],
)
def test_categories_are_their_values(table: Any) -> None:
    """Arrow gave the value of another row for a missing category."""
    assert items_of(table) == [{"color": color} for color in ("red", "blue", "red", None)]
    assert rows_of_table("items", table[:3], GraphError) == Columns({"color": ["red", "blue", "red"]})


def test_categories_of_numbers_are_numbers() -> None:
    """The codes of categories were taken for their values."""
    table = pandas.DataFrame({"size": pandas.Categorical([30, 10, None])})
    assert [row["size"] for row in items_of(table)][:2] == [30.0, 10.0]
    assert rows_of_table("items", table[:2], GraphError) == Columns({"size": [30, 10]})


@pytest.mark.parametrize("library", ["pandas", "polars", "Arrow"])
def test_lists_and_bytes_make_dicts_of_python_objects(library: str) -> None:
    """Lists could not be in records, and bytes lost the NUL at their end."""
    given = {"tags": [["a", "b"], [], None], "raw": [b"a\0", b"", None]}
    rows = items_of(TABLES[library](given))
    assert rows == [{"tags": tags, "raw": raw} for tags, raw in zip(*given.values(), strict=True)]
    assert [type(row["tags"]) for row in rows[:2]] == [list, list]


def test_structs_are_dicts_and_arrays_of_one_length_a_matrix() -> None:
    """Structs and arrays of polars and Arrow, which pandas does not have, were refused."""
    for table in (polars.DataFrame, pyarrow.table):
        assert items_of(table({"place": [{"x": 1, "y": [2]}]})) == [{"place": {"x": 1, "y": [2]}}]
    vectors = polars.DataFrame({"v": [[1.0, 2.0], [3.0, 4.0]]}, schema={"v": polars.Array(polars.Float64, 2)})
    assert rows_of_table("items", vectors, GraphError) == Columns({"v": np.array([[1.0, 2.0], [3.0, 4.0]])})
    with_none = polars.DataFrame({"v": [[1, 2], None]}, schema={"v": polars.Array(polars.Int64, 2)})
    assert items_of(with_none) == [{"v": [1, 2]}, {"v": None}]


@pytest.mark.parametrize("texts", [["a\0", "b"], ["x" * 100_000, *["y"] * 1000]], ids=["NUL at the end", "one long"])
def test_texts_that_an_array_would_change_or_enlarge_stay_texts(texts: list[str]) -> None:
    """Texts lost the NULs at their ends, or one long text made all rows as large as itself."""
    for table in (pandas.DataFrame, polars.DataFrame, pyarrow.table):
        assert items_of(table({"text": texts})) == [{"text": text} for text in texts]


@pytest.mark.parametrize("library", ["pandas", "polars", "Arrow"])
@pytest.mark.parametrize("value", [decimal.Decimal("1.50"), datetime.time(12, 30)], ids=["Decimal", "time"])
def test_values_that_are_no_plain_data_are_refused_with_column_and_row(library: str, value: Any) -> None:
    """A value that is no plain data ended a job at its first checkpoint, in the middle of the night."""
    message = refusal_of(TABLES[library]({"n": [1, 2], "price": [None, value]}))
    assert message.startswith(
        "from_items: column 'price': expected numbers, texts, bytes, truth values, times or lists and dicts of these, "
        f"given {type(value).__name__} {value} in row 1; make it one of them before, such as a float or a text, or "
        "leave the column out"
    )


@tables
def test_a_table_without_rows_is_a_stream_without_records(table: Table) -> None:
    """A query without results made the flow fail."""
    filled = table({"n": [1], "word": ["a"]})
    assert items_of(filled[:0] if hasattr(filled, "iloc") else filled.slice(0, 0)) == []


def test_the_index_of_pandas_is_left_out() -> None:
    """The numbers of rows that were selected from another table became a field."""
    table = pandas.DataFrame({"n": [1, 2, 3]}, index=["a", "b", "b"])
    assert items_of(table[table["n"] > 1]) == [{"n": 2}, {"n": 3}]
    assert items_of(table.reset_index())[0] == {"index": "a", "n": 1}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pandas.DataFrame([[1, 2]]), "expected columns with texts as names, given 0 for column 0; rename it"),
        (
            pandas.DataFrame([[1, 2]], columns=["a", "a"]),
            "expected each column once, given two named 'a'; rename one of them",
        ),
        (
            pyarrow.table([[1], [2]], names=["a", "a"]),
            "expected each column once, given two named 'a'; rename one of them",
        ),
        (
            pandas.DataFrame([[1]], columns=pandas.MultiIndex.from_tuples([("a", "b")])),
            "expected columns with texts as names, given ('a', 'b') for column 0; rename it",
        ),
        (pandas.DataFrame(index=[1, 2]), "expected a table with columns, given one without; give it at least one"),
        (polars.DataFrame(), "expected a table with columns, given one without; give it at least one"),
        (
            polars.DataFrame({"n": [1]}).lazy(),
            "expected rows, given a query of them, a polars.LazyFrame; write ….collect()",
        ),
        (
            pyarrow.table({"n": [1]}).to_reader(),
            "expected rows, given a pyarrow.RecordBatchReader; write pyarrow.table(…) to make a table of it",
        ),
        ({"n": [1]}, "expected records, given a mapping: {'n': [1]}; write list(….items()) for pairs"),
        (b"abc", "expected a list, an array whose first axis is the record"),
    ],
    ids=lambda given: given[:40] if isinstance(given, str) else "",
)
def test_tables_that_cannot_be_rows_are_refused_with_a_correction(table: Any, message: str) -> None:
    """Two columns had the same name or no text as name, and one of them was missing in the records."""
    assert refusal_of(table).startswith(f"from_items: {message}")


class _ForeignTable:
    """A table like those of dask, Spark, ibis and narwhals."""

    columns = ("n", "x")
    schema = None

    def __iter__(self) -> Any:
        return iter(self.columns)


def test_tables_of_other_libraries_are_refused() -> None:
    """The names of another library's columns were taken for records."""
    assert re.fullmatch(
        r"from_items: expected rows, given a \w+\._ForeignTable, which is a table of columns; make it a table of "
        r"pandas, polars or Arrow, or Columns\(…\) \(at .*\)",
        refusal_of(_ForeignTable()),
    )


def test_the_items_of_a_single_column_are_its_values() -> None:
    """The items of an Arrow column were Arrow's own objects, which no checkpoint can store."""
    for column in (pandas.Series([1, 2], index=[7, 7]), polars.Series([1, 2]), pyarrow.array([1, 2])):
        assert items_of(column) == [1, 2]
        assert type(items_of(column)[0]) is np.int64
    for texts in (pandas.Series(["a", None]), polars.Series(["a", None]), pyarrow.chunked_array([["a"], [None]])):
        assert items_of(texts) == ["a", None]


def test_arrays_and_iterables_give_the_same_records_as_before() -> None:
    """Record arrays, rows of a matrix, generators or Columns gave other records after tables were added."""
    records = np.array([(1, 2.0), (3, 4.0)], dtype=[("n", int), ("x", float)])
    assert [(row["n"], row["x"]) for row in items_of(records)] == [(1, 2.0), (3, 4.0)]
    assert [row.tolist() for row in items_of(np.eye(2), parallelism=2)] == [[1.0, 0.0], [0.0, 1.0]]
    assert items_of(n * n for n in range(3)) == [0, 1, 4]
    assert items_of({"a": 1}.items()) == [("a", 1)]
    assert items_of(Columns({"n": [1, 2]})) == [{"n": 1}, {"n": 2}]


def test_no_library_of_tables_is_imported() -> None:
    """The import of a library of tables took longer than the import of this package."""
    program = (
        "import sys; from streamiter import Flow; from streamiter.learn import KMeans; Flow('f').from_items([1]);"
        "print([name for name in ('pandas', 'polars', 'pyarrow') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.stdout == "[]\n", run.stderr


class _EmitsTables(Operator):
    def __init__(self, table: Table) -> None:
        self._table = table

    def process(self, record: Any, out: Output) -> None:
        out.emit_batch(self._table({"n": [record, record + 1]}))


class _ReadsTables(Source):
    def __init__(self, table: Table) -> None:
        self._left = [table({"n": [1, 2]}), table({"n": [3, 4]})]

    def read(self) -> SourceBatch | None:
        return SourceBatch(self._left.pop(0), {}) if self._left else None


STEPS: dict[str, Callable[[Flow, Table], Stream]] = {
    "map_batch": lambda flow, table: flow.from_items([1, 2, 3, 4]).map_batch(lambda batch: table({"n": batch})),
    "flat_map": lambda flow, table: flow.from_items([1, 3]).flat_map(lambda n: table({"n": [n, n + 1]})),
    "tolerant flat_map": lambda flow, table: flow.from_items([1, 3]).flat_map(
        lambda n: table({"n": [n, n + 1]}), on_error="skip"
    ),
    "emit_batch": lambda flow, table: flow.from_items([1, 3]).process(lambda: _EmitsTables(table)),
    "a source": lambda flow, table: flow.from_source(lambda: _ReadsTables(table)),
}


@tables
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_table_from_a_step_becomes_rows(step: Callable[[Flow, Table], Stream], table: Table) -> None:
    """A step returned a table, and the names of its columns, or whole columns, became records."""
    flow = Flow("tables")
    rows = step(flow, table).map(lambda row: int(row["n"])).collect()
    flow.run()
    assert rows.items == [1, 2, 3, 4]


@pytest.mark.parametrize("made", [polars.DataFrame({"n": [1]}).lazy(), _ForeignTable()], ids=["a query", "foreign"])
@pytest.mark.parametrize("step", ["map_batch", "flat_map", "emit_batch", "a source"])
def test_a_result_of_a_step_that_is_no_batch_is_refused(step: str, made: Any) -> None:
    """A step returned no batch, and the error did not name the step."""
    flow = Flow("tables")
    STEPS[step](flow, lambda data: made).collect()
    with pytest.raises(JobFailed, match=r"step '.*(polars.LazyFrame; write ….collect\(\)|_ForeignTable)"):
        flow.run()


def test_a_mapping_is_no_batch() -> None:
    """The keys of a mapping became records."""
    flow = Flow("tables")
    flow.from_items([1]).process(lambda: _EmitsTables(dict)).collect()  # type: ignore[arg-type]
    with pytest.raises(JobFailed, match="emit_batch: expected a list, a numpy array or Columns, given dict"):
        flow.run()


def test_the_inputs_of_simulations_and_restore_checks_take_tables() -> None:
    """Tests could not use the tables that users have."""

    def numbers(simulation: Simulation) -> Flow:
        flow = Flow("numbers")
        rows = flow.source(simulation.input("rows", pandas.DataFrame({"n": [3, 1]})))
        rows.map(lambda row: row["n"]).sink(simulation.output("numbers"))
        return flow

    assert [record.value for record in simulate(numbers, 0).outputs["numbers"]] == [b"3", b"1"]
    check_restore(_Sum, polars.DataFrame({"n": [3, 1, 2]}), fresh_process=False)


class _Sum(Operator):
    def open(self, context: Any) -> None:
        self._sum = 0

    def process(self, record: Any, out: Output) -> None:
        self._sum += int(record["n"])
        out.emit(self._sum)

    def snapshot(self) -> int:
        return self._sum

    def restore(self, state: int) -> None:
        self._sum = state


@tables
def test_columns_take_tables(table: Table) -> None:
    columns = Columns(table({"id": [1, 2], "user": ["ann", "bob"], "x": [0.5, None]}))
    assert columns.names == ("id", "user", "x")
    assert [columns["id"].tolist(), columns["user"].tolist()] == [[1, 2], ["ann", "bob"]]
    np.testing.assert_array_equal(columns["x"], [0.5, math.nan])


def test_columns_refuse_other_tables() -> None:
    with pytest.raises(PlainDataError, match=r"Columns: expected rows, given a query .*; write ….collect\(\)"):
        Columns(polars.DataFrame({"a": [1]}).lazy())
    with pytest.raises(PlainDataError, match=r"column 'a': expected numbers, texts, .*given Decimal 1"):
        Columns(pyarrow.table({"a": [decimal.Decimal(1)]}))


class Struct(msgspec.Struct):
    a: int


@dataclass
class Data:
    a: int


class Named(NamedTuple):
    a: int


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([{"a": 1, "b": "x"}, {"a": 2}], {"a": [1, 2], "b": ["x", None]}),
        (Columns({"a": np.arange(2), "b": np.array(["x", "y"])}), {"a": [0, 1], "b": ["x", "y"]}),
        ([1, 2], {"value": [1, 2]}),
        (np.arange(4.0).reshape(2, 2), {"value": [[0.0, 1.0], [2.0, 3.0]]}),
        ([Struct(1), Data(2), Named(3)], {"a": [1, 2, 3]}),
        ([{"a": [1, {"b": 2}]}][:0], {}),
    ],
)
def test_what_is_collected_is_a_table(items: Any, expected: dict[str, list[Any]]) -> None:
    flow = Flow("items")
    collected = flow.from_items(items).collect()
    flow.run()
    table = collected.to_arrow()
    assert table.to_pydict() == expected
    frame = collected.to_pandas()
    assert list(frame.columns) == list(expected)
    assert len(frame) == len(collected)


def test_what_is_collected_and_is_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Flow("items")
    collected = flow.from_items([{"a": 1}, {"a": "x"}]).collect()
    flow.run()
    with pytest.raises(
        ConfigurationError, match=r"collect: expected records that make a table, given others: field 'a': "
    ):
        collected.to_arrow()
    monkeypatch.setattr("streamiter.values.helpers.importing.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"expected the package pyarrow, found none; .*\[arrow\]"):
        collected.to_pandas()
