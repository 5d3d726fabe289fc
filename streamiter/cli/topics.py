"""``streamiter topics``: list, produce, tail."""

from __future__ import annotations

import contextlib
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import orjson
import typer
from rich.console import Console
from rich.table import Table

from streamiter.cli.examples import examples
from streamiter.cli.lines import lines_of, open_lines
from streamiter.errors import ConfigurationError
from streamiter.runtime.running import run_in_own_loop
from streamiter.topics import (
    OutgoingBatch,
    ReadRequest,
    Topic,
    TopicDescription,
    TopicRecord,
    TopicWriter,
    connector_for,
    topic,
)

__all__ = ["topics_app"]

topics_app = typer.Typer(
    help="Look into topics and write to them.", no_args_is_help=True, rich_markup_mode=None
)

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="A topic, as kafka://127.0.0.1:9092/clicks", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document a line.")]

# A value is shown on a terminal up to here; in a pipe or a file, and with --json, it is whole.
_SHOWN_CHARACTERS: Final = 400


# ---- list

_Found = list[tuple[str, TopicDescription]]
"""Topics by the names that their server, file or folder has for them."""


@topics_app.command(
    "list",
    epilog=examples(
        "streamiter topics list kafka://127.0.0.1:9092",
        "streamiter topics list sqlite:///demo-data/streamiter.db",
    ),
)
def list_topics(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="A server, file or folder, as kafka://127.0.0.1:9092", show_default=False
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Names, partitions and records of the topics of a server, file or folder."""
    found = run_in_own_loop(_descriptions(url))
    if as_json:
        for name, description in found:
            _print_json(_described(name, description))
    elif not found:
        typer.echo(f"no topics in {url}", err=True)
    elif sys.stdout.isatty():
        Console().print(_table(found))
    else:
        for name, description in found:
            typer.echo(f"{name}\t{description.partitions}\t{_records(description)}")


async def _descriptions(url: str) -> _Found:
    connector = connector_for(url)
    names = sorted(await connector.list_topics(url, {}))
    return [(name, await connector.topic(_with_topic(url, name), {}).describe()) for name in names]


def _with_topic(url: str, name: str) -> str:
    """The URL of a topic of that name beside or below ``url``."""
    if url.lower().startswith("sqlite:"):
        return f"{url.partition('?')[0]}?topic={name}"
    place, _, query = url.partition("?")
    options = f"?{query}" if query else ""
    if url.lower().startswith("file:"):
        scheme, _, path = place.partition(":")
        return f"{scheme}:{path[: path.rfind('/') + 1]}{name}{options}"
    scheme, _, rest = place.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}/{name}{options}"


def _records(description: TopicDescription) -> int:
    return sum(end - start for start, end in description.offsets.values())


def _described(name: str, description: TopicDescription) -> dict[str, Any]:
    offsets = {str(partition): list(ends) for partition, ends in description.offsets.items()}
    return {
        "topic": name,
        "partitions": description.partitions,
        "records": _records(description),
        "offsets": offsets,
    }


def _table(found: _Found) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("topic", overflow="fold")
    table.add_column("partitions", justify="right")
    table.add_column("records", justify="right")
    for name, description in found:
        table.add_row(name, str(description.partitions), f"{_records(description):,}")
    return table


# ---- produce


@topics_app.command(
    "produce",
    epilog=examples(
        "streamiter topics produce kafka://127.0.0.1:9092/clicks clicks.jsonl --key user --create",
        "tail -f log.jsonl | streamiter topics produce 'sqlite:///log.db?topic=log' --create",
    ),
)
def produce(
    url: Url,
    file: Annotated[
        str, typer.Argument(metavar="[FILE]", help="Lines to write, a record each; - is standard input.")
    ] = "-",
    key: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Field of the (JSON) lines that is the record's key.")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Create the topic if it is not there.")] = False,
    partitions: Annotated[int, typer.Option(min=1, help="Partitions of a topic that is created.")] = 1,
) -> None:
    """Write lines to a topic, a record each; empty lines are left out."""
    producing = _Producing(topic(url), key)
    try:
        run_in_own_loop(producing.run(file, partitions if create else None))
    finally:
        if producing.written:
            typer.echo(f"{producing.written:,} records written to {url}", err=True)


class _Producing:
    """Writes chunk after chunk, and counts what is stored, also where it ends early."""

    def __init__(self, target: Topic, key: str | None) -> None:
        self._target = target
        self._key = key
        self._lines = 0
        self.written = 0

    async def run(self, file: str, create_with_partitions: int | None) -> None:
        """Write all lines of the file."""
        async with contextlib.aclosing(lines_of(open_lines(file))) as chunks:
            if create_with_partitions is not None:
                await self._target.create(partitions=create_with_partitions)
            writer = await self._target.open_writer()
            handed_over = 0
            try:
                async for lines in chunks:
                    handed_over += await self._write(lines, writer)
            finally:
                await writer.close()
                self.written = handed_over

    async def _write(self, lines: Sequence[bytes], writer: TopicWriter) -> int:
        first = self._lines + 1
        self._lines += len(lines)
        values = [line for line in lines if line]
        batch = OutgoingBatch(values)
        if self._key is not None:
            field = self._key
            keys = [_key(line, field, number) for number, line in enumerate(lines, first) if line]
            batch = replace(batch, keys=keys)
        if values:
            await writer.write(batch)
        return len(values)


def _key(line: bytes, field: str, number: int) -> bytes:
    try:
        found = orjson.loads(line)[field]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"--key {field}: expected JSON objects with that field, given line {number}: {_shown(line)}"
        ) from error
    return found.encode() if isinstance(found, str) else orjson.dumps(found)


# ---- tail


@topics_app.command(
    "tail",
    epilog=examples(
        "streamiter topics tail kafka://127.0.0.1:9092/clicks -f",
        "streamiter topics tail 'sqlite:///data.db?topic=clicks' -n 1000 --json | jq .value",
    ),
)
def tail(
    url: Url,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")
    ] = False,
    count: Annotated[
        int,
        typer.Option(
            "--count",
            "-n",
            metavar="N",
            min=0,
            help="How many of each partition's last records to begin with.",
        ),
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """Print the last records of a topic: partition:offset, time, key, value."""
    try:
        run_in_own_loop(_tail(topic(url), follow, count, as_json))
    except KeyboardInterrupt:
        if not follow:
            raise


async def _tail(source: Topic, follow: bool, count: int, as_json: bool) -> None:
    description = await source.describe()
    start = last_records(description.offsets, count)
    reader = await source.open_reader(ReadRequest(start=start, stop=None if follow else "latest"))
    show = _print_record_json if as_json else _print_record
    try:
        while (batch := await reader.read()) is not None:
            for record in batch.records():
                show(record)
            sys.stdout.flush()
    finally:
        await reader.close()


def last_records(offsets: Mapping[int, tuple[int, int]], count: int) -> dict[int, int]:
    """Where the last ``count`` records of each partition begin, as far as offsets have no gaps."""
    return {partition: max(first, end - count) for partition, (first, end) in offsets.items()}


def _print_record(record: TopicRecord) -> None:
    when = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    key = "" if record.key is None else f" {_shown(record.key)}"
    value = "(no value)" if record.value is None else _shown(record.value)
    typer.echo(f"{record.partition}:{record.offset} {when}.{record.timestamp_ms % 1000:03}Z{key} {value}")


def _shown(value: bytes) -> str:
    """Text as it is (shortened on a terminal), of anything else its size."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"({len(value):,} bytes that are not text)"
    if sys.stdout.isatty() and len(text) > _SHOWN_CHARACTERS:
        return f"{text[:_SHOWN_CHARACTERS]}… ({len(value):,} bytes)"
    return text


def _print_record_json(record: TopicRecord) -> None:
    _print_json(
        {
            "partition": record.partition,
            "offset": record.offset,
            "timestamp_ms": record.timestamp_ms,
            **_text("key", record.key),
            **_text("value", record.value),
            "headers": [{"name": name, **_text("value", value)} for name, value in record.headers],
        }
    )


def _text(name: str, value: bytes | None) -> dict[str, str | None]:
    """A field with the text, or, of what is no text, one with its base64."""
    try:
        return {name: None if value is None else value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(value or b"").decode()}


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(orjson.dumps(document).decode())
