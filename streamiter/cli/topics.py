"""Arguments that the commands on topics share."""

from __future__ import annotations

import contextlib
import re
import sys
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import numpy as np
import orjson
import typer

from streamiter.cli.figures import lines_of, open_lines, print_table, say
from streamiter.cli.run import examples
from streamiter.errors import ConfigurationError, DecodeError, TopicNotFound, shortened
from streamiter.records import Columns
from streamiter.runtime.running import run_in_own_loop
from streamiter.runtime.topic_outlets import RUN_HEADER
from streamiter.topics import (
    OutgoingBatch,
    ReadRequest,
    Topic,
    TopicBatch,
    TopicDescription,
    TopicRecord,
    TopicWriter,
    connector_for,
    topic,
)
from streamiter.topics.secrets import shown_url

__all__ = [
    "AsJson",
    "last_records",
    "lasting_topic",
    "topics_app",
]


Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="A topic, as kafka://127.0.0.1:9092/clicks", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document a line.")]


def lasting_topic(url: str) -> Topic:
    """The topic at ``url``, of which another program can know."""
    check_lasting(url)
    return topic(url)


def check_lasting(url: str) -> None:
    """Topics in memory are those of one program: what this one writes there would be gone at once."""
    if url.lower().startswith("memory:"):
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected a topic that lasts, given one in the memory of a single program; "
            "use a file instead: 'sqlite:///data.db?topic=clicks'"
        )


def create(
    url: Url,
    partitions: Annotated[int, typer.Option(metavar="N", min=1, help="How many partitions it has.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--setting",
            metavar="NAME=VALUE",
            help="A setting of the topic; may be repeated. Kafka: those of Kafka, and replication.factor. "
            "SQLite: retention_ms, retention_records, retention_bytes, compact, max_record_bytes.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Create a topic, if it is not there.

    One that is there keeps its records and its settings; if it has fewer partitions it gains the missing ones.

    ``streamiter topics create``.
    """
    target, wanted = lasting_topic(url), _parsed(settings or [])
    before, after = run_in_own_loop(_create(target, partitions, wanted))
    typer.echo(_outcome(target.url, before, after), err=True)
    if before is not None and any(after.settings.get(name) != value for name, value in wanted.items()):
        typer.echo("It keeps the settings that it was created with; --setting changes nothing.", err=True)


def _parsed(settings: Sequence[str]) -> dict[str, str]:
    parsed: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"expected NAME=VALUE, given {setting!r}", param_hint="'--setting'")
        if name in parsed:
            raise typer.BadParameter(
                f"expected each name once, given {name!r} twice", param_hint="'--setting'"
            )
        parsed[name] = value
    return parsed


async def _create(
    target: Topic, partitions: int, settings: Mapping[str, str]
) -> tuple[TopicDescription | None, TopicDescription]:
    """The topic before (None: it was not there) and after."""
    try:
        before = await target.describe()
    except TopicNotFound:
        before = None
    await target.create(partitions=partitions, settings=settings)
    return before, await target.describe()


def _outcome(url: str, before: TopicDescription | None, after: TopicDescription) -> str:
    partitions = f"{after.partitions:,} partition{'' if after.partitions == 1 else 's'}"
    if before is None:
        return f"created {url} with {partitions}"
    if before.partitions < after.partitions:
        return f"{url} has {partitions} now, {before.partitions:,} before"
    return f"{url} is there already, with {partitions}"


# Of a run that nobody named; as many digits as tell the runs in one topic apart.
_MADE_RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
_RUN_ID_DIGITS: Final = 8

_JSON_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def is_feedback(record: TopicRecord) -> bool:
    """Whether a loop wrote it.

    What a loop feeds back through a topic, as ``streamiter topics tail --feedback`` prints it.
    """
    return any(name == RUN_HEADER for name, _ in record.headers)


def feedback_line(record: TopicRecord) -> str:
    """Who fed back what, for people; of another record why it is none."""
    try:
        fed_back = _decoded(record)
    except DecodeError as error:
        return error.failures[0]
    epoch = "" if fed_back["epoch"] is None else f" epoch {fed_back['epoch']}"
    what = shortened(fed_back["records"]) if fed_back["kind"] == "data" else fed_back.get("step", "")
    run = fed_back["run"][:_RUN_ID_DIGITS] if _MADE_RUN_ID.fullmatch(fed_back["run"]) else fed_back["run"]
    return f"run {run} producer {fed_back['producer']} {fed_back['kind']}{epoch} {what}".rstrip()


def feedback_document(record: TopicRecord) -> bytes:
    """The same as a JSON object, with all records: bytes as base64, and of what JSON cannot say Python's text."""
    place = {"partition": record.partition, "offset": record.offset, "timestamp_ms": record.timestamp_ms}
    try:
        fed_back = _decoded(record)
    except DecodeError as error:
        return orjson.dumps({**place, "error": error.failures[0]})
    try:
        return _as_json(place | fed_back)
    except TypeError:  # such as a number of more than 64 bits, or a key that is a tuple
        return _as_json(place | fed_back | {"records": [repr(each) for each in fed_back["records"]]})


def _decoded(record: TopicRecord) -> dict[str, Any]:
    from streamiter.iteration.feedback_through import FeedbackRecords  # only who watches a loop needs it

    batch = TopicBatch(partition=record.partition, values=[record.value], headers=[record.headers])
    [fed_back] = FeedbackRecords().decode(batch)
    return fed_back


def _as_json(document: dict[str, Any]) -> bytes:
    return orjson.dumps(document, default=_for_json, option=_JSON_OPTIONS)


def _for_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, Columns):
        return list(value)
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else repr(value)


_Found = list[tuple[str, TopicDescription]]
"""Topics by the names that their server, file or folder has for them."""


def list_topics(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="A server, file or folder, as kafka://127.0.0.1:9092", show_default=False
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """List the topics of a server, file or folder.

    Each with its partitions and how many records are in it.

    ``streamiter topics list``.
    """
    check_lasting(url)
    try:
        found = run_in_own_loop(_descriptions(url))
    except TopicNotFound as error:
        raise ConfigurationError(str(error)) from error  # Of a folder: nothing that could be created.
    if as_json:
        for name, description in found:
            typer.echo(orjson.dumps(_described(name, description)).decode())
    elif not found:
        typer.echo(f"no topics in {shown_url(url)}", err=True)
    elif sys.stdout.isatty():
        print_table(
            ("topic", "partitions", "records"),
            [(name, str(topic.partitions), f"{_records(topic):,}") for name, topic in found],
            numbers=("partitions", "records"),
        )
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


def produce(
    url: Url,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Lines to write, a record each; - is standard input.")
    ] = "-",
    key: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Field of the (JSON) lines that is the record's key.")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Create the topic if it is not there.")] = False,
    partitions: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Partitions of a topic that is created: 1 unless said.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write lines to a topic, a record each.

    Empty lines are left out. Ctrl-C and SIGTERM end it when what has been read is stored (exit code 130).

    ``streamiter topics produce``.
    """
    if partitions is not None and not create:
        raise typer.BadParameter("expected --create with it", param_hint="'--partitions'")
    target = lasting_topic(url)
    producing = _Producing(target, key)
    # Not in the event loop, which a signal could not cancel while a named pipe waits for its writer.
    descriptor = open_lines(file)
    try:
        run_in_own_loop(producing.run(descriptor, (partitions or 1) if create else None))
    finally:
        if producing.written:
            records = "record" if producing.written == 1 else "records"
            typer.echo(f"{producing.written:,} {records} written to {target.url}", err=True)


class _Producing:
    """Writes chunk after chunk, and counts what is stored, also where it ends early."""

    def __init__(self, target: Topic, key: str | None) -> None:
        self._target = target
        self._key = key
        self._lines = 0
        self.written = 0

    async def run(self, descriptor: int, create_with_partitions: int | None) -> None:
        """Write all lines that can be read there."""
        async with contextlib.aclosing(lines_of(descriptor)) as chunks:
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
            f"--key {field}: expected JSON objects with that field, given line {number}: {shown(line)}"
        ) from error
    return found.encode() if isinstance(found, str) else orjson.dumps(found)


def tail(
    url: Url,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C or SIGTERM.")
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
    feedback: Annotated[
        bool, typer.Option("--feedback", help="Show what a loop feeds back through the topic.")
    ] = False,
) -> None:
    """Print the last records of a topic.

    Each on a line: partition:offset, time, key, value; with --feedback who fed back what in which epoch.

    ``streamiter topics tail``.
    """
    show: Callable[[TopicRecord], None]
    if feedback:
        show = _print_feedback_json if as_json else _print_feedback
    else:
        show = _Hinting(_print_record_json if as_json else _print_record)
    try:
        run_in_own_loop(_tail(lasting_topic(url), follow, count, show))
    except KeyboardInterrupt:
        if not follow:
            raise


async def _tail(source: Topic, follow: bool, count: int, show: Callable[[TopicRecord], None]) -> None:
    description = await source.describe()
    start = last_records(description.offsets, count)
    reader = await source.open_reader(ReadRequest(start=start, stop=None if follow else "latest"))
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
    key = "" if record.key is None else f" {shown(record.key)}"
    value = "(no value)" if record.value is None else shown(record.value)
    typer.echo(f"{_place(record)}{key} {value}")


class _Hinting:
    """Shows records, and says once how to read those of a loop, whose values are no text or none at all."""

    def __init__(self, show: Callable[[TopicRecord], None]) -> None:
        self._show = show
        self._has_hinted = False

    def __call__(self, record: TopicRecord) -> None:
        if not self._has_hinted and is_feedback(record):
            self._has_hinted = True
            say("A loop feeds back through this topic: --feedback shows what.", err=True)
        self._show(record)


def _print_feedback(record: TopicRecord) -> None:
    typer.echo(f"{_place(record)} {feedback_line(record)}")


def _print_feedback_json(record: TopicRecord) -> None:
    typer.echo(feedback_document(record).decode())


def _place(record: TopicRecord) -> str:
    when = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{record.partition}:{record.offset} {when}.{record.timestamp_ms % 1000:03}Z"


def _print_record_json(record: TopicRecord) -> None:
    document = {
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        **_text("key", record.key),
        **_text("value", record.value),
        "headers": [{"name": name, **_text("value", value)} for name, value in record.headers],
    }
    typer.echo(orjson.dumps(document).decode())


def _text(name: str, value: bytes | None) -> dict[str, str | None]:
    """A field with the text, or, of what is no text, one with its base64."""
    try:
        return {name: None if value is None else value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(value or b"").decode()}


# ``streamiter topics``: create, list, produce, tail.

topics_app = typer.Typer(
    help="Look into topics and write to them.", no_args_is_help=True, rich_markup_mode=None
)
topics_app.command(
    "create",
    epilog=examples(
        "streamiter topics create kafka://127.0.0.1:9092/clicks --partitions 4 --setting retention.ms=86400000",
        "streamiter topics create 'sqlite:///data.db?topic=clicks' --setting retention_records=1000000",
    ),
)(create)
topics_app.command(
    "list",
    epilog=examples(
        "streamiter topics list kafka://127.0.0.1:9092",
        "streamiter topics list sqlite:///demo-data/streamiter.db",
    ),
)(list_topics)
topics_app.command(
    "produce",
    epilog=examples(
        "streamiter topics produce kafka://127.0.0.1:9092/clicks clicks.jsonl --key user --create",
        "tail -f log.jsonl | streamiter topics produce 'sqlite:///log.db?topic=log' --create",
    ),
)(produce)
topics_app.command(
    "tail",
    epilog=examples(
        "streamiter topics tail kafka://127.0.0.1:9092/clicks -f",
        "streamiter topics tail 'sqlite:///data.db?topic=clicks' -n 1000 --json | jq .value",
        "streamiter topics tail 'sqlite:///data.db?topic=loop' --feedback --json | jq -c '[.epoch, .records]'",
    ),
)(tail)


# A value is shown on a terminal up to here; in a pipe or a file, and with --json, it is whole.
_SHOWN_CHARACTERS: Final = 400


def shown(value: bytes) -> str:
    """Text as it is (shortened on a terminal), of anything else its size.

    Values of records, as they are shown.
    """
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"({len(value):,} bytes that are not text)"
    if sys.stdout.isatty() and len(text) > _SHOWN_CHARACTERS:
        return f"{text[:_SHOWN_CHARACTERS]}… ({len(value):,} bytes)"
    return text
