"""The commands ``streamiter topics create · list · produce · tail``.

``lasting_topic`` and ``Follow`` are shared with the commands on models.
"""

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

from streamiter.cli.figures import lines_of, open_lines, print_json, print_rows, say
from streamiter.cli.run import command_group
from streamiter.engine.job.running import run_in_own_loop
from streamiter.engine.tasks.topic_outgoing import RUN_HEADER
from streamiter.errors import ConfigurationError, DecodeError, TopicNotFound, shortened
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
from streamiter.topics.connecting import last_records
from streamiter.topics.urls import shown_url
from streamiter.values.helpers.closing import closed_after
from streamiter.values.records import Columns

TopicUrl = Annotated[
    str, typer.Argument(metavar="URL", help="A topic, such as kafka://127.0.0.1:9092/clicks", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document on each line.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Also print what arrives later, until Ctrl-C or SIGTERM.")]


def lasting_topic(url: str) -> Topic:
    """Return the topic at ``url``; another program can use it, too."""
    check_lasting(url)
    return topic(url)


def check_lasting(url: str) -> None:
    """Refuse topics in memory, which end with the program."""
    if url.lower().startswith("memory:"):
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected a topic that lasts, given one in the memory of a single program; "
            "use a file instead: 'sqlite:///data.db?topic=clicks'"
        )


def create(
    url: TopicUrl,
    partitions: Annotated[int, typer.Option(metavar="N", min=1, help="The number of partitions.")] = 1,
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
    """Create a topic if it does not exist.

    An existing topic keeps its records and settings; if it has fewer partitions, the missing ones are added.
    """
    target, wanted = lasting_topic(url), _parsed(settings or [])
    before, after = run_in_own_loop(_create(target, partitions, wanted))
    typer.echo(_outcome(target.url, before, after), err=True)
    if before is not None and any(after.settings.get(name) != value for name, value in wanted.items()):
        typer.echo("The topic keeps its settings; --setting changes nothing.", err=True)


def _parsed(settings: Sequence[str]) -> dict[str, str]:
    parsed: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"expected NAME=VALUE, given {setting!r}", param_hint="'--setting'")
        if name in parsed:
            raise typer.BadParameter(f"expected each name once, given {name!r} twice", param_hint="'--setting'")
        parsed[name] = value
    return parsed


async def _create(
    target: Topic, partitions: int, settings: Mapping[str, str]
) -> tuple[TopicDescription | None, TopicDescription]:
    """Create the topic; return its descriptions before (None: it did not exist) and after."""
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


# The id of a run without a name; eight digits are enough to tell runs apart.
_MADE_RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
_RUN_ID_DIGITS: Final = 8

_JSON_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def is_feedback(record: TopicRecord) -> bool:
    """Whether a loop wrote the record."""
    return any(name == RUN_HEADER for name, _ in record.headers)


def feedback_line(record: TopicRecord) -> str:
    """Return feedback as text: run, producer, kind, epoch and records; for another record the reason."""
    try:
        fed_back = _decoded(record)
    except DecodeError as error:
        return error.failures[0]
    epoch = "" if fed_back["epoch"] is None else f" epoch {fed_back['epoch']}"
    what = shortened(fed_back["records"]) if fed_back["kind"] == "data" else fed_back.get("step", "")
    run = fed_back["run"][:_RUN_ID_DIGITS] if _MADE_RUN_ID.fullmatch(fed_back["run"]) else fed_back["run"]
    return f"run {run} producer {fed_back['producer']} {fed_back['kind']}{epoch} {what}".rstrip()


def feedback_document(record: TopicRecord) -> bytes:
    """Return feedback as JSON with all records: bytes as base64, other values as Python's text."""
    place = {"partition": record.partition, "offset": record.offset, "timestamp_ms": record.timestamp_ms}
    try:
        fed_back = _decoded(record)
    except DecodeError as error:
        return orjson.dumps({**place, "error": error.failures[0]})
    try:
        return _as_json(place | fed_back)
    except TypeError:  # for example a number of more than 64 bits, or a tuple as a key
        return _as_json(place | fed_back | {"records": [repr(each) for each in fed_back["records"]]})


def _decoded(record: TopicRecord) -> dict[str, Any]:
    from streamiter.iteration.marked_streams import FeedbackRecords  # only for --feedback

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
"""Topics with their names on the server, in the file, or in the folder."""


def list_topics(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="A server, file or folder, such as kafka://127.0.0.1:9092", show_default=False
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """List the topics of a server, file or folder, each with its number of partitions and records."""
    check_lasting(url)
    try:
        found = run_in_own_loop(descriptions(url))
    except TopicNotFound as error:
        raise ConfigurationError(str(error)) from error  # A folder is missing, which no command creates.
    if as_json:
        for name, description in found:
            print_json(_described(name, description))
    elif not found:
        typer.echo(f"no topics in {shown_url(url)}", err=True)
    else:
        rows = [(name, str(topic.partitions), f"{topic.records}") for name, topic in found]
        print_rows(("topic", "partitions", "records"), rows, numbers=("partitions", "records"))


async def descriptions(url: str) -> _Found:
    """Return the topics of a server, file or folder, sorted by name."""
    connector = connector_for(url)
    found: _Found = []
    for name in sorted(await connector.list_topics(url, {})):
        with contextlib.suppress(TopicNotFound):  # It was deleted meanwhile.
            found.append((name, await connector.topic(with_topic(url, name), {}).describe()))
    return found


def with_topic(url: str, name: str) -> str:
    """Return the URL of the topic with this name on the server, in the file, or in the folder of ``url``."""
    if url.lower().startswith("sqlite:"):
        return f"{url.partition('?')[0]}?topic={name}"
    place, _, query = url.partition("?")
    options = f"?{query}" if query else ""
    if url.lower().startswith("file:"):
        scheme, _, path = place.partition(":")
        return f"{scheme}:{path[: path.rfind('/') + 1]}{name}{options}"
    scheme, _, rest = place.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}/{name}{options}"


def _described(name: str, description: TopicDescription) -> dict[str, object]:
    offsets = {str(partition): list(ends) for partition, ends in description.offsets.items()}
    return {"topic": name, "partitions": description.partitions, "records": description.records, "offsets": offsets}


def produce(
    url: TopicUrl,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file of lines, a record each; - is standard input.")
    ] = "-",
    key: Annotated[
        str | None, typer.Option(metavar="FIELD", help="The field of the JSON lines that is the key of the record.")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Create the topic if it does not exist.")] = False,
    partitions: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="The number of partitions of a created topic; 1 by default.", show_default=False
        ),
    ] = None,
) -> None:
    """Write lines to a topic, a record each.

    Empty lines are left out. After Ctrl-C or SIGTERM all lines read so far are stored (exit code 130).
    """
    if partitions is not None and not create:
        raise typer.BadParameter("expected --create with it", param_hint="'--partitions'")
    target = lasting_topic(url)
    producing = _Producing(target, key)
    # Opened outside of the event loop: a signal could not cancel it while a named pipe waits for its writer.
    descriptor = open_lines(file)
    try:
        run_in_own_loop(producing.run(descriptor, (partitions or 1) if create else None))
    finally:
        if producing.written:
            records = "record" if producing.written == 1 else "records"
            typer.echo(f"{producing.written:,} {records} written to {target.url}", err=True)


class _Producing:
    """Writes chunk after chunk, and counts stored records, also if it ends early."""

    def __init__(self, target: Topic, key: str | None) -> None:
        self._target = target
        self._key = key
        self._lines = 0
        self.written = 0

    async def run(self, descriptor: int, create_with_partitions: int | None) -> None:
        """Write all lines of the descriptor."""
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
            f"--key {field}: expected JSON objects with that field, given line {number}: {text_to_show(line)}"
        ) from error
    return found.encode() if isinstance(found, str) else orjson.dumps(found)


def tail(
    url: TopicUrl,
    follow: Follow = False,
    count: Annotated[
        int,
        typer.Option(
            "--count", "-n", metavar="N", min=0, help="The number of last records of each partition to start with."
        ),
    ] = 10,
    as_json: AsJson = False,
    feedback: Annotated[
        bool, typer.Option("--feedback", help="Show the feedback of a loop through the topic.")
    ] = False,
) -> None:
    """Print the last records of a topic.

    A line has partition:offset, time, key and value; with --feedback the run, producer, epoch and records.
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
    async with closed_after(reader.close):
        while (batch := await reader.read()) is not None:
            for record in batch.records():
                show(record)
            sys.stdout.flush()


def _print_record(record: TopicRecord) -> None:
    key = "" if record.key is None else f" {text_to_show(record.key)}"
    value = "(no value)" if record.value is None else text_to_show(record.value)
    typer.echo(f"{_place(record)}{key} {value}")


class _Hinting:
    """Prints records, and once a hint how to read those of a loop, whose values are not text."""

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
    print_json(document)


def _text(name: str, value: bytes | None) -> dict[str, str | None]:
    """Return a field with the text, or with base64 for bytes that are no text."""
    try:
        return {name: None if value is None else value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(value or b"").decode()}


topics_app = command_group(
    "Read topics and write to them.",
    create=(
        create,
        "streamiter topics create kafka://127.0.0.1:9092/clicks --partitions 4 --setting retention.ms=86400000",
        "streamiter topics create 'sqlite:///data.db?topic=clicks' --setting retention_records=1000000",
    ),
    list=(
        list_topics,
        "streamiter topics list kafka://127.0.0.1:9092",
        "streamiter topics list sqlite:///demo-data/streamiter.db",
    ),
    produce=(
        produce,
        "streamiter topics produce kafka://127.0.0.1:9092/clicks clicks.jsonl --key user --create",
        "tail -f log.jsonl | streamiter topics produce 'sqlite:///log.db?topic=log' --create",
    ),
    tail=(
        tail,
        "streamiter topics tail kafka://127.0.0.1:9092/clicks -f",
        "streamiter topics tail 'sqlite:///data.db?topic=clicks' -n 1000 --json | jq .value",
        "streamiter topics tail 'sqlite:///data.db?topic=loop' --feedback --json | jq -c '[.epoch, .records]'",
    ),
)


# The longest value on a terminal; in a pipe or a file, and with --json, values are whole.
_SHOWN_CHARACTERS: Final = 400


def text_to_show(value: bytes) -> str:
    """Return a value as text, shortened on a terminal; for bytes that are no text, its size."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"({len(value):,} bytes that are not text)"
    if sys.stdout.isatty() and len(text) > _SHOWN_CHARACTERS:
        return f"{text[:_SHOWN_CHARACTERS]}… ({len(value):,} bytes)"
    return text
