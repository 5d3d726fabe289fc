"""The check itself: what users call."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from streamiter.errors import ConfigurationError
from streamiter.flow.flow import listed_items
from streamiter.operators.operator import Operator
from streamiter.operators.source import Source
from streamiter.records import Batch, OutputTag
from streamiter.runtime.graph import SINGLE_INPUT
from streamiter.testing.restore.comparison import Comparison
from streamiter.testing.restore.driver import RunOptions
from streamiter.testing.restore.operator_flow import operator_flow, source_flow
from streamiter.testing.restore.process import RestoreProcess
from streamiter.testing.restore.trial import Build

__all__ = ["check_flow_restore", "check_restore"]

Factory = Callable[[], Operator] | Callable[[], Source] | str
"""An operator or source class, a callable that makes one, or such as ``"module:name"``."""


def check_restore(
    factory: Factory,
    records: Batch | Mapping[str, Batch] | None = None,
    *,
    key: Callable[[Any], Any] | None = None,
    time_to_live_s: float | None = None,
    epochs: int | None = None,
    tags: Sequence[str | OutputTag] = (),
    batch: int = 1,
    interval_s: float = 1.0,
    cuts: int | None = None,
    seed: int = 0,
    structs: Sequence[type[msgspec.Struct]] = (),
    fresh_process: bool = True,
    process: RestoreProcess | None = None,
) -> None:
    """Check that an operator (or source) restored from any snapshot goes on as if nothing had happened, bit for bit.

    It is run in a flow of the engine three times: undisturbed; with two snapshots after each batch; and from
    each of these in a fresh process, to the end. What comes out must be the same in type, order and bits, and so
    must the last state. On the way: states are plain data, ``snapshot`` only looks, what it gave does not
    change afterwards, nor does what ``restore`` was given.

    - ``factory``: as for ``stream.process`` (``flow.from_source``), or its name as ``"module:name"``.
    - ``records``: those of its one input, a list, array or ``Columns``; for named inputs a mapping with
      those of each, which take turns as ``seed`` decides; None for a source. Plain data.
    - ``key``: behind ``key_by(key)``, with ``time_to_live_s``.
    - ``epochs``: within an iteration, an epoch each so many records: its listener's callbacks come. An
      ``IterationListener`` needs it.
    - ``tags``: side outputs that are compared, too.
    - ``batch``: records handed over at once; after each batch ``interval_s`` seconds pass on a virtual clock.
    - ``cuts``: from how many of the snapshots to restore, drawn by ``seed``; None: from all.
    - ``structs``: classes that count as plain data.
    - ``fresh_process``: restore in another interpreter, with another order of sets. What it runs must be
      importable there: classes and functions at the top level of a module, or ``functools.partial`` of such. False:
      restore in this one, which finds less.
    - ``process``: a :class:`RestoreProcess` that several checks share; None: one for this check.

    Not to be called in an event loop. Raises :class:`RestoreMismatch` (an AssertionError) that says what differs and
    where the run was cut; ConfigurationError for what cannot be imported.

    >>> from streamiter import Operator
    >>> class Total(Operator):
    ...     def __init__(self):
    ...         self.total = 0
    ...     def process(self, record, out):
    ...         self.total += record
    ...         out.emit(self.total)
    ...     def snapshot(self):
    ...         return self.total
    ...     def restore(self, state):
    ...         self.total = state
    >>> check_restore(Total, [1, 2, 3], fresh_process=False)
    >>> class Forgetful(Total):
    ...     def snapshot(self):
    ...         return None
    ...     def restore(self, state):
    ...         pass
    >>> check_restore(Forgetful, [1, 2], fresh_process=False)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    streamiter.testing.restore.diagnosis.RestoreMismatch: check_restore(Forgetful), cut after record 1 ([1]), ...
    """
    make: Any = _named(factory)
    made = make()
    if isinstance(made, Source):
        build: Build = functools.partial(source_flow, factory=make)
    else:
        build = functools.partial(
            operator_flow,
            factory=make,
            name=type(made).__name__,
            inputs=_inputs(records),
            key=key,
            time_to_live_s=time_to_live_s,
            epochs=epochs,
            batch=batch,
            tags=[tag if isinstance(tag, str) else tag.name for tag in tags],
        )
    _check(
        f"check_restore({type(made).__name__})",
        build,
        options=RunOptions(seed, _positive(interval_s)),
        cuts=cuts,
        structs=structs,
        fresh_process=fresh_process,
        process=process,
    )


def check_flow_restore(
    build: Build | str,
    *,
    cut_at: Literal["records", "turns"] = "records",
    cuts: int | None = None,
    ordered: bool = True,
    compare_state: bool = True,
    interval_s: float = 1.0,
    seed: int = 0,
    structs: Sequence[type[msgspec.Struct]] = (),
    fresh_process: bool = True,
    process: RestoreProcess | None = None,
) -> None:
    """The same for a part of a flow: sources, several steps, a loop.

    ``build(flow)`` adds sources and steps, and returns the streams to compare: one, or several by name. By name it
    may also give a callable, whose result is compared when the flow has run. Its inputs are bounded.

    ``cut_at``: ``"records"`` lets one source read one batch at a time and cuts when all of it has been handled.
    ``"turns"`` lets the flow run as it likes, and cuts after some turns of the event loop, in the middle of whatever
    it does: for iterations that go on when the input has ended. ``cuts`` is how many, 8 there unless given.
    ``ordered=False`` compares outputs whose order is not given, ``compare_state=False`` outputs only: where the form of
    a state depends on when snapshots were taken. The others are those of :func:`check_restore`.

    >>> def running_maximum(flow):
    ...     return flow.from_items([3, 1, 4]).key_by(lambda x: 0).reduce(max)
    >>> check_flow_restore(running_maximum, cut_at="turns", cuts=2, fresh_process=False)
    """
    given: Build = _named(build)
    _check(
        f"check_flow_restore({_name_of(given)})",
        given,
        options=RunOptions(seed, _positive(interval_s)),
        cuts=cuts,
        free=cut_at == "turns",
        ordered=ordered,
        compare_state=compare_state,
        structs=structs,
        fresh_process=fresh_process,
        process=process,
    )


def _check(
    what: str,
    build: Build,
    *,
    fresh_process: bool,
    process: RestoreProcess | None,
    **settings: Any,
) -> None:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise ConfigurationError(
            f"{what}: expected no running event loop, given one; call it from a plain function"
        )
    if not fresh_process:
        Comparison(what, build, process=None, **settings).run()
    elif process is not None:
        Comparison(what, build, process=process, **settings).run()
    else:
        with RestoreProcess() as own:
            Comparison(what, build, process=own, **settings).run()


def _named(factory: Any) -> Any:
    """What is named as ``"module:name"``; anything else as it is."""
    if not isinstance(factory, str):
        return factory
    module, colon, name = factory.partition(":")
    if not colon:
        raise ConfigurationError(
            f'check_restore: expected a factory or its name as "module:name", given {factory!r}'
        )
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _name_of(build: Any) -> str:
    function = build.func if isinstance(build, functools.partial) else build
    return str(getattr(function, "__name__", type(function).__name__))


def _inputs(records: Any) -> dict[str, Batch]:
    if records is None:
        raise ConfigurationError(
            "check_restore(records=): expected the records of the operator's input, given none; give a list, or a "
            "mapping of them by the names of its inputs"
        )
    inputs = dict(records) if isinstance(records, Mapping) else {SINGLE_INPUT: records}
    return {
        name: listed_items(f"check_restore(records=): input {name!r}", batch)
        for name, batch in inputs.items()
    }


def _positive(interval_s: float) -> float:
    if not interval_s > 0:
        raise ConfigurationError(
            f"check_restore(interval_s=): expected seconds above 0, given {interval_s!r}; without any, timers never "
            "come"
        )
    return interval_s
