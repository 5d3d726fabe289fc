"""The checks that users call, and the runs and comparisons of one check.

A check runs a flow undisturbed, then with snapshots, then restored from each snapshot (*cut*), and compares the outputs
and the last states. ``check_restore`` builds the flow around a single operator or source; ``check_flow_restore`` takes
a function that builds it.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

import msgspec

from streamiter.engine.graph.graph import SINGLE_INPUT
from streamiter.errors import ConfigurationError
from streamiter.flow.flow import Flow, connect, listed_items
from streamiter.flow.stream import Stream
from streamiter.iteration.api import iterate_unbounded_streams
from streamiter.iteration.config import IterationBodyResult
from streamiter.iteration.stamping import epochs_every
from streamiter.models.update import ModelSnapshot
from streamiter.operators.operator import Context, Operator, OperatorFactory
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.testing.restore.differences import RestoreMismatch, lost_attributes, state_difference, stream_difference
from streamiter.testing.restore.driving import (
    Build,
    BuiltFlow,
    Cut,
    JobOutcome,
    RunSettings,
    SourceKey,
    run_freely,
    run_in_steps,
)
from streamiter.testing.restore.process import RestoreProcess, restored_run
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.clock import is_in_event_loop
from streamiter.values.helpers.importing import describe, imported
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Batch, OutputTag
from streamiter.values.times import Seconds, in_seconds

Factory = Callable[[], Operator] | Callable[[], Source] | str
"""An operator or source class, a callable that makes one, or the ``"module:name"`` of such."""


def check_restore(
    factory: Factory,
    records: Batch | Mapping[str, Batch] | None = None,
    *,
    key: Callable[[Any], Any] | None = None,
    time_to_live_s: Seconds | None = None,
    epochs: int | None = None,
    tags: Sequence[str | OutputTag] = (),
    batch: int = 1,
    interval_s: Seconds = 1.0,
    cuts: int | None = None,
    seed: int = 0,
    compare: Literal["all", "outputs"] = "all",
    structs: Sequence[type[msgspec.Struct]] = (),
    fresh_process: bool = True,
    process: RestoreProcess | None = None,
) -> None:
    """Check that an operator or source restored from any snapshot continues exactly as one that was never stopped.

    The check runs a flow several times: undisturbed; with two snapshots after each batch; and from each snapshot, in a
    fresh process, to the end. Outputs and the last state must be equal in type, order and bits. The check also raises
    an error if a state is not plain data, if ``snapshot`` changes the operator, or if the operator later changes a
    state that ``snapshot`` returned or ``restore`` received.

    - ``factory``: as for ``stream.process`` (for a source: ``flow.from_source``), or its name as ``"module:name"``.
    - ``records``: the records of its input, a list, array or ``Columns``. For named inputs: a mapping of name to
      records; ``seed`` decides the order in which the inputs read. None for a source. Records are plain data.
    - ``key``: if given, the operator runs behind ``key_by(key)``, with ``time_to_live_s``.
    - ``epochs``: if given, the operator runs in an iteration, with this many records in an epoch, so that its callbacks
      are called. An ``IterationListener`` needs it.
    - ``tags``: side outputs to compare.
    - ``batch``: the records of one batch; after each batch ``interval_s`` seconds pass on a virtual clock.
    - ``cuts``: from how many of the snapshots to restore, drawn by ``seed``; None: from all.
    - ``compare``: ``"outputs"`` compares outputs only, for states whose bytes differ though they are the same, such as
      a pickled model.
    - ``structs``: classes that count as plain data.
    - ``fresh_process``: restore in another interpreter, where sets have another order. The interpreter must be able to
      import the factory: a class or function at the top level of a module, or ``functools.partial`` of one. False:
      restore in this process, which finds fewer faults.
    - ``process``: a :class:`RestoreProcess` that several checks share; None: one for this check.

    Do not call it in an event loop. Raises :class:`RestoreMismatch` (an AssertionError), which says the difference and
    where the run was cut; ConfigurationError for a factory that cannot be imported.

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
        options=RunSettings(seed, _positive(interval_s)),
        cuts=cuts,
        compare_state=compare == "all",
        compare_snapshots=compare == "all",
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
    interval_s: Seconds = 1.0,
    seed: int = 0,
    structs: Sequence[type[msgspec.Struct]] = (),
    fresh_process: bool = True,
    process: RestoreProcess | None = None,
) -> None:
    """Check, as :func:`check_restore` does, a part of a flow: sources, several steps, a loop.

    ``build(flow)`` adds sources and steps, and returns the streams to compare: one, or several by name. A value of the
    mapping may also be a callable; its result is compared after the run. All inputs must be bounded.

    ``cut_at="records"`` lets one source read one batch at a time, and cuts after all its records are handled.
    ``cut_at="turns"`` lets the flow run freely, and cuts after some turns of the event loop, during any step: for
    iterations that continue after the input has ended. ``cuts`` is the number of cuts (None: all; with turns, 8).
    ``ordered=False`` is for outputs without a fixed order. ``compare_state=False`` compares outputs only: for states
    whose form depends on the times of snapshots. The other options are those of :func:`check_restore`.

    >>> def running_maximum(flow):
    ...     return flow.from_items([3, 1, 4]).key_by(lambda x: 0).reduce(max)
    >>> check_flow_restore(running_maximum, cut_at="turns", cuts=2, fresh_process=False)
    """
    given: Build = _named(build)
    _check(
        f"check_flow_restore({_name_of(given)})",
        given,
        options=RunSettings(seed, _positive(interval_s)),
        cuts=cuts,
        free=cut_at == "turns",
        ordered=ordered,
        compare_state=compare_state,
        structs=structs,
        fresh_process=fresh_process,
        process=process,
    )


def _check(what: str, build: Build, *, fresh_process: bool, process: RestoreProcess | None, **settings: Any) -> None:
    if is_in_event_loop():
        raise ConfigurationError(f"{what}: expected no running event loop, given one; call it from a plain function")
    if not fresh_process:
        Comparison(what, build, process=None, **settings).run()
    elif process is not None:
        Comparison(what, build, process=process, **settings).run()
    else:
        with RestoreProcess() as own:
            Comparison(what, build, process=own, **settings).run()


def _named(factory: Any) -> Any:
    """Return the object that ``"module:name"`` names; return any other argument as it is."""
    return imported(factory, "check_restore", "a factory") if isinstance(factory, str) else factory


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
    return {name: listed_items(f"check_restore(records=): input {name!r}", batch) for name, batch in inputs.items()}


def _positive(given: Seconds) -> float:
    interval_s = in_seconds(given)
    if not interval_s > 0:
        raise ConfigurationError(
            f"check_restore(interval_s=): expected seconds above 0, given {interval_s!r}; otherwise timers never fire"
        )
    return interval_s


T = TypeVar("T")

_FREE_CUTS: Final = 8
"""Cuts at turns of the event loop; each of them runs the flow twice."""
_SHOWN_MAX: Final = 3
"""The most attributes in a message."""


@dataclass(frozen=True)
class Comparison:
    """The runs of one check of one flow: undisturbed, with snapshots, restored; and their comparison."""

    what: str
    """The name of the check in errors."""
    build: Build
    """Adds the steps under test to a flow."""
    options: RunSettings
    """The settings of all runs."""
    cuts: int | None
    """The number of cuts to restore from; None: all."""
    structs: Sequence[type[msgspec.Struct]]
    """Classes that count as plain data."""
    process: RestoreProcess | None
    """None: restore in this process."""
    free: bool = False
    """Whether cuts are turns of the event loop, not records."""
    ordered: bool = True
    """Whether the order of the outputs is compared."""
    compare_state: bool = True
    """Whether the last states are compared."""
    compare_snapshots: bool = True
    """Whether two snapshots between which nothing happened are compared."""

    def run(self) -> None:
        """Raise RestoreMismatch if a restored run differs from the undisturbed run."""
        if self.process is not None:
            _described(self.build, self.what)  # What cannot be imported there is an error before anything runs.
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
        return BuiltFlow(self.build, self.structs, gated=not self.free, compare_snapshots=self.compare_snapshots)

    def _undisturbed(self) -> JobOutcome:
        run = run_freely if self.free else run_in_steps
        return asyncio.run(run(self._built(), self.options))

    def restored(self, cut: Cut, plan: list[SourceKey] | None) -> JobOutcome:
        """Restore from a cut, and run by the rest of the plan, in the fresh process or in this one."""
        options = RunSettings(self.options.seed, self.options.interval_s, cut.now_ms)
        if self.process is None:
            return restored_run(self.build, self.structs, options, cut.snapshot, plan)
        answer = self.process.ask(
            [ModelSnapshot, *self.structs],
            [_described(struct, "structs") for struct in (ModelSnapshot, *self.structs)],
            {
                "build": _described(self.build, self.what),
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

    def _chosen(self, cuts: Sequence[T], count: int | None) -> list[T]:
        if count is None or count >= len(cuts):
            return list(cuts)
        places = random.Random(self.options.seed).sample(range(len(cuts)), count)  # noqa: S311 (no secret)
        return [cuts[place] for place in sorted(places)]

    # -- comparisons -----------------------------------------------------------------------------------------

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
                f"{self.what}: two runs from the beginning differ: {again}; take time from context.clock, random "
                "numbers from a seed in the state, and keep no state in modules or classes"
            )
        raise RestoreMismatch(
            f"{self.what}: with snapshots it gives other results than without: {difference}; snapshot() must only look"
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
        """Return the first difference of the outputs, then of the last states."""
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

    # -- messages --------------------------------------------------------------------------------------------

    def _mismatch(self, cut: Cut, difference: str, *reasons: str) -> RestoreMismatch:
        where = "in a fresh process" if self.process is not None else "in the same process"
        return RestoreMismatch("\n".join([f"{self.what}, cut {cut.place}, restored {where}: {difference}", *reasons]))

    def _reasons(
        self, cut: Cut, before: JobOutcome, undisturbed: JobOutcome, plan: list[SourceKey] | None
    ) -> list[str]:
        """Return possible reasons: lost attributes, or a dependence on the process."""
        reasons: list[str] = []
        if plan is not None:
            reasons += self._lost(cut, undisturbed)
        if self.process is not None:
            options = RunSettings(self.options.seed, self.options.interval_s, cut.now_ms)
            here = restored_run(self.build, self.structs, options, cut.snapshot, plan)
            if self._full_difference(undisturbed, _joined(before, cut, here)) is None:
                reasons.append(
                    "Restored in this process it is equal: something depends on the process, such as the order of a "
                    "set, hash(), id(), or the state of a module or class; sort sets, and keep state in the operator."
                )
        if not reasons:
            reasons.append(
                "All attributes of the operators are as they were: look for time that is not from context.clock "
                "(monotonic_s starts at 0 in each process), and for random numbers without a seed in the state."
            )
        return reasons

    def _lost(self, cut: Cut, undisturbed: JobOutcome) -> list[str]:
        at_cut = asyncio.run(run_in_steps(self._built(), self.options, plan=undisturbed.plan, only=cut.after))
        options = RunSettings(self.options.seed, self.options.interval_s, cut.now_ms)
        after = asyncio.run(run_in_steps(self._built(), options, snapshot=cut.snapshot, plan=[], only=0))
        lost = lost_attributes(at_cut.attributes, after.attributes)
        if not lost:
            return []
        return [*lost[:_SHOWN_MAX], "Return all that results depend on in snapshot(), and restore it in restore()."]


def _joined(before: JobOutcome, cut: Cut, restored: JobOutcome) -> JobOutcome:
    """Return the outputs before the cut, followed by those of the restored run."""
    outputs = {
        name: [*before.outputs[name][: cut.came_out[name]], *records] for name, records in restored.outputs.items()
    }
    return replace(restored, outputs=outputs)


def _final_difference(undisturbed: JobOutcome, restored: JobOutcome, plain_data: PlainData) -> str | None:
    for who, state in undisturbed.final_states.items():
        # An operator that had ended before the cut is not started again; its state is in the snapshot.
        if who in restored.final_states and restored.final_states[who] != state:
            return f"final state of {who}: {state_difference(state, restored.final_states[who], plain_data)}"
    return None


class _ListSource(Source):
    """A source of given records, in batches of one size."""

    def __init__(self, records: Batch, batch: int) -> None:
        self._records = records
        self._batch = batch
        self._read_records = 0

    def open(self, context: Context, positions: Positions | None) -> None:
        self._read_records = (positions or {}).get("brought", 0)

    def read(self) -> SourceBatch | None:
        records = self._records[self._read_records : self._read_records + self._batch]
        if len(records) == 0:
            return None
        self._read_records += len(records)
        return SourceBatch(records, {"brought": self._read_records})


def source_flow(flow: Flow, *, factory: Callable[[], Source]) -> Stream:
    """Build the flow around a single source."""
    return flow.from_source(factory, name="source")


def operator_flow(
    flow: Flow,
    *,
    factory: OperatorFactory,
    name: str,
    inputs: Mapping[str, Batch],
    key: Callable[[Any], Any] | None,
    time_to_live_s: Seconds | None,
    epochs: int | None,
    batch: int,
    tags: Sequence[str],
) -> dict[str, Stream]:
    """Build the flow around a single operator: sources of the records, and an iteration if there are epochs."""
    streams = {
        label: flow.from_source(functools.partial(_ListSource, records, batch), name=label, parallelism=1)
        for label, records in inputs.items()
    }

    def outputs(given: dict[str, Stream]) -> dict[str, Stream]:
        handled = _handled(given, factory, name, key, time_to_live_s)
        return {"output": handled, **{tag: handled.side_output(OutputTag(tag)) for tag in tags}}

    if epochs is None:
        return outputs(streams)

    def body(variables: Sequence[Stream], data: Sequence[Stream]) -> IterationBodyResult[Mapping[str, Stream]]:
        within = outputs(dict(zip(streams, data, strict=True)))
        return IterationBodyResult([variables[0].filter(_nothing)], within)

    stamped = [epochs_every(stream, records=epochs, name=f"epochs of {label}") for label, stream in streams.items()]
    variable: Stream = flow.from_items([], name="no variable", parallelism=1)
    return iterate_unbounded_streams([variable], stamped, body)


def _handled(
    streams: dict[str, Stream],
    factory: OperatorFactory,
    name: str,
    key: Callable[[Any], Any] | None,
    time_to_live_s: Seconds | None,
) -> Stream:
    if list(streams) != [SINGLE_INPUT]:
        return connect(**streams).process(factory, name=name, parallelism=1)
    [stream] = streams.values()
    if key is None:
        return stream.process(factory, name=name, parallelism=1)
    return stream.key_by(key).process(factory, name=name, parallelism=1, time_to_live_s=time_to_live_s)


def _nothing(record: Any) -> bool:
    return False


def _described(value: object, what: str) -> tuple[PlainValue, ...]:
    try:
        return describe(value, what)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; or pass fresh_process=False") from None
