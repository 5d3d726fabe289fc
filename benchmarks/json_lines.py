"""Learn from a file of JSON lines with texts, row by row: in a flow, without one, and with Vowpal Wabbit's reader."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson

from benchmarks.flights import is_late, read_flights
from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import Session
from streamiter import Columns, Flow, topic
from streamiter.errors import ConfigurationError
from streamiter.learn import AdaptiveLinearModel, ProgressiveValidation, train_online
from streamiter.learn.flights import FIELDS
from streamiter.topics.json_columns import JsonColumns
from streamiter.topics.topic import TopicBatch

__all__ = ["json_lines"]

ROWS: Final = "rows/s"
LOSS: Final = "log loss"
VW: Final = "Vowpal Wabbit, --json"
VW_SGD: Final = "Vowpal Wabbit, --json --sgd"
BARE: Final = "without a flow"
FLOW: Final = "train_online"
PLAIN_BARE: Final = "one rate, without a flow"
PLAIN: Final = "one rate, train_online"

_LABEL: Final = "late"
_TEXTS: Final = frozenset({"carrier", "origin", "dest"})
_SCHEMA: Final = {_LABEL: "bool"} | {name: "str" if name in _TEXTS else "int64" for name in FIELDS}
# As many lines as the reader of a topic returns at once.
_LINES: Final = 8_192
_TIMES_VW: Final = {FLOW: 0.7, BARE: 1.0, PLAIN: 1.0}
_RATE: Final = (1.0,)

Truths = npt.NDArray[np.bool_]
Rates = tuple[float, ...] | None


def json_lines(session: Session) -> Iterator[Figure]:
    """Learn from flights, a line of JSON each, row by row; texts are hashed to 2**18 places."""
    try:
        flights = read_flights()[: session.size(327_346, 5_000)]
    except ConfigurationError as error:
        _say(f"left out: {error}")
        return
    with tempfile.TemporaryDirectory() as folder:
        contenders = _contenders(flights, Path(folder))
        for name in (BARE, PLAIN_BARE):
            contenders[name]()  # Compiles what is not compiled yet.
        series = alternate(contenders, repeat=session.repeat, agree=_agree)
    reference = VW if VW in contenders else BARE
    for name in contenders:
        bound = _TIMES_VW.get(name) if reference == VW else None
        yield series.figure(
            name,
            ROWS,
            compared_with="" if name == reference else reference,
            target=None if bound is None else Target("ratio", at_least=bound),
        )
    for name in contenders:
        yield series.figure(name, LOSS)


def _contenders(flights: Columns, folder: Path) -> dict[str, Contender]:
    late = is_late(flights).astype(np.bool_)
    ours = _written(folder / "flights.jsonl", flights, _LABEL, late.tolist())
    # One decoder for all rounds: it decodes its first 100,000 records without compiled code.
    decoder = JsonColumns(_SCHEMA)
    contenders: dict[str, Contender] = {
        BARE: lambda: _bare(ours, decoder),
        FLOW: lambda: _flow(ours, decoder, len(late)),
        PLAIN_BARE: lambda: _bare(ours, decoder, _RATE),
        PLAIN: lambda: _flow(ours, decoder, len(late), _RATE),
    }
    if find_spec("vowpalwabbit") is None:
        _say("Vowpal Wabbit is left out, because it is not installed")
        return contenders
    theirs = _written(folder / "vw.jsonl", flights, "_label", np.where(late, 1, -1).tolist())
    contenders[VW] = lambda: _vowpal_wabbit(theirs, "", late)
    contenders[VW_SGD] = lambda: _vowpal_wabbit(theirs, "--sgd", late)
    return contenders


def _written(path: Path, flights: Columns, label: str, labels: list[object]) -> Path:
    """Write a line for each flight: its label, and the fields that are known before it departs."""
    names, columns = (label, *FIELDS), (flights[name].tolist() for name in FIELDS)
    rows = zip(labels, *columns, strict=True)
    path.write_bytes(b"".join(orjson.dumps(dict(zip(names, row, strict=True))) + b"\n" for row in rows))
    return path


def _agree(first: float, other: float | None) -> bool:
    """Whether the losses are equal; a model with one rate and Vowpal Wabbit have none to compare."""
    return other is None or bool(np.isclose(first, other, rtol=1e-12))


def _bare(path: Path, decoder: JsonColumns, rates: Rates = None) -> Trial:
    model, validation, count = AdaptiveLinearModel(rates=rates, shapes=False), ProgressiveValidation(), 0
    with Stopwatch() as watch:
        lines = path.read_bytes().splitlines()
        for start in range(0, len(lines), _LINES):
            columns = decoder.decode(TopicBatch(values=lines[start : start + _LINES]))
            assert isinstance(columns, Columns)
            arrays = columns.arrays
            labels = arrays.pop(_LABEL)
            validation.update(model.learn_each(Columns(arrays), labels), labels)
            count += len(labels)
    loss = validation.metrics()["loss"]
    return Trial({**watch.rates(count, "rows"), LOSS: loss}, result=None if rates else loss)


def _flow(path: Path, decoder: JsonColumns, count: int, rates: Rates = None) -> Trial:
    flow = Flow("JSON lines")
    flights = flow.source(topic(f"file:{path}"), decode=decoder)
    model = partial(AdaptiveLinearModel, rates=rates, shapes=False)
    reports = train_online(flights, model, label=_LABEL).validation.collect()
    with Stopwatch() as watch:
        run_to_end(flow)
    assert reports.items[-1]["count"] == count
    loss = reports.items[-1]["loss"]
    return Trial({**watch.rates(count, "rows"), LOSS: loss}, result=None if rates else loss)


def _vowpal_wabbit(path: Path, optimizer: str, late: Truths) -> Trial:
    """Learn with Vowpal Wabbit alone: its own threads read the file and learn; Python only starts them."""
    from vowpalwabbit import Workspace

    with Stopwatch() as watch:
        workspace = Workspace(
            arg_list=[
                *("--data", str(path), "--json", "--no_stdin"),
                *("--loss_function", "logistic", "--bit_precision", "18", *optimizer.split()),
            ],
            enable_logging=True,
        )
        workspace.finish()
    log = "\n".join(workspace.get_log())
    count, loss = (float(_reported(name, log)) for name in ("number of examples", "average loss"))
    assert count == len(late)
    share = late.mean()
    loss_of_share = -(share * np.log(share) + (1.0 - share) * np.log(1.0 - share))
    # Without scaling the distances make plain gradient descent diverge.
    assert optimizer or 0.0 < loss < loss_of_share, f"expected a loss below {loss_of_share}, given {loss}"
    return Trial({**watch.rates(len(late), "rows"), LOSS: loss})


def _reported(name: str, log: str) -> str:
    found = re.search(rf"^{name} = (\S+)$", log, re.MULTILINE)
    assert found, f"expected {name!r} in the log of Vowpal Wabbit, given {log!r}"
    return found[1]


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)
