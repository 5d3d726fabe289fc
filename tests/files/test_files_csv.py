"""CSV files have records over several lines, headers and types, and wrong input is refused."""

import asyncio
import csv
import io
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from files.files_support import append, batches_of, records_of, topic_at
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamiter import Flow
from streamiter.errors import ConfigurationError, DecodeError, TopicError
from streamiter.topics.topic import TopicBatch
from streamiter.values.records import Columns
from streamiter_files import Csv, csv_format
from streamiter_files.csv_format import ColumnType

_field = st.text(st.sampled_from('ab",\n\r ;\té'), max_size=5)
_rows = st.lists(st.tuples(_field, _field), max_size=12)


@given(rows=_rows, chunk_bytes=st.integers(1, 30), delimiter=st.sampled_from([",", ";", "\t"]))
def test_the_output_of_the_csv_module_is_read_back(
    rows: list[tuple[str, str]], chunk_bytes: int, delimiter: str
) -> None:
    """A quote, delimiter or line end within a field was read wrongly where a chunk ended."""
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([("a,\nb", "c"), *rows])

    async def read() -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.csv"
            path.write_bytes(text.getvalue().encode())
            return await records_of(topic_at(path, chunk_bytes=chunk_bytes, delimiter=delimiter))

    assert asyncio.run(read()) == [{"a,\nb": first, "c": second} for first, second in rows]


async def test_a_record_over_several_lines_is_one_record_and_one_offset(tmp_path: Path) -> None:
    """A comment field with line ends became three broken records."""
    (tmp_path / "a.csv").write_bytes(b'id,note\r\n1,"two\r\n\r\nlines"\r\n2,"say ""hi""\n,"\n3,5" pipe\n')
    topic = topic_at(tmp_path / "a.csv")
    assert await records_of(topic) == [
        {"id": "1", "note": "two\r\n\r\nlines"},
        {"id": "2", "note": 'say "hi"\n,'},
        {"id": "3", "note": '5" pipe'},
    ]
    [batch] = await batches_of(topic)
    assert list(batch.offsets) == [0, 1, 2]


async def test_one_long_text_does_not_make_all_texts_of_its_batch_as_wide(tmp_path: Path) -> None:
    """One long note among thousands of short ones became an array of gigabytes."""
    notes = ["a" * (100_000 if number == 500 else number % 3) for number in range(1_000)]
    (tmp_path / "a.csv").write_text("n,note\n" + "".join(f"{number},{note}\n" for number, note in enumerate(notes)))
    flow, sizes = Flow("notes"), list[int]()

    def noted(batch: Columns) -> Columns:
        sizes.append(batch["note"].nbytes)
        return batch

    source = flow.source(topic_at(tmp_path / "a.csv"), decode=Csv({"n": int}, as_columns=True))
    read = source.map_batch(noted).collect()
    await (await flow.start()).wait()
    assert [row["note"] for row in read.items] == notes
    assert sum(sizes) < 70 << 20


async def test_parts_of_a_batch_still_know_their_columns(tmp_path: Path) -> None:
    """After bad records were removed, the rest of the batch had lost its columns."""
    (tmp_path / "a.tsv").write_bytes(b"a\tb\n1\t2\n3\n4\t5\n")
    [batch] = await batches_of(topic_at(tmp_path / "a.tsv"))
    assert Csv({"b": int}).decode(batch.take([0, 2])) == [{"a": "1", "b": 2}, {"a": "4", "b": 5}]
    assert Csv().decode(batch[2:]) == [{"a": "4", "b": "5"}]
    assert list(batch[2:].offsets) == [2]


async def test_each_file_has_its_own_header(tmp_path: Path) -> None:
    """A later export had its columns in another order, and they were mixed up by position."""
    (tmp_path / "0.csv").write_bytes(b"a,b\n1,2\n")
    (tmp_path / "1.csv").write_bytes(b"\xef\xbb\xbfb,a\n2,1\n")
    assert await records_of(topic_at(tmp_path)) == [{"a": "1", "b": "2"}] * 2


async def test_a_file_of_only_a_header_has_no_records(tmp_path: Path) -> None:
    """An export of a day without events was an error."""
    (tmp_path / "a.csv").write_bytes(b"a,b")
    (tmp_path / "b.csv").write_bytes(b"")
    assert await records_of(topic_at(tmp_path)) == []


def test_columns_have_the_given_types_as_records_and_as_arrays() -> None:
    """The types of columns were guessed from the first lines, and were wrong."""
    types = {"n": "int8", "x": float, "y": "float32", "ok": bool}
    columns = ("n", "x", "y", "ok", "text")
    batch = TopicBatch(values=[b"-3,0.1,0.5,true,007", b'12,NA,1e3,0,"a,b"'])
    [first, second] = Csv(types, columns=columns, missing=["NA"]).decode(batch)
    assert first == {"n": -3, "x": 0.1, "y": 0.5, "ok": True, "text": "007"}
    assert {name: type(value) for name, value in first.items()} == dict(
        zip(columns, (int, float, float, bool, str), strict=True)
    )
    assert np.isnan(second["x"])
    arrays = Csv(types, columns=columns, missing=["NA"], as_columns=True).decode(batch)
    assert isinstance(arrays, Columns)
    assert {name: array.dtype.str for name, array in arrays.arrays.items()} == {
        "n": "|i1",
        "x": "<f8",
        "y": "<f4",
        "ok": "|b1",
        "text": "<U3",
    }
    assert arrays[0] == first


# Python's grammar of numbers, but only with ASCII digits and without underscores.
_GRAMMAR = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*", re.ASCII)
_digit = st.characters(categories=["Nd", "Nl", "No", "Zs"], include_characters="0123456789+-._eE")


@settings(max_examples=400)
@given(field=st.one_of(st.text(_digit, min_size=1, max_size=8), st.text(_digit, min_size=40, max_size=5000)))
@example(field="４２")
@example(field="1" * 4301)
def test_only_texts_of_plain_digits_are_numbers(field: str) -> None:
    """Digits of other scripts were numbers in CSV files, and bad values in all others."""
    is_number = _GRAMMAR.fullmatch(field) is not None
    for dtype in (float, np.int64):
        try:
            [number] = ColumnType("x", dtype).convert([field])
        except ValueError:
            continue
        assert is_number
        assert number == dtype(field)


def test_a_mark_for_missing_values_may_hold_any_characters() -> None:
    """A file of a statistics office, with n_a or a dash for missing values, could not be read."""
    column = ColumnType("x", float, missing=["n_a", "–"]).convert(["1", "n_a", "–"])
    assert column.tolist() == pytest.approx([1, math.nan, math.nan], nan_ok=True)


def test_quotes_of_two_values_do_not_make_one_record() -> None:
    """An open quote in one value of a Kafka topic swallowed the next value."""
    decoder = Csv(columns=["x"])
    with pytest.raises(DecodeError) as caught:
        decoder.decode(TopicBatch(values=[b'"a', b'b"', b"c"]))
    assert caught.value.failures == {0: "unexpected end of data"}
    assert decoder.decode(TopicBatch(values=[b'b"', b"c"])) == [{"x": 'b"'}, {"x": "c"}]


_cell = st.one_of(
    st.text(st.characters(exclude_characters="\r\n\0", codec="utf-8"), max_size=5),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(_cell, st.just("x")), min_size=1, max_size=20))
def test_a_csv_file_gives_back_the_records_that_were_written_to_it(rows: list[tuple[Any, str]]) -> None:
    """A CSV source could not read the output of a CSV sink."""
    records = [{"a": first, "b, c": second} for first, second in rows]
    columns = ("a", "b, c")

    async def there_and_back() -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            topic = topic_at(Path(folder) / "a.csv", columns=columns)
            for half in (records[:10], records[10:]):
                await append(topic, Csv().encode(half).values)  # type: ignore[arg-type]
            return await records_of(topic)

    assert asyncio.run(there_and_back()) == [{"a": str(first), "b, c": second} for first, second in rows]


async def test_a_new_csv_file_begins_with_its_header_and_an_old_one_must_have_it(tmp_path: Path) -> None:
    """A file had no header, and its first record was read as the header."""
    path = tmp_path / "a.csv"
    with pytest.raises(ConfigurationError, match="expected the option columns="):
        await topic_at(path).open_writer()
    assert not path.exists()
    for _ in range(2):
        await append(topic_at(path, columns=("a", "b")), [b"1,2"])
    assert path.read_bytes() == b"a,b\n1,2\n1,2\n"
    with pytest.raises(TopicError, match="expected the header b, a"):
        await topic_at(path, columns=("b", "a")).open_writer()
    await append(topic_at(path), [b"3,4"])
    await append(topic_at(tmp_path / "b.csv", header=False), [b"3,4"])
    assert (tmp_path / "b.csv").read_bytes() == b"3,4\n"


def test_columns_are_written_row_by_row() -> None:
    """A batch of columns could not be written, although a list of dicts could."""
    batch = Columns({"a": np.array([1, 2]), "x": np.array([0.1, 1e300]), "s": np.array(["p", 'q"'])})
    assert Csv(delimiter=";").encode(batch).values == [b"1;0.1;p", b'2;1e+300;"q"""']


EMPTY = TopicBatch(values=[b"1,1.5,true,a", b",,,", b"3,NA,NA,"])
TYPES = {"n": int, "x": float, "yes": bool}


def csv_of(empty: Any, **options: Any) -> Csv:
    return Csv(TYPES, columns=("n", "x", "yes", "text"), missing=["NA"], empty=empty, **options)


def test_empty_fields_by_policy() -> None:
    """One empty cell of an integer made its line a bad record, whatever one said."""
    with pytest.raises(DecodeError) as caught:
        csv_of("refuse").decode(EMPTY)
    assert caught.value.failures == {
        1: "column 'n': expected int64, given ''",
        2: "column 'yes': expected bool, given 'NA'",
    }
    none, nan = None, "nan"
    [first, second, third] = csv_of("missing").decode(EMPTY)
    assert first == {"n": 1, "x": 1.5, "yes": True, "text": "a"}
    assert [nan if isinstance(each, float) else each for each in second.values()] == [none, nan, none, ""]
    assert [nan if isinstance(each, float) else each for each in third.values()] == [3, nan, none, ""]
    assert csv_of("zero").decode(EMPTY.take([0, 1]))[1] == {"n": 0, "x": 0.0, "yes": False, "text": ""}


def test_empty_integers_are_floats_in_every_batch() -> None:
    """The type of a column does not depend on how its lines are cut into batches."""
    decoder = Csv({"n": int}, columns=("n",), empty="missing", as_columns=True)
    whole, part = decoder.decode(TopicBatch(values=[b"7", b'""'])), decoder.decode(TopicBatch(values=[b"7"]))
    np.testing.assert_array_equal(whole["n"], [7.0, np.nan])  # type: ignore[call-overload]
    assert part["n"].dtype == np.float64  # type: ignore[call-overload]
    with pytest.raises(DecodeError, match="column 'n': expected int64, given '9007199254740993'"):
        decoder.decode(TopicBatch(values=[b"9007199254740993"]))
    zeros = Csv({"n": int}, columns=("n",), empty="zero", as_columns=True)
    assert zeros.decode(TopicBatch(values=[b'""']))["n"].dtype == np.int64  # type: ignore[call-overload]
    with pytest.raises(
        ConfigurationError, match="column 'yes' has no missing truth value as an array; give it the type"
    ):
        csv_of("missing", as_columns=True)
    with pytest.raises(ConfigurationError, match='expected "refuse", "missing" or "zero", given \'nan\''):
        csv_of("nan")


_ODD = (
    'a|é|0x1f|0X1|"q"|q"q|"a\nb"|a\rb|a\0b|x\x0b| |\ufeffb|\ud800|inf|nan|nan(1)|1e400|-1e-400|1_0|+1|-0|007|1.0|.5|5.'
    "|a\nb|\n|1e5|1e39|tRuE|TRUE|9223372036854775807|9223372036854775808|-9223372036854775809|255|256|٣|１|4.9e-324||1,2"
)
_texts = st.sampled_from(_ODD.split("|"))
_numbers = st.integers(-300, 300).map(str) | st.floats(allow_nan=False, allow_infinity=False).map(repr)
_dtypes = st.sampled_from([str, float, np.float32, int, np.uint8, np.uint64, bool])


@settings(max_examples=400)
@example(lines=['a,"q"'], types=[str, str], as_columns=False, empty="refuse")
@example(lines=["\ufeffb,1"], types=[str, int], as_columns=False, empty="refuse")
@example(lines=["1", "", "2"], types=[str], as_columns=False, empty="refuse")
@example(lines=["1,"], types=[str, int], as_columns=False, empty="zero")
@example(lines=["", "a\nb"], types=[str], as_columns=False, empty="refuse")
@example(lines=[None, "1\n2"], types=[int], as_columns=False, empty="refuse")
@given(
    lines=st.lists(
        st.none() | st.tuples(_texts | _numbers, _texts | _numbers).map(",".join) | _texts, min_size=1, max_size=3
    ),
    types=st.lists(_dtypes, min_size=1, max_size=2),
    as_columns=st.booleans(),
    empty=st.sampled_from(["refuse", "zero"]),
)
def test_pyarrow_reads_the_same_records_and_failures_as_python(
    lines: list[str | None], types: list[Any], as_columns: bool, empty: Any
) -> None:
    """With pyarrow, 0x10 was the number 16, 1e400 was infinite, a bad line had no number.

    Two lines in a record of a topic were two records beside an empty one.
    """
    names = "xy"[: len(types)]
    decoder = Csv(dict(zip(names, types, strict=True)), columns=names, as_columns=as_columns, empty=empty)
    batch = TopicBatch(values=[None if line is None else line.encode(errors="surrogatepass") for line in lines])
    results = []
    for least in (1, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(csv_format, "_ARROW_BATCH", least)
            patch.setattr(csv_format, "_ARROW_FROM", 0)
            try:
                records = decoder.decode(batch)
                results.append(
                    [(each.dtype, each.tolist()) for each in map(np.asarray, records.arrays.values())]
                    if isinstance(records, Columns)
                    else records
                )
            except DecodeError as error:
                results.append(error.failures)
    assert repr(results[0]) == repr(results[1])
