"""The check itself: what users call."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import ConfigurationError
from streamiter.flow.flow import Flow, listed_items
from streamiter.flow.stream import Stream, connect
from streamiter.iteration.api import iterate_unbounded_streams
from streamiter.iteration.config import IterationBodyResult
from streamiter.iteration.stamping import epochs_every
from streamiter.models.update import ModelSnapshot
from streamiter.operators.operator import Context, Operator, OperatorFactory
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.records import Batch, OutputTag
from streamiter.runtime.graph import SINGLE_INPUT
from streamiter.testing.restore.child import restored_run
from streamiter.testing.restore.differences import (
    RestoreMismatch,
    describe,
    lost_attributes,
    state_difference,
    stream_difference,
)
from streamiter.testing.restore.driving import Cut, JobOutcome, RunOptions, run_freely, run_in_steps
from streamiter.testing.restore.process import RestoreProcess
from streamiter.testing.restore.trial import Build, BuiltFlow, SourceKey

__all__ = [
    "Comparison",
    "check_flow_restore",
    "check_restore",
]


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
    streamiter.testing.restore.differences.RestoreMismatch: check_restore(Forgetful), cut after record 1 ([1]), ...
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


_FREE_CUTS: Final = 8
"""Each of them runs the flow twice."""
_SHOWN: Final = 3
"""Attributes in a message."""


@dataclass(frozen=True)
class Comparison:
    """One check of one flow.

    Undisturbed, with snapshots, restored: the runs of one check, and what is compared of them.
    """

    what: str
    """What errors call it."""
    build: Build
    options: RunOptions
    cuts: int | None
    structs: Sequence[type[msgspec.Struct]]
    process: RestoreProcess | None
    """None: restore in this process."""
    free: bool = False
    """Whether cuts are turns of the event loop, not records."""
    ordered: bool = True
    compare_state: bool = True

    def run(self) -> None:
        """Raise RestoreMismatch where a restored run differs from the one that went on."""
        if self.process is not None:
            self._described()  # What cannot be imported there is told before anything runs.
        undisturbed = self._undisturbed()
        if self.free:
            for turns in self._chosen(range(1, undisturbed.turns), self.cuts or _FREE_CUTS):
                cut_off = asyncio.run(run_freely(self._built(), self.options, cut_after=turns))
                self._check_violations(cut_off)
                for cut in cut_off.cuts:
                    self._check_cut(cut, cut_off, undisturbed)
            return
        interrupted = asyncio.run(run_in_steps(self._built(), self.options, plan=undisturbed.plan, cuts=True))
        self._check_violations(interrupted)
        self._check_unharmed(undisturbed, interrupted)
        undisturbed.last_state = interrupted.last_state
        for cut in self._chosen(interrupted.cuts, self.cuts):
            self._check_cut(cut, interrupted, undisturbed)

    # -- runs ----------------------------------------------------------------------------------------------

    def _built(self) -> BuiltFlow:
        return BuiltFlow(self.build, self.structs, gated=not self.free)

    def _undisturbed(self) -> JobOutcome:
        run = run_freely if self.free else run_in_steps
        return asyncio.run(run(self._built(), self.options))

    def restored(self, cut: Cut, plan: list[SourceKey] | None) -> JobOutcome:
        """Go on from a cut, by the rest of the plan: elsewhere, or here."""
        options = RunOptions(self.options.seed, self.options.interval_s, cut.now_ms)
        if self.process is None:
            return restored_run(self.build, self.structs, options, cut.snapshot, plan)
        answer = self.process.ask(
            [ModelSnapshot, *self.structs],
            [describe(struct, "structs") for struct in (ModelSnapshot, *self.structs)],
            {
                "build": self._described(),
                "seed": options.seed,
                "interval_s": options.interval_s,
                "start_ms": options.start_ms,
                "snapshot": cut.snapshot,
                "plan": plan,
            },
        )
        if "error" in answer:
            raise self._mismatch(cut, f"the restored run failed: {answer['error']}", answer["trace"])
        return JobOutcome(**answer)

    def _described(self) -> tuple[Any, ...]:
        return describe(self.build, self.what)

    def _chosen(self, cuts: Sequence[Any], count: int | None) -> list[Any]:
        if count is None or count >= len(cuts):
            return list(cuts)
        places = random.Random(self.options.seed).sample(range(len(cuts)), count)  # noqa: S311 (no secret)
        return [cuts[place] for place in sorted(places)]

    # -- what is compared ------------------------------------------------------------------------------------

    def _check_violations(self, run: JobOutcome) -> None:
        if run.violations:
            raise RestoreMismatch(f"{self.what}: {run.violations[0]}")

    def _check_unharmed(self, undisturbed: JobOutcome, interrupted: JobOutcome) -> None:
        difference = self._difference(undisturbed, interrupted)
        if difference is None:
            return
        again = self._difference(undisturbed, self._undisturbed())
        if again is not None:
            raise RestoreMismatch(
                f"{self.what}: two runs from the beginning differ: {again}; take time from context.clock, randomness "
                "from a seed in the state, and keep nothing in modules or classes"
            )
        raise RestoreMismatch(
            f"{self.what}: with snapshots it gives other results than without: {difference}; snapshot() must "
            "only look"
        )

    def _check_cut(self, cut: Cut, before: JobOutcome, undisturbed: JobOutcome) -> None:
        plan = None if self.free else undisturbed.plan[cut.after :]
        restored = self.restored(cut, plan)
        if restored.violations:
            raise self._mismatch(cut, restored.violations[0])
        difference = self._full_difference(undisturbed, _joined(before, cut, restored))
        if difference is not None:
            raise self._mismatch(cut, difference, *self._reasons(cut, before, undisturbed, plan))

    def _full_difference(self, expected: JobOutcome, given: JobOutcome) -> str | None:
        """In what came out, then in the states at the end."""
        if difference := self._difference(expected, given):
            return difference
        if not self.compare_state:
            return None
        if self.free:
            return _final_difference(expected, given, self._plain)
        return state_difference(expected.last_state, given.last_state, self._plain)

    def _difference(self, expected: JobOutcome, given: JobOutcome) -> str | None:
        return stream_difference(
            expected.outputs, given.outputs, self._plain, ordered=self.ordered
        ) or stream_difference(expected.results, given.results, self._plain)

    @property
    def _plain(self) -> PlainData:
        return PlainData([ModelSnapshot, *self.structs])

    # -- what is told ----------------------------------------------------------------------------------------

    def _mismatch(self, cut: Cut, difference: str, *reasons: str) -> RestoreMismatch:
        where = "in a fresh process" if self.process is not None else "in the same process"
        return RestoreMismatch(
            "\n".join([f"{self.what}, cut {cut.place}, restored {where}: {difference}", *reasons])
        )

    def _reasons(
        self, cut: Cut, before: JobOutcome, undisturbed: JobOutcome, plan: list[SourceKey] | None
    ) -> list[str]:
        """Why it may be: attributes that were lost, or what only a fresh process shows."""
        reasons: list[str] = []
        if plan is not None:
            reasons += self._lost(cut, undisturbed)
        if self.process is not None:
            options = RunOptions(self.options.seed, self.options.interval_s, cut.now_ms)
            here = restored_run(self.build, self.structs, options, cut.snapshot, plan)
            if self._full_difference(undisturbed, _joined(before, cut, here)) is None:
                reasons.append(
                    "Restored in this process it is equal: something depends on the process, such as the order of a "
                    "set, hash(), id(), or what a module or class keeps; sort sets, and keep state in the operator."
                )
        if not reasons:
            reasons.append(
                "All that the operators keep is as it was: look for time that is not from context.clock (monotonic_s "
                "begins anew in each process), and for randomness without a seed in the state."
            )
        return reasons

    def _lost(self, cut: Cut, undisturbed: JobOutcome) -> list[str]:
        at_cut = asyncio.run(run_in_steps(self._built(), self.options, plan=undisturbed.plan, only=cut.after))
        options = RunOptions(self.options.seed, self.options.interval_s, cut.now_ms)
        after = asyncio.run(run_in_steps(self._built(), options, snapshot=cut.snapshot, plan=[], only=0))
        lost = lost_attributes(at_cut.attributes, after.attributes)
        if not lost:
            return []
        return [*lost[:_SHOWN], "Give what results depend on in snapshot(), and take it over in restore()."]


def _joined(before: JobOutcome, cut: Cut, restored: JobOutcome) -> JobOutcome:
    """What came out until the cut, then what came after it was restored."""
    outputs = {
        name: [*before.outputs[name][: cut.came_out[name]], *records]
        for name, records in restored.outputs.items()
    }
    return replace(restored, outputs=outputs)


def _final_difference(undisturbed: JobOutcome, restored: JobOutcome, plain_data: PlainData) -> str | None:
    for who, state in undisturbed.final_states.items():
        # What had ended before the cut is not begun again; it is in the snapshot.
        if who in restored.final_states and restored.final_states[who] != state:
            return f"final state of {who}: {state_difference(state, restored.final_states[who], plain_data)}"
    return None


class _Given(Source):
    """Brings records in batches of one size."""

    def __init__(self, records: Batch, batch: int) -> None:
        self._records = records
        self._batch = batch
        self._brought = 0

    def open(self, context: Context, positions: Positions | None) -> None:
        self._brought = (positions or {}).get("brought", 0)

    def read(self) -> SourceBatch | None:
        records = self._records[self._brought : self._brought + self._batch]
        if len(records) == 0:
            return None
        self._brought += len(records)
        return SourceBatch(records, {"brought": self._brought})


def source_flow(flow: Flow, *, factory: Callable[[], Source]) -> Stream:
    """A source alone.

    The flow around a single operator or source.
    """
    return flow.from_source(factory, name="source")


def operator_flow(
    flow: Flow,
    *,
    factory: OperatorFactory,
    name: str,
    inputs: Mapping[str, Batch],
    key: Callable[[Any], Any] | None,
    time_to_live_s: float | None,
    epochs: int | None,
    batch: int,
    tags: Sequence[str],
) -> dict[str, Stream]:
    """Sources of the records given, the operator behind them, in an iteration where there are epochs."""
    streams = {
        label: flow.from_source(_source_of(records, batch), name=label, parallelism=1)
        for label, records in inputs.items()
    }

    def outputs(given: dict[str, Stream]) -> dict[str, Stream]:
        handled = _handled(given, factory, name, key, time_to_live_s)
        return {"output": handled, **{tag: handled.side_output(OutputTag(tag)) for tag in tags}}

    if epochs is None:
        return outputs(streams)

    def body(
        variables: Sequence[Stream], data: Sequence[Stream]
    ) -> IterationBodyResult[Mapping[str, Stream]]:
        within = outputs(dict(zip(streams, data, strict=True)))
        return IterationBodyResult([variables[0].filter(_nothing)], within)

    stamped = [
        epochs_every(stream, records=epochs, name=f"epochs of {label}") for label, stream in streams.items()
    ]
    variable = flow.from_items([], name="no variable", parallelism=1)
    return iterate_unbounded_streams([variable], stamped, body)


def _handled(
    streams: dict[str, Stream],
    factory: OperatorFactory,
    name: str,
    key: Callable[[Any], Any] | None,
    time_to_live_s: float | None,
) -> Stream:
    if list(streams) != [SINGLE_INPUT]:
        return connect(**streams).process(factory, name=name, parallelism=1)
    [stream] = streams.values()
    if key is None:
        return stream.process(factory, name=name, parallelism=1)
    return stream.key_by(key).process(factory, name=name, parallelism=1, time_to_live_s=time_to_live_s)


def _source_of(records: Batch, batch: int) -> Callable[[], Source]:
    return lambda: _Given(records, batch)


def _nothing(record: Any) -> bool:
    return False
