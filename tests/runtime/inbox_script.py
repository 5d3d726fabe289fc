"""A small language for tests of the inbox: what channels bring, and what the operator is told.

A command is a line, several are separated by ``;``. What the operator was told since the last line is below it,
indented:

    inbox a b, by epoch
    1: 30@3 w3
        nothing
    0: w0 w1
        watermark 0, watermark 1

``30@3`` is a record of epoch 3, ``[1,2]`` an array, ``1,2`` a batch; ``w3`` is an epoch watermark, ``b1`` a barrier,
``t30`` an event-time watermark (``t-idle30``, ``t-max``), ``data-end3`` the end of the data in epoch 3, ``end3`` that
of the input, ``read`` a table's end. All other commands are methods of ``Script``.
"""

import re
from typing import Any

from runtime.inbox_run import InboxRun, Item, Seen, Wants, array, barrier, data, held_records, word_of

from streamiter.engine.inbox.inbox import Posted, nothing
from streamiter.values.records import (
    Control,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    EventTimeWatermark,
    Idle,
    ReadToEnd,
)
from streamiter.values.times import MAX_TIME

OPTIONS: dict[str, dict[str, Any]] = {
    "by epoch": {"in_order": True},
    "by port": {"in_order": True, "merges_in_order": True, "epochs_in_order": False},
    "by epoch and port": {"in_order": True, "merges_in_order": True},
}
_ITEM = re.compile(r"(?P<kind>[a-z-]*)(?P<records>\[?[\d,]*\]?)(@(?P<epoch>\d+))?")
_CONTROLS: dict[str, Any] = {"w": EpochWatermark, "b": barrier, "t": EventTimeWatermark, "data-end": EndOfData}
_CONTROLS |= {"end": EndOfInput, "idle": Idle, "read": ReadToEnd}
_CONTROLS |= {"t-idle": lambda time: EventTimeWatermark(time, True), "t-max": lambda: EventTimeWatermark(MAX_TIME)}


def item(word: str) -> Item:
    """Return the item of a channel that a word means."""
    match = _ITEM.fullmatch(word)
    assert match, word
    numbers = [int(number) for number in re.findall(r"\d+", match["records"])]
    if match["kind"]:
        return _CONTROLS[match["kind"]](*numbers)
    return (array if "[" in word else data)(*numbers, epoch=int(match["epoch"] or 0))


def shown(told: Seen | Control) -> str:
    """Return in words what the operator was told, with the epochs of ends and the times of watermarks."""
    if isinstance(told, EventTimeWatermark):
        time = "at its end" if told.time == MAX_TIME else str(told.time)
        return f"time {time}{', idle' if told.is_idle else ''}"
    for kind, word in ((Idle, "idle"), (ReadToEnd, "read to its end"), (Posted, "posted")):
        if isinstance(told, kind):
            return word
    epoch = getattr(told, "epoch", 0) if isinstance(told, (EndOfData, EndOfInput)) else 0
    return f"{word_of(told)}{f' {epoch}' if epoch else ''}"


def wants_of(given: str) -> Wants:
    """Return the function of ``a, b``, ``all``, ``nothing``, ``a until 5, then b`` or ``a, b in turn``."""
    first, is_until, then = given.partition(" until ")
    if is_until:
        record, _, after = then.partition(", then ")
        before, later = wants_of(first), wants_of(after or "all")
        return lambda run: (later if int(record) in run.records() else before)(run)
    names = tuple(given.removesuffix(" in turn").split(", "))
    if given.endswith(" in turn"):
        return lambda run: (names[len(run.records()) % len(names)],)
    wanted: Any = None if given == "all" else () if given == "nothing" else names
    if given.startswith('"'):
        wanted = given.strip('"')  # a text, which is no collection of names
    return lambda _: wanted


class Script:
    """Runs the commands of a script, one by one."""

    def __init__(self) -> None:
        self._told = 0

    def act(self, line: str) -> str:
        """Do what a line says; return what the operator was told since the line before, or the error."""
        answers: list[str] = []
        try:
            for command in line.split("; "):
                port, is_port, items = command.partition(": ")
                if is_port:
                    self.run.put_all(int(port), *map(item, items.split()))
                else:
                    name, _, given = command.partition(" ")
                    answers.append(getattr(self, f"do_{name}")(given) or "")
            self.run.run()
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
        told, self._told = [*map(shown, self.run.trace[self._told :])], len(self.run.trace)
        return ", ".join([*filter(None, answers), *told]) or (
            "" if line.startswith(("inbox", "restored")) else "nothing"
        )

    # -- the commands ----------------------------------------------------------------------------------------

    def do_inbox(self, given: str, **options: Any) -> None:
        """Make an inbox: the names of its inputs, then options."""
        names, *words = given.split(", ")
        for word in words:
            name, _, value = word.partition("=")
            options |= OPTIONS[word] if word in OPTIONS else {name: [int(each) for each in value.split()]}
        if "limit_records" in options:
            [options["limit_records"]] = options["limit_records"]
        self.run, self._told = InboxRun(names.split(), **options), 0

    def do_restored(self, given: str) -> None:
        """Make another inbox from the snapshot at the last barrier."""
        self.do_inbox(given, restored=self.run.snapshots[max(self.run.snapshots)])

    def do_wants(self, given: str) -> None:
        self.run.wants = wants_of(given)
        self.run._ask()

    def do_expect(self, given: str) -> None:
        self.run.inbox.expect_barrier(barrier(int(given)))

    def do_start(self, given: str) -> str:
        """Start a barrier here; say whether it passes at once."""
        return ", ".join(f"{each!r}" for each in self.run.inbox.expect_barrier(barrier(int(given)), starts_here=True))

    def do_held(self, given: str) -> str:
        """Show the records in the snapshot at the last barrier."""
        snapshot = self.run.snapshots[max(self.run.snapshots)]
        return f"held {held_records(snapshot, self.run.in_order)}"

    def do_full(self, given: str) -> str:
        """Say whether the channel has no room for one more record."""
        return "full" if not self.run.put(int(given), data(99)) else "room"

    def do_complete(self, given: str) -> str:
        return f"complete in {given}: {' '.join(self.run.inbox.inputs_complete(int(given))) or 'none'}"

    def do_awaited(self, given: str) -> str:
        return f"awaited: {self.run.inbox.barriers.awaited()}"

    def do_slowest(self, given: str) -> str:
        assert self.run.inbox.times is not None
        return f"slowest: {self.run.inbox.times.slowest}"

    def do_admit(self, given: str) -> None:
        self.run.inbox.admit_up_to(int(given))

    def do_is(self, given: str) -> str:
        """Show how many records are in the channels and held, and whether the inbox has parked records or is ahead."""
        inbox, waiting = self.run.inbox, [channel.records for channel in self.run.channels]
        states = [name for name in ("has_parked", "is_ahead") if getattr(inbox, name)]
        return f"in channels {waiting}, held {inbox.held_records}{', '.join(['', *states])}"

    def do_until(self, given: str) -> None:
        """Handle items until the operator has received this record."""
        while int(given) not in self.run.records():
            assert self.run.step()

    def do_batches(self, given: str) -> str:
        """Show the batches that the operator received, with their epochs."""
        return f"batches {[(batch.epoch, len(batch.records)) for batch in self.run.batches]}"

    def do_post(self, given: str) -> None:
        """Post a barrier, or another notice."""
        self.run.inbox.post(barrier(int(given)) if given else nothing)
