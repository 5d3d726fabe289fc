"""Parquet and Arrow files are read and written as columns."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow
import pytest
from files.files_support import batches_of, rest_of, topic_at, values_of
from pyarrow import feather, parquet
from support.processes import process
from support.waiting import until
from topics.topic_case import write

from streamiter import Checkpoints, Columns, Flow
from streamiter.errors import ConfigurationError, OffsetOutOfRange, StorageFull, TopicError, TopicNotFound
from streamiter.topics import Json, ReadRequest, TopicBatch, topic
from streamiter_files import Table, table_format

TABLE = pyarrow.table(
    {
        "id": pyarrow.array(range(100)),
        "price": pyarrow.array([None if number % 7 == 3 else number / 2 for number in range(100)]),
        "user": pyarrow.array([f"user {number % 5}" for number in range(100)]),
        "at": pyarrow.array([datetime(2026, 1, 1 + number % 28) for number in range(100)], pyarrow.timestamp("ms")),
    }
)


def write_arrow(table: Any, path: Path, rows: int) -> None:
    with pyarrow.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_parquet(table: Any, path: Path, rows: int) -> None:
    parquet.write_table(table, path, row_group_size=rows)


WRITERS: dict[str, Callable[[Any, Path, int], None]] = {"parquet": write_parquet, "arrow": write_arrow}
READERS: dict[str, Callable[[Path], Any]] = {
    "parquet": parquet.read_table,
    "arrow": lambda path: feather.read_table(path, memory_map=False),
}


@pytest.fixture(params=WRITERS)
def suffix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rows_of(batches: list[TopicBatch]) -> list[Any]:
    return [row for batch in batches for row in Table().decode(batch)]


@pytest.mark.parametrize("rows", [1, 7, 100, 1000])
@pytest.mark.parametrize(("start", "stop"), [(0, None), (1, 2), (13, 29), (14, 14), (0, 1000), (99, None), (100, None)])
async def test_any_range_of_rows(
    tmp_path: Path, suffix: str, rows: int, start: int, stop: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore resumes within a unit, and within a piece of it."""
    monkeypatch.setattr(table_format, "_PIECE_ROWS", 10)
    path = tmp_path / f"data.{suffix}"
    WRITERS[suffix](TABLE, path, rows)
    request = ReadRequest(positions={0: start}, stop=None if stop is None else {0: stop}, max_records=6)
    read = await topic_at(path).open_reader(request)
    batches = []
    while (batch := await read.read()) is not None:
        assert batch.first_offset == start + len(rows_of(batches))
        batches.append(batch)
        assert read.positions() == {0: batch.next_offset}
    await read.close()
    expected = TABLE.slice(start, None if stop is None else stop - start)
    found = rows_of(batches)
    assert [int(row["id"]) for row in found] == expected["id"].to_pylist()
    np.testing.assert_array_equal(
        [row["price"] for row in found], [np.nan if each is None else each for each in expected["price"].to_pylist()]
    )
    assert [str(row["user"]) for row in found] == expected["user"].to_pylist()


async def test_rows_are_columns(tmp_path: Path, suffix: str) -> None:
    """There is no Python object for a row."""
    path = tmp_path / f"data.{suffix}"
    WRITERS[suffix](TABLE, path, 1000)
    [batch] = await batches_of(topic_at(path))
    columns = topic_at(path).default_decoder().decode(batch)
    assert isinstance(columns, Columns)
    assert [str(columns[name].dtype) for name in columns.names] == ["int64", "float64", "<U6", "datetime64[ms]"]
    assert batch.nbytes == columns.nbytes
    [chosen] = await batches_of(topic_at(path, columns="user,id"))
    assert Table().decode(chosen).names == ("user", "id")  # type: ignore[union-attr]


async def test_the_types_of_rows_do_not_depend_on_where_reading_begins(tmp_path: Path, suffix: str) -> None:
    """Integers of a batch without missing values were integers, and floats after a restore (1 and 1.0 in JSON)."""
    path = tmp_path / f"data.{suffix}"
    WRITERS[suffix](pyarrow.table({"n": [None, *range(1, 20)]}), path, 100)
    for start in (0, 5):
        batches = await batches_of(topic_at(path), ReadRequest(positions={0: start}, max_records=3))
        assert {Table().decode(batch)["n"].dtype for batch in batches} == {np.dtype("float64")}  # type: ignore[call-overload]


async def test_values_are_json_for_those_who_ask_for_bytes(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data.{suffix}"
    WRITERS[suffix](TABLE.select(["id", "user"]), path, 100)
    [batch] = await batches_of(topic_at(path))
    assert batch.values[2] == b'{"id":2,"user":"user 2"}'
    assert Json().decode(batch)[:2] == [{"id": 0, "user": "user 0"}, {"id": 1, "user": "user 1"}]


async def test_rows_with_lists_and_missing_texts_are_dicts(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data.{suffix}"
    WRITERS[suffix](pyarrow.table({"user": ["ann", None], "tags": [["a"], []]}), path, 100)
    assert rows_of(await batches_of(topic_at(path))) == [{"user": "ann", "tags": ["a"]}, {"user": None, "tags": []}]


async def test_files_of_a_folder_are_partitions(tmp_path: Path, suffix: str) -> None:
    for number in (2, 10):
        WRITERS[suffix](TABLE.slice(number, 3), tmp_path / f"part-{number}.{suffix}", 2)
    read = topic_at(f"{tmp_path}/")
    assert [(b.partition, [int(r["id"]) for r in Table().decode(b)]) for b in await batches_of(read)] == [
        (0, [2, 3]),
        (1, [10, 11]),
        (0, [4]),
        (1, [12]),
    ]
    described = await read.describe()
    assert described.offsets == {0: (0, 3), 1: (0, 3)}
    assert set(described.identities) == {0, 1}
    (tmp_path / f"part-11.{suffix}").touch()
    with pytest.raises(TopicError, match=rf"part-11\.{suffix}': expected a complete {suffix} file"):
        await batches_of(read)


async def test_a_file_that_was_replaced(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data.{suffix}"
    WRITERS[suffix](TABLE, path, 10)
    read = await topic_at(path).open_reader(ReadRequest(max_records=10))
    await read.read()
    identities = read.identities()
    other = tmp_path / f"other.{suffix}"
    WRITERS[suffix](TABLE.slice(50), other, 10)
    os.replace(other, path)
    with pytest.raises(OffsetOutOfRange, match=r"it was replaced while its records up to 100 were read"):
        await rest_of(read)
    await read.close()
    with pytest.raises(OffsetOutOfRange, match="this file was replaced"):
        await topic_at(path).open_reader(ReadRequest(positions={0: 10}, identities=identities))
    with pytest.raises(OffsetOutOfRange, match="expected at least 70 records, where reading resumes, found 50"):
        await batches_of(topic_at(path), ReadRequest(positions={0: 70}))


async def test_each_damaged_byte_of_a_table_is_an_error_or_does_no_harm(tmp_path: Path) -> None:
    """A page of a damaged file had other numbers, or no rows, and no error said so."""
    path = tmp_path / "data.parquet"
    parquet.write_table(TABLE.select(["id", "user"]), path, row_group_size=40, write_page_checksum=True)
    whole, expected = path.read_bytes(), [(number, f"user {number % 5}") for number in range(100)]
    last = parquet.ParquetFile(path).metadata.row_group(2).column(1)
    damaged = 0
    # The metadata behind the pages have no checksum.
    for at in range(4, last.dictionary_page_offset + last.total_compressed_size - 24, 5):
        changed = bytes([whole[at] ^ 0x41])
        for content in (whole[:at] + changed + whole[at + 1 :], whole[:at] + bytes(24) + whole[at + 24 :]):
            path.write_bytes(content)
            try:
                batches = await batches_of(topic_at(path))
            except TopicError:
                damaged += 1
            else:
                read = [(int(row["id"]), str(row["user"])) for batch in batches for row in Table().decode(batch)]
                assert read == expected, at
    assert damaged > 20


async def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    WRITERS["parquet"](TABLE, tmp_path / "data.parquet", 10)
    with pytest.raises(
        ConfigurationError, match=r"expected a column 'no' \(option columns\), found id, price, user, at"
    ):
        await batches_of(topic_at(tmp_path / "data.parquet", columns=["no"]))


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamiter.values.helpers.importing.find_spec", lambda name: None)
    with pytest.raises(
        ConfigurationError, match=r"expected the package pyarrow, found none; install it with: .*\[arrow\]"
    ):
        topic("file:data.parquet")


# -- writing -------------------------------------------------------------------------------------------------

BATCHES = {
    "columns": Columns({"id": np.arange(3), "user": np.array(["ann", "bob", "eve"])}),
    "dicts": [{"id": 0, "user": "ann"}, {"id": 1, "user": "bob"}, {"id": 2, "user": "eve"}],
    "pandas": pandas.DataFrame({"id": range(3), "user": ["ann", "bob", "eve"]}, index=[7, 8, 9]),
    "polars": polars.DataFrame({"id": range(3), "user": ["ann", "bob", "eve"]}),
    "arrow": pyarrow.table({"id": range(3), "user": ["ann", "bob", "eve"]}),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_flow_writes_a_file(tmp_path: Path, suffix: str, kind: str) -> None:
    path = tmp_path / f"out.{suffix}"
    flow = Flow("write")
    flow.from_items(BATCHES[kind]).sink(topic(f"file:{path}"))
    flow.run()
    assert READERS[suffix](path).to_pylist() == BATCHES["dicts"]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_flow_copies_tables(tmp_path: Path, suffix: str) -> None:
    """Types survive: numbers, texts, times, missing numbers as NaN."""
    WRITERS[suffix](TABLE, tmp_path / f"in.{suffix}", 30)
    (tmp_path / "out").mkdir()
    flow = Flow("copy")
    read = flow.source(topic(f"file:{tmp_path}/in.{suffix}"))
    read.map_batch(lambda rows: rows).sink(topic(f"file:{tmp_path}/out/?format={suffix}"), parallelism=2)
    flow.run()
    files = sorted((tmp_path / "out").iterdir())
    assert {file.name for file in files} <= {f"part-{number}.{suffix}" for number in range(2)}
    found = pyarrow.concat_tables([READERS[suffix](file) for file in files]).sort_by("id")
    assert found.drop_columns("price").equals(TABLE.drop_columns("price"))
    assert found["price"].to_numpy()[:4].tolist()[:3] == [0.0, 0.5, 1.0]


async def test_units_are_written_while_rows_arrive(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded, and no reader sees a file before it is complete."""
    monkeypatch.setattr(table_format, "_UNIT_BYTES", 100)
    out = topic_at(f"{tmp_path}/", format=suffix)
    writer = await out.open_writer()
    for number in range(3):
        await writer.write(Table().encode(Columns({"n": np.arange(20) + 20 * number})))
        await writer.check()
    with pytest.raises(TopicNotFound):
        await batches_of(out)
    await writer.flush()
    await writer.flush()
    await writer.write(Table().encode([{"n": 60}]))
    await writer.close()
    await writer.close()
    assert sorted(os.listdir(tmp_path)) == [f"part-0.{suffix}", f"part-1.{suffix}"]
    assert sorted(int(row["n"]) for row in rows_of(await batches_of(out))) == list(range(61))
    units = table_format.open_units(tmp_path / f"part-0.{suffix}", out._files.layout().format, None)
    assert units.lengths == [20, 20, 20]
    units.close()


async def test_files_of_several_writers_and_runs_have_names_of_their_own(tmp_path: Path) -> None:
    """New files come after the old ones, so that partitions keep their numbers."""
    (tmp_path / "day-7.parquet").touch()
    parquet.write_table(pyarrow.table({"n": [0]}), tmp_path / "day-7.parquet")
    out = topic_at(f"{tmp_path}/day-*.parquet")
    writers = [await out.open_writer() for _ in range(3)]
    for number, writer in enumerate(writers):
        await writer.write(Table().encode([{"n": number}]))
    await asyncio.gather(*(writer.close() for writer in writers))
    assert sorted(os.listdir(tmp_path)) == ["day-10.parquet", "day-7.parquet", "day-8.parquet", "day-9.parquet"]
    (tmp_path / "day-x.parquet").touch()
    writer = await out.open_writer()
    await writer.write(Table().encode([{"n": 1}]))
    with pytest.raises(
        ConfigurationError, match=r"a new file 'day-5\.parquet' would not be the last in the order of names"
    ):
        await writer.close()


async def test_one_file_has_one_writer_and_is_written_once(tmp_path: Path) -> None:
    """Of two subtasks that wrote one file, the rows of the first were lost."""
    out = topic_at(tmp_path / "out.parquet")
    await out.create()
    first = await out.open_writer()
    with pytest.raises(
        TopicError, match="expected one writer, given another one that writes it; give the sink parallelism=1"
    ):
        await out.open_writer()
    await first.write(Table().encode([{"n": 1}]))
    await first.flush()
    with pytest.raises(TopicError, match="the file is complete since the first checkpoint; write to a folder"):
        await first.write(Table().encode([{"n": 1}]))
    await first.close()
    with pytest.raises(TopicError, match="expected no such file, because tables are not appended to; delete it"):
        await out.open_writer()
    assert os.listdir(tmp_path) == ["out.parquet"]


@pytest.mark.parametrize("place", ["lake/", "lake/day-*.parquet", "lake/day.parquet"])
async def test_a_topic_of_tables_is_created_as_a_folder_without_files(place: str, tmp_path: Path) -> None:
    """An empty file was created, which is no Parquet file, so the first reader failed."""
    made = topic(f"file:{tmp_path}/{place}", format="parquet")
    await made.create()
    await made.create()
    assert os.listdir(tmp_path / "lake") == []
    with pytest.raises(TopicNotFound):
        await made.open_reader(ReadRequest())
    await write(made, Table().encode([{"n": 1}]))
    assert await values_of(made) == [b'{"n":1}']
    await made.create()
    assert len(os.listdir(tmp_path / "lake")) == 1
    if place != "lake/day.parquet":
        with pytest.raises(
            ConfigurationError, match=r"expected 1 partition for a topic of parquet files, given 3; each"
        ):
            await made.create(partitions=3)


async def test_a_writer_without_rows_leaves_nothing(tmp_path: Path) -> None:
    writer = await topic_at(tmp_path / "out.parquet").open_writer()
    await writer.close()
    assert os.listdir(tmp_path) == []
    with pytest.raises(TopicNotFound, match="there is no folder"):
        await topic_at(tmp_path / "no" / "out.parquet").open_writer()


def test_checkpoints_complete_files(tmp_path: Path) -> None:
    """A run that resumes reads on within a unit, and writes at least once: here, after a clean stop, exactly once."""
    WRITERS["parquet"](pyarrow.table({"n": range(50_000)}), tmp_path / "in.parquet", 40_000)
    (tmp_path / "out").mkdir()

    seen: list[int] = []

    def copy() -> Flow:
        flow = Flow("copy")
        read = flow.source(topic(f"file:{tmp_path}/in.parquet"), name="read")
        copied = read.map_batch(lambda rows: [seen.append(len(rows)), rows][1], name="see")
        copied.sink(topic(f"file:{tmp_path}/out/?format=parquet"), name="write")
        return flow

    async def run_in_parts() -> None:
        job = await copy().start(checkpoints=Checkpoints(tmp_path / "store", interval_s=60))
        await until(lambda: seen)
        await job.stop("suspend")
        assert 0 < sum(seen) < 50_000
        job = await copy().start(checkpoints=Checkpoints(tmp_path / "store", interval_s=60))
        await job.wait()

    asyncio.run(run_in_parts())
    found = [number for file in (tmp_path / "out").iterdir() for number in parquet.read_table(file)["n"].to_pylist()]
    assert sum(seen) == 50_000
    assert sorted(found) == list(range(50_000))


async def test_a_killed_writer_leaves_no_file(tmp_path: Path) -> None:
    """What it has left is not read, and is overwritten by the next writer of the same file."""
    (tmp_path / ".out.parquet.writing").write_bytes(b"torn" * 1000)
    await write(topic_at(tmp_path / "out.parquet"), Table().encode([{"n": 1}]))
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == [{"n": 1}]
    assert os.listdir(tmp_path) == ["out.parquet"]
    (tmp_path / "out").mkdir()
    left, new = (tmp_path / "out" / f".part-{name}.parquet.writing" for name in ("left", "new"))
    for path in (left, new):
        path.write_bytes(b"torn")
    os.utime(left, (0, 0))
    await write(topic_at(f"{tmp_path}/out/", format="parquet"), Table().encode([{"n": 1}]))
    assert sorted(os.listdir(tmp_path / "out")) == [new.name, "part-0.parquet"]


# A program that writes numbered rows into a folder for ever, and prints the next number after each flush.
ENDLESS_WRITER = """
import asyncio, itertools, sys
import numpy as np
from streamiter import Columns
from streamiter_files import FilesConnector, Table, table_format

async def main(folder, suffix):
    table_format._UNIT_BYTES = 100_000
    writer = await FilesConnector().topic(f"file:{folder}/", {"format": suffix}).open_writer()
    for begin in itertools.count(0, 60_000):
        for unit in range(begin, begin + 60_000, 20_000):
            await writer.write(Table().encode(Columns({"n": np.arange(unit, unit + 20_000)})))
        await writer.flush()
        print(begin + 60_000, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_writer_loses_nothing_that_was_flushed(tmp_path: Path, suffix: str) -> None:
    """Each file is whole or not there, and each row that was confirmed is in one file."""
    with process([sys.executable, "-c", ENDLESS_WRITER, str(tmp_path), suffix], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        confirmed = [int(writer.stdout.readline()) for _ in range(4)]
        writer.kill()
        confirmed += [int(line) for line in writer.stdout]
    batches = await batches_of(topic_at(f"{tmp_path}/"))
    found = [int(row) for batch in batches for row in Table().decode(batch)["n"]]  # type: ignore[call-overload]
    assert len(found) >= confirmed[-1]
    assert sorted(found) == list(range(len(found)))


async def test_a_full_disk(small_disk: tuple[Path, object], suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_format, "_UNIT_BYTES", 100_000)
    disk, _ = small_disk
    writer = await topic_at(f"{disk}/", format=suffix).open_writer()
    noise = Table().encode(Columns({"n": np.random.default_rng(7).random(20_000)}))

    async def fill() -> None:
        for _ in range(1000):
            await writer.write(noise)

    with pytest.raises(StorageFull) as error:
        await fill()
    with pytest.raises(StorageFull) as again:
        await writer.write(noise)
    assert again.value is error.value
    await writer.close()
    assert os.listdir(disk) == []


def test_a_schema_says_the_types(tmp_path: Path) -> None:
    schema = pyarrow.schema([("price", pyarrow.float32()), ("id", pyarrow.int32())])
    flow = Flow("write")
    flow.from_items([{"id": 1, "price": 2}, {"id": 2, "price": None}]).sink(
        topic(f"file:{tmp_path}/out.parquet"), encode=Table(schema)
    )
    flow.run()
    assert parquet.read_table(tmp_path / "out.parquet").schema == schema


async def test_rows_of_later_units_have_the_types_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_format, "_UNIT_BYTES", 1)
    writer = await topic_at(tmp_path / "out.parquet").open_writer()
    await writer.write(Table().encode([{"a": 1.5, "b": "x"}]))
    await writer.write(Table().encode([{"b": "y", "a": 2}]))
    with pytest.raises(TopicError) as error:
        await writer.write(Table().encode([{"a": "no", "b": "z"}]))
    assert "expected rows with the columns and types of the first ones (a double, b string), given others" in str(
        error.value
    )
    assert "give the types: encode=Table(pyarrow.schema(…))" in str(error.value)
    await writer.close()
    assert os.listdir(tmp_path) == []


def test_numbers_of_several_widths_and_times(tmp_path: Path) -> None:
    columns = Columns(
        {
            "f4": np.zeros(1, ">f4"),
            "matrix": np.arange(4.0).reshape(1, 4),
            "hours": np.array(["2026-01-01T05"], "datetime64[h]"),
            "days": np.array(["2026-01-01"], "datetime64[D]"),
            "object": np.array([{"x": [1]}], dtype=object),
        }
    )
    flow = Flow("write")
    flow.from_items(columns).sink(topic(f"file:{tmp_path}/out.parquet"))
    flow.run()
    [row] = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert json.dumps(row, default=str) == (
        '{"f4": 0.0, "matrix": [0.0, 1.0, 2.0, 3.0], "hours": "2026-01-01 05:00:00", "days": "2026-01-01", '
        '"object": {"x": [1]}}'
    )
