"""The memory that two processes of one machine share: long bodies of frames pass through it, not through the socket.

Each process has a *segment* for the bodies that it sends: a file without a name, in memory, which the other process
maps. The sender copies a body into free blocks, and sends a SHARED frame with their number. The receiver uses the body
where it is, and names the blocks in a FREE frame when no array is in them any more. Meanwhile their content stays. A
body for which there is no room, or no segment, goes through the socket.

The segment ends with the last process that has mapped it. It cannot become shorter, and its pages disappear only from
blocks that are free, so arrays of the receiver stay readable whatever happens to the sender.

The bodies of the frames: SEGMENT u32 process, u32 file descriptor, u64 device and u64 inode of the file; SHARED u32
first block, u32 length, u8 kind of the frame whose body this is; FREE u32 first blocks. The first FREE frame names no
block, and says that the segment is mapped.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import Final, final

import numpy as np

from streamiter.engine.processes.frames import BODY_BYTES_MAX, FREE, HEADER, SEGMENT, SHARED
from streamiter.errors import InternalError
from streamiter.values.encoding import Parts
from streamiter.values.helpers.clock import Clock, TimerHandle

# The longest body fits. Pages that are not written take no memory.
_SEGMENT_BYTES: Final = BODY_BYTES_MAX

# A body has more than 1 MiB, so that at most a fifth of its blocks is empty.
_BLOCK_BYTES: Final = 256 << 10

# Free blocks keep their memory for this long, for the next bodies: 40 MB take 14 ms in new memory, and 3 ms else.
_KEPT_S: Final = 1.0

# This many blocks are given back at once, because 256 MiB take 40 ms.
_GIVEN_BACK: Final = 1024

# The states of a block: without memory; free, and not used in the last second; free; read by the other process.
_EMPTY, _OLD, _USED, _TAKEN = range(4)
_IS_TAKEN: Final = bytes(state == _TAKEN for state in range(256))
_LATER: Final = bytes(_OLD if state == _USED else state for state in range(256))
_OLD_BLOCKS: Final = re.compile(bytes((_OLD,)) + b"+")

_OFFER: Final = Struct("<IIQQ")
_PLACE: Final = Struct("<IIB")
_BLOCK: Final = Struct("<I")


@final
class LinkMemory:
    """The shared memory of a link, in both directions. ``wake`` is called, in any thread, when FREE must be sent."""

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        self._clock = clock
        self._wake = wake
        self._sent: _Segment | None = None
        self._is_refused = sys.platform != "linux"
        """Whether the system gives this process no segment."""
        self._is_mapped = False
        """Whether the other process has mapped the segment."""
        self._arrived: mmap.mmap | None = None
        """The segment of the other process."""
        self._held: dict[int, weakref.ref[object]] = {}
        """By first block: the memory of a body that has arrived, while arrays are in it."""
        self._freed: deque[int] = deque()
        """The first blocks of bodies in which no array is any more; other threads append to it."""
        self._frames: Parts = []

    def frames(self) -> Parts:
        """Return the frames that must leave now, and forget them."""
        frames, self._frames = self._frames, []
        freed = []
        while self._freed:
            freed.append(self._freed.popleft())
            del self._held[freed[-1]]
        if freed:
            frames.append(_frame(FREE, b"".join(map(_BLOCK.pack, freed))))
        return frames

    def put(self, kind: int, body: Parts, length: int) -> tuple[int, Parts]:
        """Copy the body of a frame into the segment, if there is room; return the kind and the body to be sent."""
        if self._sent is None and not self._is_refused:
            try:
                self._sent = _Segment(self._clock)
                self._frames.append(_frame(SEGMENT, self._sent.offer()))
            except OSError:
                self._is_refused = True
        if self._is_mapped and self._sent is not None and (block := self._sent.put(body, length)) is not None:
            return SHARED, [_PLACE.pack(block, length, kind)]
        return kind, body

    def body(self, shared: memoryview) -> tuple[int, memoryview]:
        """Return the kind of the frame that a SHARED frame stands for, and its body, which may be kept."""
        block, length, kind = _PLACE.unpack(shared)
        if self._arrived is None or block in self._held:
            raise InternalError(f"shared memory: expected a body in free blocks, given one in block {block}")
        memory = np.frombuffer(self._arrived, np.uint8, length, block * _BLOCK_BYTES)
        self._held[block] = weakref.ref(memory, lambda _: self._free(block))
        return kind, memory.data

    def _free(self, block: int) -> None:
        self._freed.append(block)
        self._wake()

    def received(self, kind: int, body: memoryview) -> None:
        """Take a SEGMENT or a FREE frame. A segment that this process must not map is not used."""
        if kind == SEGMENT:
            try:
                self._arrived = _mapped(*_OFFER.unpack(body))
            except OSError:
                return
            self._frames.append(_frame(FREE, b""))
            self._wake()
        elif self._sent is not None:
            self._is_mapped = True
            for (block,) in _BLOCK.iter_unpack(body):
                self._sent.free(block)

    def close(self) -> None:
        """Give the segments back. The segment of the other process stays while arrays are in it."""
        self._held.clear()
        self._arrived = None
        if self._sent is not None:
            self._sent.close()


def _frame(kind: int, body: bytes) -> bytes:
    return HEADER.pack(len(body), 0, kind) + body


def _mapped(process: int, descriptor: int, device: int, inode: int) -> mmap.mmap:
    """Return the segment of another process. Raises ``OSError`` if this process must not, or cannot, map it."""
    import fcntl  # Windows does not have it.

    file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        # In a container, the process may have another number here.
        if (found.st_dev, found.st_ino, found.st_size) != (device, inode, _SEGMENT_BYTES):
            raise FileNotFoundError(f"expected inode {inode} of device {device}, given another file")
        if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise PermissionError("expected a file that cannot become shorter")
        return mmap.mmap(file, _SEGMENT_BYTES)
    finally:
        os.close(file)


@final
class _Segment:
    """The segment for the bodies that this process sends. Raises ``OSError`` if the system refuses it."""

    def __init__(self, clock: Clock) -> None:
        import fcntl

        self._clock = clock
        self._blocks = bytearray(_SEGMENT_BYTES // _BLOCK_BYTES)
        """The state of each block."""
        self._counts: dict[int, int] = {}
        """The number of blocks of each body that the other process reads, by the first block."""
        self._timer: TimerHandle | None = None
        self._file = os.memfd_create("streamiter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, _SEGMENT_BYTES)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._memory = mmap.mmap(self._file, _SEGMENT_BYTES)
        except OSError:
            os.close(self._file)
            raise

    def offer(self) -> bytes:
        """Return what another process needs to map the segment."""
        made = os.fstat(self._file)
        return _OFFER.pack(os.getpid(), self._file, made.st_dev, made.st_ino)

    def put(self, body: Parts, length: int) -> int | None:
        """Copy a body into free blocks; return the first one, or None if there is no room."""
        count = -(-length // _BLOCK_BYTES)
        first = self._blocks.translate(_IS_TAKEN).find(bytes(count))
        if first < 0:
            return None
        if _EMPTY in self._blocks[first : first + count]:
            try:
                self._write_new(body, first * _BLOCK_BYTES)
            except OSError:
                self._give_back(first, count)
                return None
        else:
            place = first * _BLOCK_BYTES
            for part in body:
                self._memory[place : place + len(part)] = part
                place += len(part)
        self._blocks[first : first + count] = bytes((_TAKEN,)) * count
        self._counts[first] = count
        return first

    def _write_new(self, body: Parts, place: int) -> None:
        """Write into new memory: a call of the system takes half of the time, and fails where memory is exhausted."""
        for part in body:
            rest = memoryview(part)
            while rest:
                written = os.pwrite(self._file, rest, place)
                rest, place = rest[written:], place + written

    def free(self, first: int) -> None:
        """The other process does not read the body any more."""
        count = self._counts.pop(first)
        self._blocks[first : first + count] = bytes((_USED,)) * count
        self._wait()

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self._clock.call_later(_KEPT_S, self._give_back_old)

    def _give_back_old(self) -> None:
        self._timer = None
        left = _GIVEN_BACK
        for run in _OLD_BLOCKS.finditer(bytes(self._blocks)):
            count = min(left, run.end() - run.start())
            self._give_back(run.start(), count)
            left -= count
            if not left:
                break
        self._blocks = self._blocks.translate(_LATER)
        if _OLD in self._blocks:
            self._wait()

    def _give_back(self, first: int, count: int) -> None:
        """Give the memory of blocks back; the file keeps its length."""
        self._memory.madvise(mmap.MADV_REMOVE, first * _BLOCK_BYTES, count * _BLOCK_BYTES)
        self._blocks[first : first + count] = bytes((_EMPTY,)) * count

    def close(self) -> None:
        """Give the segment back."""
        if self._timer is not None:
            self._timer.cancel()
        self._memory.close()
        os.close(self._file)
