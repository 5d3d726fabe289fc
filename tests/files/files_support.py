"""Read and write file topics in tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from streamiter.topics.topic import OutgoingBatch, ReadRequest, TopicBatch, TopicReader
from streamiter_files import FilesConnector, FilesTopic

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"


def data_file(name: str) -> Path:
    """Return the path of a data set outside of the project, or skip the test without it."""
    path = (DATA / name).resolve()
    if not path.exists():
        pytest.skip(f"the data set {name} is not in the folder next to the project")
    return path


def topic_at(path: Path | str, **options: object) -> FilesTopic:
    return FilesConnector().topic(f"file:{path}", options)


async def rest_of(reader: TopicReader) -> list[TopicBatch]:
    batches = []
    while (batch := await reader.read()) is not None:
        batches.append(batch)
    return batches


async def batches_of(topic: FilesTopic, request: ReadRequest | None = None) -> list[TopicBatch]:
    reader = await topic.open_reader(request or ReadRequest())
    try:
        return await rest_of(reader)
    finally:
        await reader.close()


async def values_of(topic: FilesTopic, request: ReadRequest | None = None) -> list[Any]:
    return [value for batch in await batches_of(topic, request) for value in batch.values]


async def records_of(topic: FilesTopic, decoder: Any = None) -> list[Any]:
    decoder = decoder or topic.default_decoder()
    return [record for batch in await batches_of(topic) for record in decoder.decode(batch)]


async def append(topic: FilesTopic, values: Sequence[bytes], **columns: Any) -> None:
    writer = await topic.open_writer()
    try:
        await writer.write(OutgoingBatch(values, **columns))
    finally:
        await writer.close()
