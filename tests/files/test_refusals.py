"""URLs, options, files and records that are refused, with the texts in ``refusals.txt``.

``PYTHONPATH=tests python tests/files/test_refusals.py`` writes the texts as they are now.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from files.files_support import records_of, topic_at
from support.refusals import refusals_test, write

from streamiter.errors import StreamiterError
from streamiter.topics import Json, OutgoingBatch, ReadRequest, TopicBatch
from streamiter.values.records import Columns
from streamiter_files import Csv, Dummy, FilesConnector, Libsvm, Table
from streamiter_files.table_format import TableValues

FILE = Path(__file__).with_name("refusals.txt")


def topic(url: str) -> object:
    return FilesConnector().topic(url, {})


def decoded(decoder: Any, *values: bytes | None) -> object:
    return decoder.decode(TopicBatch(values=list(values)))


def put(name: str, content: bytes) -> None:
    Path(name).write_bytes(content)


async def read(name: str, content: bytes | None = None, decoder: Any = None, **options: object) -> object:
    """Read a file with that content, or all files of the folder for a name that ends with a slash or is a pattern."""
    if content is not None:
        put(name, content)
    return await records_of(topic_at(f"{os.getcwd()}/{name}", **options), decoder)


def contents() -> dict[str, bytes]:
    """Return the content of each file below the folder."""
    return {str(path): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}


async def written(name: str, *values: bytes | None, **columns: Any) -> None:
    """Write records of which one is refused: then none is stored, and the writer can be used again."""
    writer = await topic_at(f"{os.getcwd()}/{name}").open_writer()
    before = contents()
    try:
        await writer.write(OutgoingBatch(list(values), **columns))
    finally:
        await writer.flush()
        after = contents()
        await writer.close()
        assert after == before


async def created(name: str, partitions: int = 1, **settings: str) -> None:
    """Create a topic that is refused: then no file is made."""
    before = contents()
    try:
        await topic_at(f"{os.getcwd()}/{name}").create(partitions=partitions, settings=settings)
    finally:
        assert contents() == before


async def rows_written(batch: OutgoingBatch) -> None:
    writer = await topic_at(f"{os.getcwd()}/out.parquet").open_writer()
    try:
        await writer.write(batch)
    finally:
        await writer.close()


NAMES = {each.__name__: each for each in (topic, decoded, read, written, created, rows_written, topic_at)} | {
    each.__name__: each
    for each in (Columns, Csv, Dummy, Json, Libsvm, OutgoingBatch, ReadRequest, Table, TableValues, TopicBatch)
}


EMPTY = ("old.txt", "clicks.jsonl")


@contextmanager
def folder() -> Iterator[None]:
    """Run the body in a folder with a folder ``data`` and empty files that stay so; messages do not show its name."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as made:
        os.chdir(made)
        os.mkdir("data")
        for name in EMPTY:
            Path(name).touch()
        try:
            yield
        except StreamiterError as error:
            error.args = (str(error).replace(os.path.realpath(made), "…"),)
            raise
        finally:
            assert [os.path.getsize(name) for name in EMPTY] == [0, 0]
            os.chdir(before)


async def in_a_folder(code: str) -> object:
    with folder():
        result: Any = eval(code, {**NAMES, "np": np, "pyarrow": pyarrow})
        return await result if hasattr(result, "__await__") else result


CALLS = dict.fromkeys(["URLs and options", "files", "lines", "records", "rows of tables"], in_a_folder)

test_wrong_files_and_records_are_refused_with_their_texts = refusals_test(FILE, CALLS)


if __name__ == "__main__":
    write(FILE, CALLS)
