"""``streamiter topics produce``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import orjson
import typer

from streamiter.cli.lines import lines_of, open_lines
from streamiter.cli.records import shown
from streamiter.cli.topic_arguments import Url, lasting_topic
from streamiter.errors import ConfigurationError
from streamiter.runtime.running import run_in_own_loop
from streamiter.topics import OutgoingBatch, Topic, TopicWriter

__all__ = ["produce"]


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
