"""What a drawing shows, whatever it is drawn with: nodes, links, and a box for each iteration.

A service that steps share, a parameter server, is a node behind them that no data flows to.
"""

from __future__ import annotations

import functools
import re
import struct
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from streamiter.errors import ConfigurationError
from streamiter.operators.operator import Service
from streamiter.runtime.graph import SINGLE_INPUT, Edge, Step
from streamiter.runtime.output import Broadcast, ByFunction, ByKey, Rebalance
from streamiter.runtime.statistics import JobStatistics, LoopStatistics

__all__ = [
    "FONT_FAMILY",
    "FONT_FILE",
    "Box",
    "Caption",
    "CaptionLine",
    "Node",
    "NodeEdge",
    "Picture",
    "advances",
    "fit",
    "heading_caption",
    "label_caption",
    "node_caption",
    "picture_of",
    "printable",
    "title_caption",
    "width_of",
]


LinkKind = Literal["data", "feedback", "criteria", "service"]
"""``feedback`` and ``criteria`` go back; ``service`` leads to what a step works with, and both ways."""

_PARTITIONINGS = {Broadcast: "broadcast", Rebalance: "rebalance", ByKey: "by key", ByFunction: "by function"}
_BACK_LABELS = {"feedback": "feedback, epoch + 1", "criteria": "criteria, epoch + 1"}
_SERVICE_LABEL = "get, add"


@dataclass(frozen=True, slots=True)
class Node:
    """A step, or a service."""

    name: str
    shape: str
    """operator, source, sink, iteration or service."""
    parallelism: int = 1
    notes: tuple[str, ...] = ()
    """Lines below the name: the epochs it sees, what it has handled."""
    box: int | None = None
    """Which box it lies in."""

    @property
    def times(self) -> str:
        """How many subtasks it has, if more than one."""
        return f"×{self.parallelism}" if self.parallelism > 1 else ""


@dataclass(frozen=True, slots=True)
class NodeEdge:
    """An edge between two nodes, by their numbers."""

    source: int
    target: int
    kind: LinkKind = "data"
    label: str = ""

    @property
    def goes_back(self) -> bool:
        """Whether it closes a loop."""
        return self.kind in _BACK_LABELS


@dataclass(frozen=True, slots=True)
class Box:
    """An iteration."""

    title: str
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """All it says, in one line."""
        return " · ".join((self.title, *self.notes))


@dataclass(frozen=True, slots=True)
class Picture:
    """Nodes, each behind those it takes data from; links; boxes."""

    title: str
    nodes: tuple[Node, ...]
    links: tuple[NodeEdge, ...]
    boxes: tuple[Box, ...] = ()


def picture_of(flow: str, steps: Sequence[Step], statistics: JobStatistics | None = None) -> Picture:
    """The picture of a flow; with statistics of one of its jobs it shows what they count."""
    if statistics is not None:
        _check_statistics(flow, steps, statistics)
    numbers = {step: number for number, step in enumerate(steps)}
    services = list(dict.fromkeys(step.service for step in steps if step.service is not None))
    loops = list(dict.fromkeys(step.loop for step in steps if step.loop is not None))
    return Picture(
        title=flow if statistics is None else f"{flow} ({statistics.state})",
        nodes=(
            *(_step(step, loops, statistics) for step in steps),
            *(_service(service, statistics) for service in services),
        ),
        links=(
            *(
                NodeEdge(
                    numbers[edge.upstream], numbers[step], kind := _kind(edge, step), _label(edge, step, kind)
                )
                for step in steps
                for edge in step.inputs
            ),
            *(
                NodeEdge(numbers[step], len(steps) + services.index(step.service), "service", _SERVICE_LABEL)
                for step in steps
                if step.service is not None
            ),
        ),
        boxes=tuple(
            Box(f"iteration {number}", _progress_notes(loop, steps, statistics))
            for number, loop in enumerate(loops, 1)
        ),
    )


# -- nodes -------------------------------------------------------------------------------------------------


def _step(step: Step, loops: Sequence[Any], statistics: JobStatistics | None) -> Node:
    return Node(
        name=step.name,
        shape=step.shape,
        parallelism=step.parallelism,
        notes=(*_notes(step), *(() if statistics is None else _counts(step, statistics))),
        box=None if step.loop is None else loops.index(step.loop),
    )


def _service(service: Service, statistics: JobStatistics | None) -> Node:
    told = None if statistics is None else statistics.parameter_servers.get(service.name)
    return Node(service.name, "service", notes=(service.drawn_as, *(() if told is None else told.notes)))


# -- links -------------------------------------------------------------------------------------------------


def _kind(edge: Edge, step: Step) -> LinkKind:
    if edge.feedback is None:
        return "data"
    # A head has initial values too; only what decides about the end lives on what comes back alone.
    return "criteria" if all(given.feedback is not None for given in step.inputs) else "feedback"


def _label(edge: Edge, step: Step, kind: LinkKind) -> str:
    return ", ".join(_label_parts(edge, step, kind))


def _label_parts(edge: Edge, step: Step, kind: LinkKind) -> Iterable[str]:
    if kind != "data":
        yield _BACK_LABELS[kind]
    elif edge.input_name != SINGLE_INPUT:
        yield edge.input_name
    if edge.tag is not None:
        yield f"side output {edge.tag.name}"
    partitioning = _PARTITIONINGS.get(type(edge.partitioning))
    # To a single subtask all records go anyway.
    if partitioning is not None and (partitioning != "rebalance" or step.parallelism > 1):
        yield partitioning


# -- notes -------------------------------------------------------------------------------------------------


def _notes(step: Step) -> Iterable[str]:
    if step.epochs_seen:
        yield step.epochs_seen
    if step.per_round:
        yield "per round"


def _counts(step: Step, statistics: JobStatistics) -> Iterable[str]:
    counts = statistics.step(step.name)
    shown = [] if step.shape == "source" else [f"{counts.records_in:,} in"]
    if step.shape != "sink":
        shown.append(f"{counts.records_out:,} out")
    if counts.rejected:
        shown.append(f"{counts.rejected:,} rejected")
    yield " · ".join(shown)
    watermark = min(
        task.epoch_watermark
        for task in statistics.tasks
        if any(instance.step == step.name for instance in task.steps)
    )
    if watermark >= 0:
        yield f"epoch watermark {watermark:,}"


def _progress_notes(loop: Any, steps: Sequence[Step], statistics: JobStatistics | None) -> tuple[str, ...]:
    if statistics is None:
        return ()
    members = {step.name for step in steps if step.loop is loop}
    return next((_counts_of_loop(told) for told in statistics.loops if members.issuperset(told.heads)), ())


def _counts_of_loop(loop: LoopStatistics) -> tuple[str, ...]:
    return loop.progress, f"{loop.fed_back_records:,} records fed back"


def _check_statistics(flow: str, steps: Sequence[Step], statistics: JobStatistics) -> None:
    if not isinstance(statistics, JobStatistics):
        raise ConfigurationError(
            f"flow {flow!r}: draw expected statistics of a job, given {statistics!r}; "
            "pass job.statistics() or what flow.run() returned"
        )
    counted = {instance.step for task in statistics.tasks for instance in task.steps}
    missing = [step.name for step in steps if step.name not in counted]
    if statistics.flow != flow or missing:
        given = f"those of flow {statistics.flow!r}" + (f" without step {missing[0]!r}" if missing else "")
        raise ConfigurationError(
            f"flow {flow!r}: draw expected statistics of a job of this flow, given {given}; "
            "pass job.statistics() or what flow.run() returned"
        )


TITLE_SIZE = 16.0
HEADING_SIZE = 12.0
LABEL_SIZE = 11.0
_NAME_SIZE = 13.0
_NOTE_SIZE = 11.0
_LINE_HEIGHT = 1.35

# A name goes on in the next line behind some 25 characters, and is shortened in the third.
_NAME_WIDTH = 180.0
_NAME_LINES = 3
_NOTE_WIDTH = 280.0
_LABEL_WIDTH = 220.0
_HEADING_WIDTH = 480.0


@dataclass(frozen=True, slots=True)
class CaptionLine:
    """One line of a caption.

    What is written in nodes, beside links and over boxes, in lines that fit.
    """

    text: str
    size: float
    muted: bool = False
    times: str = ""
    """Comes behind the text, muted."""

    @property
    def width(self) -> float:
        """How wide it is."""
        return width_of(f"{self.text} {self.times}" if self.times else self.text, self.size)

    @property
    def height(self) -> float:
        """How high it is, with the room to the next line."""
        return self.size * _LINE_HEIGHT


@dataclass(frozen=True, slots=True)
class Caption:
    """Lines, and what they stand for where they are too short for it."""

    lines: tuple[CaptionLine, ...]
    whole: str = ""
    """Empty if nothing is left out."""

    @property
    def width(self) -> float:
        """Of its widest line."""
        return max((line.width for line in self.lines), default=0.0)

    @property
    def height(self) -> float:
        """Of all lines."""
        return sum(line.height for line in self.lines)


def node_caption(node: Node) -> Caption:
    """Its name in a few lines, then its notes, one a line."""
    name = fit(node.name, _NAME_SIZE, _NAME_WIDTH, lines=_NAME_LINES)
    notes = [fit_line(note, _NOTE_SIZE, _NOTE_WIDTH) for note in node.notes]
    lines = [CaptionLine(text, _NAME_SIZE) for text in name.lines]
    if lines and node.times:
        lines[-1] = CaptionLine(lines[-1].text, _NAME_SIZE, times=node.times)
    lines += [CaptionLine(text, _NOTE_SIZE, muted=True) for note in notes for text in note.lines]
    shortened = any(fitted.shortened for fitted in (name, *notes))
    return Caption(tuple(lines), printable(", ".join((node.name, *node.notes))) if shortened else "")


def label_caption(link: NodeEdge) -> Caption:
    """Of a link, in one line."""
    return _line(link.label, LABEL_SIZE, _LABEL_WIDTH)


def heading_caption(box: Box) -> Caption:
    """Of a box, in one line."""
    return _line(box.heading, HEADING_SIZE, _HEADING_WIDTH)


def title_caption(title: str, width: float) -> Caption:
    """Of the drawing, in one line that may be this wide."""
    return _line(title, TITLE_SIZE, width)


def _line(text: str, size: float, width: float) -> Caption:
    fitted = fit_line(text, size, width)
    return Caption(
        tuple(CaptionLine(line, size) for line in fitted.lines), printable(text) if fitted.shortened else ""
    )


# Of characters that the font does not have; it is another font's, so it can only be estimated, with some room.
_WIDE_EM = 1.3
_NARROW_EM = 1.0

# XML 1.0 cannot hold these, not even escaped.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# Where a name may be broken: behind a space, and behind what joins words in a name.
_PIECES = re.compile(r"[^\s_./:\-→]*[\s_./:\-→]?")


@dataclass(frozen=True, slots=True)
class Fitted:
    """Lines that are narrow enough.

    How wide text is, and how it is made to fit.
    """

    lines: tuple[str, ...]
    shortened: bool = False


def width_of(text: str, size: float) -> float:
    """The width of a line in a font of this size."""
    known = advances()
    return size * sum(
        width if (width := known.get(character)) is not None else _estimate(character) for character in text
    )


def _estimate(character: str) -> float:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0.0
    return _WIDE_EM if unicodedata.east_asian_width(character) in "WF" else _NARROW_EM


def printable(text: str) -> str:
    """The text as XML can hold it, in one line."""
    return " ".join(_NOT_IN_XML.sub("\ufffd", text).split())


def fit_line(text: str, size: float, width: float) -> Fitted:
    """The text in one line, shortened at its end if it is too wide."""
    return fit(text, size, width, lines=1)


def fit(text: str, size: float, width: float, *, lines: int) -> Fitted:
    """The text in a few lines, broken between words where that helps, shortened if it is still too wide."""
    rest = printable(text)
    fitted: list[str] = []
    while rest and len(fitted) < lines:
        if width_of(rest, size) <= width:
            return Fitted((*fitted, rest))
        is_last = len(fitted) == lines - 1
        length = _fitting(rest, size, width - (width_of("…", size) if is_last else 0))
        if is_last:
            return Fitted((*fitted, rest[:length].rstrip() + "…"), shortened=True)
        length = _break_before(rest, length)
        fitted.append(rest[:length].rstrip())
        rest = rest[length:].lstrip()
    return Fitted(tuple(fitted))


def _fitting(text: str, size: float, width: float) -> int:
    """How many characters fit; at least one, so that there is always progress."""
    used = 0.0
    for length, character in enumerate(text):
        used += width_of(character, size)
        if used > width:
            return max(1, length)
    return len(text)


def _break_before(text: str, length: int) -> int:
    """The last place to break within the first ``length`` characters, or there if there is none."""
    place = 0
    for piece in _PIECES.finditer(text):
        if len(piece[0].rstrip()) + piece.start() > length:
            break
        place = piece.end()
    return place or length


FONT_FAMILY = "DejaVu Sans"
FONT_FILE = Path(__file__).parent / "font" / "DejaVuSans.ttf"


@functools.cache
def advances() -> Mapping[str, float]:
    """How far each character of the font moves the next one on, for a font of size 1.

    The font that drawings are measured and, as PNG, drawn with; a machine may have none.
    """
    data = FONT_FILE.read_bytes()
    tables = _tables(data)
    (units_in_em,) = struct.unpack_from(">H", data, tables["head"] + 18)
    (metrics,) = struct.unpack_from(">H", data, tables["hhea"] + 34)
    return {
        character: struct.unpack_from(">H", data, tables["hmtx"] + 4 * min(glyph, metrics - 1))[0]
        / units_in_em
        for character, glyph in _glyphs(data, tables["cmap"])
    }


def _tables(data: bytes) -> dict[str, int]:
    (count,) = struct.unpack_from(">H", data, 4)
    records = (struct.unpack_from(">4sIII", data, 12 + 16 * number) for number in range(count))
    return {tag.decode(): offset for tag, _, offset, _ in records}


def _glyphs(data: bytes, cmap: int) -> Iterator[tuple[str, int]]:
    """Characters with their glyphs, of the subtable for the basic plane (format 4)."""
    (count,) = struct.unpack_from(">H", data, cmap + 2)
    subtables = [cmap + struct.unpack_from(">I", data, cmap + 8 + 8 * number)[0] for number in range(count)]
    table = next(place for place in subtables if struct.unpack_from(">H", data, place)[0] == 4)
    segments = struct.unpack_from(">H", data, table + 6)[0] // 2
    ends, starts, deltas, ranges = (
        struct.unpack_from(f">{segments}H", data, table + 14 + 2 * segments * column + (2 if column else 0))
        for column in range(4)
    )
    for segment in range(segments):
        for code in range(starts[segment], min(ends[segment], 0xFFFE) + 1):
            glyph = code
            if ranges[segment]:
                place = (
                    table + 16 + 6 * segments + 2 * segment + ranges[segment] + 2 * (code - starts[segment])
                )
                (glyph,) = struct.unpack_from(">H", data, place)
            yield chr(code), (glyph + deltas[segment]) & 0xFFFF
