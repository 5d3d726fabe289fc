"""What a loop writes into its topic: one record for a batch or a control record, told apart by headers.

====================  ==================================================================================
header                meaning
====================  ==================================================================================
``feedback-run``      the run of the job; records of other runs are skipped
``producer``          number of the subtask that feeds back, counted over all workers
``kind``              ``data``, ``watermark``, ``end of data``, ``barrier``, ``suspend`` (a barrier at which
                      the job stops) or ``start``
``epoch``             of data: that of its records, already grown by one; of a watermark and of the end
                      of data: the last complete one. A barrier has ``checkpoint`` instead
``sequence``          0, 1, 2, … for each producer in each partition
``home``              the partition with this producer's data for this head; of the copies of a control
                      record in all partitions of a head, the one there counts
``step``, ``start``   of a start: the step that feeds back, and what tells one start from another
====================  ==================================================================================

The value of data is a batch as plain data; other kinds have an empty one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, final

from streamiter.errors import InternalError, TopicError
from streamiter.operators.rejection import Origin
from streamiter.records import CheckpointBarrier, Control, EndOfData, EpochWatermark
from streamiter.topics.topic import Headers, Topic

__all__ = [
    "DATA",
    "HEADER_BYTES_MAX",
    "RUN_HEADER",
    "START",
    "Kind",
    "Message",
    "control_of",
    "message_of",
    "not_fed_back",
]

Kind = Literal["data", "watermark", "end of data", "barrier", "suspend", "start"]

RUN_HEADER: Final = "feedback-run"
DATA: Final = "data"
START: Final = "start"
_BARRIERS: Final = ("barrier", "suspend")
_KINDS: Final = ("data", "watermark", "end of data", *_BARRIERS, "start")

# All headers of one record of data, with what topics add around it: 6 names of 37 characters in all, a run id
# of 64, 4 numbers of 20, lengths of some 10 for each header, and Kafka's framing of a batch with one record.
HEADER_BYTES_MAX: Final = 512


@final
@dataclass(frozen=True, slots=True)
class Message:
    """The headers of one record of a feedback topic."""

    run: str
    producer: int
    kind: Kind
    number: int
    """The epoch, or the number of the checkpoint."""
    sequence: int
    home: int
    step: str = ""
    start: str = ""

    @property
    def epoch(self) -> int | None:
        """None for a barrier and a start."""
        return None if self.kind in (*_BARRIERS, START) else self.number

    def headers(self) -> Headers:
        """As they are written."""
        written = (
            (RUN_HEADER, self.run.encode()),
            ("producer", b"%d" % self.producer),
            ("kind", self.kind.encode()),
            ("checkpoint" if self.kind in _BARRIERS else "epoch", b"%d" % self.number),
            ("sequence", b"%d" % self.sequence),
            ("home", b"%d" % self.home),
        )
        if self.kind != START:
            return written
        return (*written, ("step", self.step.encode()), ("start", self.start.encode()))

    @classmethod
    def of(cls, headers: Headers) -> Message:
        """What headers say; ValueError for those of other records."""
        fields = dict(headers)
        try:
            kind = fields["kind"].decode()
            if kind not in _KINDS:
                raise ValueError(f"kind {kind!r}")
            return cls(
                run=fields[RUN_HEADER].decode(),
                producer=int(fields["producer"]),
                kind=kind,  # type: ignore[arg-type]
                number=int(fields["checkpoint" if kind in _BARRIERS else "epoch"]),
                sequence=int(fields["sequence"]),
                home=int(fields["home"]),
                step=fields.get("step", b"").decode(),
                start=fields.get("start", b"").decode(),
            )
        except KeyError as missing:
            raise ValueError(f"no header {missing}") from None


def message_of(control: Control) -> tuple[Kind, int]:
    """The kind of a control record, and its number."""
    if isinstance(control, EpochWatermark):
        return "watermark", control.epoch
    if isinstance(control, EndOfData):
        return "end of data", control.epoch
    if isinstance(control, CheckpointBarrier):
        return "suspend" if control.suspend else "barrier", control.checkpoint
    raise InternalError(f"{control!r} has no form in a topic")


def control_of(kind: Kind, number: int) -> Control:
    """The control record of a kind that is neither data nor a start."""
    if kind == "watermark":
        return EpochWatermark(number)
    if kind == "end of data":
        return EndOfData(number)
    return CheckpointBarrier(number, suspend=kind == "suspend")


def not_fed_back(topic: Topic, partition: int, offset: int, error: ValueError) -> TopicError:
    """The error for a record whose headers are not those of feedback."""
    return TopicError(
        f"{Origin(topic.url, partition, offset)}: expected only what the loop feeds back, given another "
        f"record ({error}); give the loop a topic of its own"
    )
