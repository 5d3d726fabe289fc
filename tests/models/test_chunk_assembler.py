"""Chunks of updates that remain incomplete need bounded memory, and chunks of two updates are never mixed."""

import pytest

from streamiter.models.chunks import ChunkAssembler
from streamiter.models.publisher import cut
from streamiter.models.update import Chunk, UpdateHeaders


def headers(version: int, chunk: Chunk) -> UpdateHeaders:
    return UpdateHeaders("ctr", 1, version, None, 0, "application/json", chunk)


def add(assembler: ChunkAssembler, version: int, value: bytes, *indices: int, chunk_bytes: int = 10) -> bytes | None:
    """Add the chunks of ``indices``; return the update that the last of them completes."""
    chunks = cut(value, chunk_bytes)
    whole = None
    for index in indices:
        chunk, part = chunks[index]
        whole = assembler.add(headers(version, chunk), part)
    return whole


def test_any_order_gives_the_value() -> None:
    """A search from the end of a topic finds the last chunk first."""
    value = bytes(range(35))
    assert add(ChunkAssembler(), 1, value, 3, 1, 0, 1, 2) == value


def test_updates_that_never_become_whole_are_dropped_from_the_oldest_on() -> None:
    """A publisher that crashed again and again within large updates filled its readers' memory."""
    assembler = ChunkAssembler(pending_bytes_max=50)
    for version in range(1, 6):
        add(assembler, version, bytes([version] * 35), 0, 1)
    assert assembler.dropped == 3  # two updates of 20 bytes fit
    assert add(assembler, 4, bytes([4] * 35), 2, 3) == bytes([4] * 35)
    assert add(assembler, 1, bytes([1] * 35), 2, 3) is None


def test_the_number_of_unfinished_updates_is_bounded_too() -> None:
    """Tiny chunks never reach a limit in bytes."""
    assembler = ChunkAssembler()
    for version in range(1000):
        add(assembler, version, b"ab", 0, chunk_bytes=1)
    assert assembler.dropped == 1000 - 256


def test_a_repeated_chunk_counts_once() -> None:
    """Chunks written again after a restart must not use up the limit."""
    assembler = ChunkAssembler(pending_bytes_max=30)
    assert add(assembler, 1, b"x" * 35, 0, 0, 0, 0, 1, 1) is None
    assert assembler.dropped == 0


def test_chunks_that_contradict_each_other_are_refused() -> None:
    """Two chunks with the same checksum but different numbers of chunks show that one header is wrong."""
    assembler = ChunkAssembler()
    assembler.add(headers(1, Chunk(0, 3, "00")), b"a")
    with pytest.raises(ValueError, match="chunk 1 is one of 4, the chunks before are of 3"):
        assembler.add(headers(1, Chunk(1, 4, "00")), b"b")


def test_closed_chunks_belong_to_updates_whose_last_chunk_has_arrived() -> None:
    """An update that is still being written must not start a search for older chunks."""
    assembler = ChunkAssembler()
    add(assembler, 1, bytes(35), 0, 1)
    assert assembler.closed_chunks == 0
    add(assembler, 2, bytes([2] * 35), 3)
    assert assembler.closed_chunks == 4
    assembler.drop_up_to((1, 2))
    assert assembler.closed_chunks == 0
