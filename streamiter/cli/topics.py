"""``streamiter topics``: list, produce, tail."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import IO, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from streamiter.errors import ConfigurationError
from streamiter.runtime.running import run_in_own_loop
from streamiter.topics import OutgoingBatch, ReadRequest, Topic, TopicRecord, connector_for, topic

__all__ = ["topics_app"]

topics_app = typer.Typer(help="Look into topics and write to them.", no_args_is_help=True)

Url = Annotated[str, typer.Argument(metavar="URL", help="For example kafka://127.0.0.1:9092/clicks")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document a line.")]

# As many lines as a reader's largest batch are written at once.
_LINES_AT_ONCE = 8192


@topics_app.command("list")
def list_topics(url: Url, as_json: AsJson = False) -> None:
    """Names, partitions and records of the topics of a server or file."""
    run_in_own_loop(_list(url, as_json))


async def _list(url: str, as_json: bool) -> None:
    connector = connector_for(url)
    names = await connector.list_topics(url, {})
    descriptions = [await connector.topic(_with_topic(url, name), {}).describe() for name in sorted(names)]
    if as_json:
        for description in descriptions:
            _print_json({"topic": description.name, "offsets": {str(p): o for p, o in description.offsets.items()}})
        return
    table = Table("topic", "partitions", "records")
    for description in descriptions:
        records = sum(end - start for start, end in description.offsets.values())
        table.add_row(description.name, str(description.partitions), f"{records:,}")
    Console().print(table)


def _with_topic(url: str, name: str) -> str:
    if url.startswith("sqlite:"):
        return f"{url.partition('?')[0]}?topic={name}"
    scheme, _, rest = url.partition("://")
    server, _, query = rest.partition("?")
    return f"{scheme}://{server.partition('/')[0]}/{name}{f'?{query}' if query else ''}"


@topics_app.command("produce")
def produce(
    url: Url,
    file: Annotated[str, typer.Argument(help="Lines to write, a record each; - is standard input.")] = "-",
    key: Annotated[str | None, typer.Option(help="Field of the (JSON) lines to use as key.")] = None,
    create: Annotated[bool, typer.Option("--create", help="Create the topic if it is not there.")] = False,
    partitions: Annotated[int, typer.Option(help="Partitions of a created topic.")] = 1,
) -> None:
    """Write the lines of a file (or standard input) to a topic."""
    written = run_in_own_loop(_produce(topic(url), file, key, partitions if create else None))
    Console(stderr=True).print(f"{written:,} records written to {url}")


async def _produce(target: Topic, file: str, key: str | None, partitions: int | None) -> int:
    if partitions is not None:
        await target.create(partitions=partitions)
    writer = await target.open_writer()
    written = 0
    try:
        with sys.stdin.buffer if file == "-" else _opened(file) as lines:
            for values in _chunks(lines):
                keys = None if key is None else [_key(value, key) for value in values]
                await writer.write(OutgoingBatch(values, keys=keys))
                written += len(values)
        await writer.flush()
    finally:
        await writer.close()
    return written


def _opened(file: str) -> IO[bytes]:
    try:
        return open(file, "rb")  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise ConfigurationError(f"cannot read {file!r}: {error.strerror}") from error


def _chunks(lines: IO[bytes]) -> Iterator[list[bytes]]:
    """Lines without their ends, as many at a time as are worth a write; from a terminal one by one."""
    at_once = 1 if lines.isatty() else _LINES_AT_ONCE
    while chunk := [line.rstrip(b"\r\n") for line in itertools.islice(lines, at_once)]:
        yield [line for line in chunk if line]


def _key(value: bytes, field: str) -> bytes:
    try:
        found = orjson.loads(value)[field]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigurationError(f"--key {field}: expected JSON lines with that field, given {value[:80]!r}") from error
    return found.encode() if isinstance(found, str) else orjson.dumps(found)


@topics_app.command("tail")
def tail(
    url: Url,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", help="Last records of each partition to begin with.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Print the last records of a topic."""
    try:
        run_in_own_loop(_tail(topic(url), follow, count, as_json))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _tail(source: Topic, follow: bool, count: int, as_json: bool) -> None:
    description = await source.describe()
    start = {partition: max(first, end - count) for partition, (first, end) in description.offsets.items()}
    reader = await source.open_reader(ReadRequest(start=start, stop=None if follow else "latest"))
    try:
        while (batch := await reader.read()) is not None:
            for record in batch.records():
                _print_record(record, as_json)
            sys.stdout.flush()
    finally:
        await reader.close()


def _print_record(record: TopicRecord, as_json: bool) -> None:
    if as_json:
        _print_json(
            {
                "partition": record.partition,
                "offset": record.offset,
                "timestamp_ms": record.timestamp_ms,
                "key": _text(record.key),
                "value": _text(record.value),
                "headers": [[name, _text(value)] for name, value in record.headers],
            }
        )
        return
    when = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds")
    key = "" if record.key is None else f" {_text(record.key)}"
    typer.echo(f"{record.partition}:{record.offset} {when}{key} {_text(record.value)}")


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="backslashreplace")


def _print_json(document: dict[str, Any] | Sequence[Any]) -> None:
    typer.echo(orjson.dumps(document).decode())
