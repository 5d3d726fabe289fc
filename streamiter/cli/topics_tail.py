"""``streamiter topics tail``."""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated

import orjson
import typer

from streamiter.cli.records import shown
from streamiter.cli.topic_arguments import AsJson, Url, lasting_topic
from streamiter.cli.topics_feedback import feedback_document, feedback_line, is_feedback
from streamiter.cli.wrapping import say
from streamiter.runtime.running import run_in_own_loop
from streamiter.topics import ReadRequest, Topic, TopicRecord

__all__ = ["last_records", "tail"]


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
