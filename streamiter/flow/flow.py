"""The Flow: where streams begin, and where a job starts.

Behind the class are ``connect``, which brings several streams to one step, and the functions that algorithms made of
several steps share: ``all_or_nothing``, ``step_names`` and checks of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, Unpack, overload

import numpy as np

from streamiter.engine.graph.graph import Step
from streamiter.errors import ConfigurationError, GraphError, no_attribute, shortened, user_line
from streamiter.flow.building import (
    FlowUnderConstruction,
    add_dead_letters,
    add_operator,
    check_same_flow,
    factory_label,
    register_struct_of,
)
from streamiter.flow.graph_checks import (
    check_checkpoints,
    check_codec,
    check_count,
    check_factory,
    check_input_names,
    check_name,
    check_policy,
    check_source_start,
    check_stop,
    check_topic,
    checked_steps,
)
from streamiter.flow.keyed_joins import add_keyed_operator, has_record_keys
from streamiter.flow.keyed_stream import KeyedStream
from streamiter.flow.options import ProcessOptions, RunOptions, SourceOptions, StepOptions, check_step_options
from streamiter.flow.stream import Stream
from streamiter.operators.operator import OperatorFactory
from streamiter.operators.output import RejectionPolicy
from streamiter.operators.source import ItemsSource, Source, SourceFactory
from streamiter.operators.steps import Identity
from streamiter.topics.formats import Json, Text, Typed
from streamiter.topics.source_and_sink import DecodeValues, TopicSource
from streamiter.topics.topic import Decoder, SourceStart, StartPosition, StopPosition, Topic
from streamiter.values.helpers.clock import is_in_event_loop
from streamiter.values.records import Batch, Columns, rows_of_table
from streamiter.values.sparse_rows import SparseRows, is_scipy_sparse
from streamiter.values.tables import ArrowTable
from streamiter.values.times import Seconds, in_seconds

if TYPE_CHECKING:
    from streamiter.engine.graph.statistics import JobStatistics
    from streamiter.engine.job.job import Job
    from streamiter.engine.job.running import OnInterrupt, WhileRunning
    from streamiter.flow.drawing.formats import DrawingFormat


class Flow(FlowUnderConstruction):
    """A graph of sources, steps and sinks that is built step by step, and then run.

    ``name`` identifies the flow in logs, checkpoints and transactions. ``parallelism`` is the default number of
    subtasks of a source, and of a step behind a repartitioned stream. ``state`` is where the states of keys are kept:
    by default in memory; ``RocksState("folder")`` keeps them on disk, more of them than there is memory for.

    >>> flow = Flow("squares")
    >>> squares = flow.from_items([1, 2, 3]).map(lambda x: x * x).collect()
    >>> statistics = flow.run()
    >>> squares.items, statistics.state
    ([1, 4, 9], 'finished')
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(f"{type(self).__name__!r} object", name, dir(type(self)))

    # -- sources ---------------------------------------------------------------------------------------

    @overload
    def source(self, topic: Topic, *, decode: Typed[T], **options: Unpack[SourceOptions]) -> Stream[T]: ...

    @overload
    def source(self, topic: Topic, *, decode: Text, **options: Unpack[SourceOptions]) -> Stream[str]: ...

    @overload
    def source(
        self, topic: Topic, *, decode: Decoder | None = None, **options: Unpack[SourceOptions]
    ) -> Stream[Any]: ...

    def source(
        self,
        topic: Topic,
        *,
        decode: Decoder | None = None,
        start: SourceStart | None = None,
        first_start: StartPosition | None = None,
        stop: StopPosition = None,
        on_lost: Literal["fail", "skip"] = "fail",
        **options: Unpack[StepOptions],
    ) -> Stream:
        """Read a topic, which must exist; partition p goes to subtask p mod the parallelism.

        ``decode`` reads the values; the default is ``Json()``, or what the topic prefers (a CSV file does). Values
        that it cannot read follow ``on_error`` or go to the topic ``dead_letter``, see :class:`~streamiter.Stream`.

        ``start`` is ``"earliest"`` (the default), ``"latest"``, an offset for each partition (``{0: 1200}``; the others
        begin at their earliest record), or an aware datetime. A job that resumes from a checkpoint ignores it.
        ``"committed"`` is for jobs without state, which need no store of checkpoints: the job commits the positions of
        the source, together with its outputs, to the consumer group ``streamiter-`` and the flow's name, and the next
        run resumes there. The first run begins at ``first_start``, by default the earliest record.
        ``stop``: None never stops. ``"latest"`` stops where the topic ends when the job starts; offsets stop before the
        offset of each partition (the others are not read). Then the stream is bounded. ``on_lost="skip"``: where
        retention has deleted records that were not read, the source warns and reads on behind them; it begins at
        ``start`` if its positions are of another topic. By default both are errors.

        >>> from streamiter import topic
        >>> flow = Flow("yesterday")
        >>> flow.source(topic("memory://clicks"), stop="latest").is_bounded
        True
        """
        check_topic("flow.source", topic, 'flow.source(topic("scheme://…"))')
        check_step_options("source", options)
        name, dead_letter = options.get("name"), options.get("dead_letter")
        label = name or topic.name
        decoder = decode if decode is not None else (topic.default_decoder() or Json())
        check_codec(decoder, "decode", step=label)
        check_source_start(topic, start, first_start, step=label)
        check_stop(stop, step=label)
        policy = check_policy(options.get("on_error", "fail"), dead_letter, step=label)
        bounded, first = stop is not None or getattr(topic, "bounded", False), first_start or "earliest"
        with self.graph.all_or_nothing():
            register_struct_of(self, decoder)
            stream = self._add_source(
                label,
                name,
                lambda: TopicSource(topic, start, stop, decoder, first_start=first, on_lost=on_lost),
                operator=lambda: DecodeValues(topic, decoder),
                parallelism=options.get("parallelism"),
                bounded=bounded,
                policy=policy,
                label_lasts=True,
                topic=topic,
            )
            if dead_letter is not None:
                [step] = stream.steps
                add_dead_letters(self, step, dead_letter)
        return stream

    @overload
    def from_items(
        self, items: ArrowTable, *, name: str | None = None, parallelism: int | None = None
    ) -> Stream[Any]: ...

    @overload
    def from_items(
        self, items: Iterable[T], *, name: str | None = None, parallelism: int | None = None
    ) -> Stream[T]: ...

    def from_items(
        self, items: Iterable[Any] | ArrowTable, *, name: str | None = None, parallelism: int | None = None
    ) -> Stream[Any]:
        """Return a bounded stream of these items; with n subtasks item i goes to subtask i mod n.

        Arrays (first axis = record) and ``Columns`` are used as they are; any other iterable is listed now. The items
        of a table of pandas, polars or Arrow are its rows, as ``Columns``; the names of its columns must be texts, and
        the index of pandas is left out (``….reset_index()`` makes a column of it). The items of a ``Series`` are its
        values; those of a sparse matrix of scipy are pairs ``(indices, values)``. Missing numbers become NaN, other
        missing values None; :mod:`streamiter.values.tables` describes each type.

        Raises GraphError for a mapping, a text, any other table and columns that are not plain data.

        >>> flow = Flow("items")
        >>> items = flow.from_items(number * number for number in range(4)).collect()
        >>> flow.run().state, items.items
        ('finished', [0, 1, 4, 9])
        """
        batch = listed_items("from_items", items)
        return self._add_source(
            name or "items", name, lambda: ItemsSource(batch), operator=Identity, parallelism=parallelism, bounded=True
        )

    def from_source(self, source: SourceFactory, *, name: str | None = None, parallelism: int | None = None) -> Stream:
        """Return a stream of your own :class:`~streamiter.operators.Source`: its class, or a callable that makes one.

        The attribute ``bounded`` of the class or callable says whether the source ends; a callable without it counts as
        bounded.

        >>> from streamiter.operators import Source, SourceBatch
        >>> class Countdown(Source):
        ...     def open(self, context, positions):
        ...         self.left = (positions or {}).get("left", 3)
        ...     def read(self):
        ...         self.left -= 1
        ...         return None if self.left < 0 else SourceBatch([self.left], {"left": self.left})
        >>> flow = Flow("countdown")
        >>> numbers = flow.from_source(Countdown).collect()
        >>> flow.run().state, numbers.items
        ('finished', [2, 1, 0])
        """
        label = name or str(getattr(source, "__name__", "source"))
        check_factory(source, [], step=label, base=Source)
        return self._add_source(
            label,
            name,
            source,
            operator=Identity,
            parallelism=parallelism,
            bounded=bool(getattr(source, "bounded", Source.bounded)),
        )

    def _add_source(
        self,
        label: str,
        name: str | None,
        source: SourceFactory,
        *,
        operator: OperatorFactory,
        parallelism: int | None,
        bounded: bool,
        policy: RejectionPolicy = "fail",
        label_lasts: bool = False,
        topic: Topic | None = None,
    ) -> Stream:
        check_name(name)
        if self.graph.loop is not None:
            raise GraphError(
                f"step {label!r}: expected no sources inside an iteration body, given one; make it outside "
                "and pass its stream as a data stream"
            )
        parallelism = check_count(self.parallelism if parallelism is None else parallelism, "parallelism", step=label)
        step = Step(
            name=label,
            parallelism=parallelism,
            where=user_line(),
            factory=operator,
            source=source,
            policy=policy,
            bounded=bounded,
            topic=topic,
            shape="source",
        )
        return Stream(self, self.graph.add_step(step, is_named=name is not None, label_lasts=label_lasts))

    # -- running ---------------------------------------------------------------------------------------

    def run(
        self, *, on: Processes | None = None, on_interrupt: OnInterrupt = "suspend", **options: Unpack[RunOptions]
    ) -> JobStatistics:
        """Run the flow to its end, in an event loop of its own (uvloop), and return the final statistics.

        The options are those of :meth:`start`. ``on_interrupt`` is the reaction to SIGTERM and Ctrl-C:

        - ``"suspend"``: sources stop reading, and records that were read are handled, except records that a step does
          not want yet, such as mini-batches that wait for their model. Steps are not told of an end, so they do not
          emit final results. With ``checkpoints`` the next run resumes from here with these records; without
          checkpoints they are lost.
        - ``"drain"``: the inputs end here, and a bounded iteration ends with the current epoch. Steps are told of the
          end. So the result so far is emitted, such as the result of ``last_round``, and the job is ``finished``.

        ``on`` runs the flow in several processes, such as :class:`~streamiter.LocalProcesses`: each imports the program
        of the flow. So ``run`` must be behind ``if __name__ == "__main__":``, and the options must be plain data.

        A second signal aborts the job, and a third one raises KeyboardInterrupt, also within a step that does not
        return. A signal that is ignored stays ignored; a shell ignores SIGINT for a program that a script starts with
        ``&``.

        Raises JobFailed if a step failed. If a transaction was open for longer than its timeout, because a server or
        the machine did not respond, no step has failed: the job restarts from its last checkpoint.
        """
        _check_not_imported(self.name)
        if is_in_event_loop():
            raise GraphError(
                f"flow {self.name!r}: run() expected no running event loop, given one; "
                "write: job = await flow.start(); await job.wait()"
            )
        self._check_complete("run")
        # Imported here, as in start.
        from streamiter.engine.job.running import (
            check_on_interrupt,
            run_in_own_loop,
            run_jobs,
            saying_what_is_kept,
            without_figures,
        )

        check_on_interrupt(self.name, on_interrupt)
        if "changed_steps" in options:  # Also given to the job that restarts.
            options["changed_steps"] = checked_steps(self.name, options["changed_steps"])
        check_checkpoints(self.name, options)
        if on is not None:
            if not hasattr(on, "_run_flow"):
                raise ConfigurationError(
                    f"flow {self.name!r}: run() expected on= to be LocalProcesses(…) or Ray(…), given {shortened(on)}; "
                    "write on=LocalProcesses(4) for four processes"
                )
            running = on._run_flow(self, options, on_interrupt, without_figures)
        else:
            running = run_jobs(self.start, options, first=on_interrupt)
        return saying_what_is_kept(self.name, run_in_own_loop(running))

    async def start(self, *, on: None = None, **options: Unpack[RunOptions]) -> Job:
        """Start the job in the running event loop; return when every step is open.

        ``clock`` gives the time, and ``new_id`` the names of the job's runs (random by default). If input makes no
        progress for ``stall_after_s`` seconds (default 60), the blocked step is logged. ``on_rejected`` is called with
        a ``DeadLetter`` for each record that a step refuses and survives. ``snapshot`` is the result of
        ``await job.snapshot()`` of this flow: the job resumes there, whatever the job of the snapshot did afterwards.

        With ``checkpoints`` the job survives crashes: it resumes from the last committed checkpoint of this flow, and
        its output to topics with transactions becomes readable with the next checkpoint, exactly once. Steps with
        state need a ``name=``. ``restore`` chooses the checkpoint: ``"last"`` (without any checkpoint a fresh start),
        the number of a checkpoint, or None for a fresh start. The state of ``changed_steps`` is dropped or initial; any
        other step that was added or removed is an error. ``on_restore(number)`` is called before the chosen checkpoint
        is read. See :class:`~streamiter.Checkpoints`. A job without state whose sources have ``start="committed"``
        needs no store: ``checkpoints=Checkpoints(interval_s=1)`` sets how often it commits, by default every 10 s.

        Raises JobFailed if a step cannot be opened.
        """
        self._check_complete("start")
        # Imported here: the modules that run a job are a fifth of the import time of this package, and a program that
        # only builds or draws a flow does not need them.
        from streamiter.engine.checkpointing.restore import check_restore_option
        from streamiter.engine.job.running import job_of
        from streamiter.engine.plan.job_settings import JobOptions

        if on is not None:
            raise ConfigurationError(
                f"flow {self.name!r}: start() expected no on=, given {on!r}; processes are started by run(): "
                "await asyncio.to_thread(flow.run, on=…)"
            )
        check_step_options("start", options, RunOptions)
        check_checkpoints(self.name, options)
        given: dict[str, Any] = {name: in_seconds(option) for name, option in options.items() if option is not None}
        restore, snapshot = options.get("restore", "last"), given.pop("snapshot", None)
        check_restore_option(self.name, restore)
        given["restore"] = restore
        given["changed_steps"] = checked_steps(self.name, given.get("changed_steps", ()))
        job = job_of(self, JobOptions(**given))
        await job.start(snapshot)
        return job

    def _check_complete(self, method: str) -> None:
        if self.graph.loop is not None:
            raise GraphError(
                f"flow {self.name!r}: {method}() expected a flow whose iterations are built, given one inside the body "
                f"of an iteration, which only builds the graph; call {method}() behind the iteration"
            )
        if not any(step.source is not None for step in self.steps):
            raise GraphError(
                f"flow {self.name!r}: expected at least one source, given none; "
                "begin with flow.source(…) or flow.from_items(…)"
            )

    @overload
    def draw(
        self, statistics: JobStatistics | None = None, *, format: Literal["mermaid", "svg"] = "mermaid"
    ) -> str: ...

    @overload
    def draw(self, statistics: JobStatistics | None = None, *, format: Literal["png"]) -> bytes: ...

    def draw(
        self,
        statistics: JobStatistics | None = None,
        *,
        format: DrawingFormat = "mermaid",  # noqa: A002 (the word for it)
    ) -> str | bytes:
        """Return a drawing of the graph: Mermaid or SVG as text, or PNG as bytes, which needs the extra ``draw``.

        An iteration is a box, and its feedback is dotted; the nodes where streams enter show the epochs of the records.
        A parameter server is a node of its own, with dashed lines to the steps that use it. With ``statistics``, from
        ``job.statistics()`` or :meth:`run`, steps show the number of records they received and emitted and their last
        epoch; a server shows its workers and the progress of its matrices.

        >>> flow = Flow("squares")
        >>> squares = flow.from_items([1, 2, 3]).map(lambda x: x * x).collect()
        >>> print(flow.draw(flow.run()))
        ---
        title: squares (finished)
        ---
        flowchart LR
            s0[("items<br>3 out")]
            s1["map<br>3 in · 3 out"]
            s2[/"collect<br>3 in"/]
            s0 --> s1
            s1 --> s2
        <BLANKLINE>
        """
        # Imported here: most programs draw no flow.
        from streamiter.flow.drawing.formats import draw_picture
        from streamiter.flow.drawing.picture import picture_of

        return draw_picture(picture_of(self.name, self.steps, statistics), format, f"flow {self.name!r}")

    def _repr_html_(self) -> str:
        """Return the drawing, for notebooks."""
        return self.draw(format="svg")

    def __repr__(self) -> str:
        return f"Flow({self.name!r}, {len(self.steps)} steps)"


class Processes(Protocol):
    """Several processes that run a flow, such as :class:`~streamiter.LocalProcesses`."""

    def _run_flow(
        self, flow: Flow, options: Mapping[str, Any], first: OnInterrupt, while_running: WhileRunning[Any]
    ) -> Coroutine[Any, Any, JobStatistics]:
        """Run the flow to its end; ``options`` are those of ``flow.start``."""


def _check_not_imported(flow: str) -> None:
    from streamiter.values.helpers.importing import IS_LOADING

    if IS_LOADING.get():
        raise ConfigurationError(
            f"flow {flow!r}: expected that no flow runs while a process of a run imports the program, given run(); "
            'put it behind: if __name__ == "__main__":'
        )


def listed_items(owner: str, items: Any) -> Batch:
    """Return the records of a user as a batch. Raises GraphError for anything else."""
    if isinstance(items, (list, Columns)) or (isinstance(items, np.ndarray) and items.ndim):
        return items
    if isinstance(items, Mapping):
        raise GraphError(
            f"{owner}: expected records, given a mapping: {shortened(items)}; write list(….items()) for pairs, "
            "Columns(…) for named arrays, or […] for one record"
        )
    if (rows := rows_of_table(owner, items, GraphError)) is not None:
        return rows
    if is_scipy_sparse(items):
        return list(SparseRows.from_scipy(items))
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes, np.ndarray)):
        raise GraphError(
            f"{owner}: expected a list, an array whose first axis is the record, Columns or another "
            f"iterable of records, given {shortened(items)}; for one record write [record]"
        )
    return list(items)


# -- several streams, several steps ------------------------------------------------------------------------


class ConnectedStreams:
    """Several streams on their way to one step, each to an input of its own name; ``connect`` returns them."""

    def __init__(self, streams: dict[str, Stream]) -> None:
        self._streams = streams

    def process(
        self, factory: OperatorFactory, *, time_to_live_s: Seconds | None = None, **options: Unpack[ProcessOptions]
    ) -> Stream:
        """Add an operator with a method for each input.

        If all streams have keys, ``connect(left=a.key_by(f), right=b.key_by(g))``, and the operator handles single
        records, the step has ``context.key``, ``context.state`` and timers by key, as ``key_by(f).process``; a state
        that was not used for ``time_to_live_s`` seconds is dropped.

        The method is ``process_<input>(record, out)`` or ``process_<input>_batch(batch, out)``. Records of different
        inputs arrive in any order, unless the operator chooses one with ``wanted_inputs()``, or the step is in a
        synchronous iteration; see :class:`~streamiter.Operator`, and :func:`connect` for an example.
        """
        keyed = self._keyed(factory)
        if not keyed:
            if time_to_live_s is not None:
                label = options.get("name") or factory_label(factory)
                raise GraphError(
                    f"step {label!r}: expected time_to_live_s= only if all inputs have keys and a method for single "
                    "records, given another step; write connect(left=a.key_by(f), right=b.key_by(g))"
                )
            return Stream(next(iter(self._streams.values())).flow, add_operator(self._streams, factory, options))
        return add_keyed_operator(keyed, factory, time_to_live_s, options)

    def _keyed(self, factory: OperatorFactory) -> dict[str, KeyedStream]:
        """Return the streams if the step has keys; a class that only handles whole batches has none."""
        keyed = {
            name: stream
            for name, stream in self._streams.items()
            if isinstance(stream, KeyedStream) and has_record_keys(stream)
        }
        has_methods = not isinstance(factory, type) or all(hasattr(factory, f"process_{name}") for name in keyed)
        return keyed if len(keyed) == len(self._streams) and has_methods else {}


def connect(**streams: Stream) -> ConnectedStreams:
    """Bring several streams to one step, each under the name of an input.

    The name becomes part of a method's name; so ``input``, ``batch`` and names that end in ``_batch`` are not allowed.

    >>> from streamiter import Flow, Operator
    >>> class Tagged(Operator):
    ...     def process_left(self, record, out):
    ...         out.emit(("left", record))
    ...     def process_right(self, record, out):
    ...         out.emit(("right", record))
    >>> flow = Flow("two inputs")
    >>> both = connect(left=flow.from_items([1]), right=flow.from_items([2])).process(Tagged).collect()
    >>> statistics = flow.run()
    >>> sorted(both.items)
    [('left', 1), ('right', 2)]
    """
    if not streams:
        raise GraphError("connect: expected at least one stream, given none; write connect(name=stream)")
    first = next(iter(streams.values()))
    for name, stream in streams.items():
        if not isinstance(stream, Stream):
            raise GraphError(f"connect: expected streams, given {stream!r} for {name!r}; write connect({name}=stream)")
        check_same_flow(first, stream, "connect")
    check_input_names(streams)
    return ConnectedStreams(dict(streams))


P = ParamSpec("P")
T = TypeVar("T")


def all_or_nothing(build: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that adds several steps: if it raises, the flow contains none of them.

    The flow is one of the function's arguments, or the flow of a stream among them.

    >>> @all_or_nothing
    ... def halves(stream):
    ...     return stream.map(lambda x: x / 2, name="half"), stream.map(None)
    >>> flow = Flow("halves")
    >>> halves(flow.from_items([1]))
    Traceback (most recent call last):
    streamiter.errors.GraphError: map: expected a function, given None; write a function or a lambda (at ...)
    >>> flow
    Flow('halves', 1 steps)
    """

    @wraps(build)
    def build_or_roll_back(*args: P.args, **kwargs: P.kwargs) -> T:
        flow = _flow_of(*args, *kwargs.values())
        if flow is None:  # The function refuses its arguments.
            return build(*args, **kwargs)
        with flow.graph.all_or_nothing():
            return build(*args, **kwargs)

    return build_or_roll_back


def _flow_of(*arguments: object) -> FlowUnderConstruction | None:
    for given in arguments:
        if isinstance(given, Flow):
            return given
        if isinstance(given, Stream):
            return given.flow
    return None


def step_names(flow: FlowUnderConstruction, name: str | None) -> Callable[[str], str]:
    """Return a function that names the steps of an algorithm: the user's ``name`` for the algorithm, then the step.

    Without ``name``, the steps of a second algorithm of the same kind get numbers.

    >>> flow = Flow("names")
    >>> step_names(flow, None)("train"), step_names(flow, "clicks")("train")
    ('train', 'clicks: train')
    """
    check_name(name)

    def name_of(step: str) -> str:
        return flow.graph.unique_name(step if name is None else f"{name}: {step}", named=name is not None)

    return name_of


def check_stream(owner: str, given: Any, of_what: str, *, bounded: bool = False) -> None:
    """Raise GraphError unless ``given`` is a stream; with ``bounded`` the error shows how to make a bounded one."""
    if not isinstance(given, Stream):
        source = 'flow.source(…, stop="latest")' if bounded else "flow.source(…)"
        shown = f"a {type(given).__name__}" if hasattr(given, "columns") else shortened(given)
        raise GraphError(
            f"{owner}: expected a stream of {of_what}, given {shown}; make one with {source} or flow.from_items(…)"
        )
