"""The Flow: a logical graph, built step by step, and the start of its job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

import msgspec
import numpy as np

from streamiter.checkpoints.plain_data import PlainData
from streamiter.clock import Clock
from streamiter.errors import ConfigurationError, GraphError
from streamiter.flow.graph_checks import (
    check_codec,
    check_factory,
    check_name,
    check_parallelism,
    check_policy,
    check_start,
    check_stop,
)
from streamiter.flow.keyed_stream import KeyedStream
from streamiter.flow.next_step import StepOutput
from streamiter.flow.stream import Stream
from streamiter.operators.rejection import DEAD_LETTERS, RejectionPolicy, shortened
from streamiter.operators.source import ItemsSource, Source, SourceFactory
from streamiter.operators.steps import Identity
from streamiter.records import Batch, Columns
from streamiter.runtime.graph import Graph, Step
from streamiter.tables import rows_of_table
from streamiter.topics.formats import Json
from streamiter.topics.secrets import shown_given
from streamiter.topics.topic import Decoder, StartPosition, StopPosition, Topic
from streamiter.topics.topic_source import DecodeValues, TopicSource
from streamiter.user_code import user_line

if TYPE_CHECKING:
    from streamiter.checkpoints.store import Checkpoints
    from streamiter.flow.drawing import DrawingFormat
    from streamiter.runtime.checkpointing.commit import JobSnapshot
    from streamiter.runtime.job import Job
    from streamiter.runtime.plan import ChannelLimits
    from streamiter.runtime.running import OnInterrupt
    from streamiter.runtime.statistics import JobStatistics

__all__ = [
    "Flow",
    "all_or_nothing",
    "check_stream",
    "listed_items",
    "step_names",
]


class Flow:
    """A flow under construction: sources, steps and sinks.

    ``name`` identifies it wherever it leaves a trace: logs, checkpoints, transactions. ``parallelism`` is
    how many subtasks a source or a repartitioned step has unless said otherwise.

    >>> flow = Flow("squares")
    >>> squares = flow.from_items([1, 2, 3]).map(lambda x: x * x).collect()
    >>> statistics = flow.run()
    >>> squares.items, statistics.state
    ([1, 4, 9], 'finished')
    """

    def __init__(self, name: str, parallelism: int = 1) -> None:
        if not name or not isinstance(name, str):
            raise GraphError(f"Flow: expected a name, given {name!r}; it keys checkpoints and transactions")
        self.name = name
        self.parallelism = check_parallelism(parallelism, step=name)
        self.plain_data = PlainData()
        self.graph = Graph()
        """For the engine: its steps."""
        self.published_models: dict[tuple[str, str], str] = {}
        """For the engine: by topic and model the line that publishes it."""
        self.loop: Any = None
        """For the engine: the iteration whose body is being built, or None."""

    @property
    def steps(self) -> list[Step]:
        """For the engine: its steps, in the order in which they were added."""
        return self.graph.steps

    # -- sources ---------------------------------------------------------------------------------------

    def source(
        self,
        topic: Topic,
        *,
        decode: Decoder | None = None,
        start: StartPosition = "earliest",
        stop: StopPosition = None,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> Stream:
        """Read a topic, which must exist; partition p goes to subtask p mod the parallelism.

        ``decode`` is how values are read: ``Json()`` unless the topic knows better (a CSV file does).
        Values that it cannot read follow ``on_error``: ``"fail"``, ``"skip"`` (counted), or they go to the
        topic ``dead_letter``.

        ``start``: ``"earliest"``, ``"latest"``, an offset for each partition (``{0: 1200}``; others begin at
        their earliest record), or an aware datetime. ``stop``: None reads on for ever; ``"latest"`` ends
        where the topic ends as the job starts, and an offset for each partition before that (others are
        not read): then the stream is bounded.

        >>> from streamiter import topic
        >>> flow = Flow("yesterday")
        >>> flow.source(topic("memory://clicks"), stop="latest").is_bounded
        True
        """
        if not isinstance(topic, Topic):
            raise GraphError(
                f'flow.source: expected a topic, given {shown_given(topic)}; write flow.source(topic("scheme://…"))'
            )
        label = name or topic.name
        decoder = decode if decode is not None else (topic.default_decoder() or Json())
        check_codec(decoder, "decode", step=label)
        check_start(start, step=label)
        check_stop(stop, step=label)
        policy = check_policy(on_error, dead_letter, step=label)
        bounded = stop is not None or getattr(topic, "bounded", False)
        with self.all_or_nothing():
            self.register_struct_of(decoder)
            stream = self._add_source(
                label,
                name,
                lambda: TopicSource(topic, start, stop),
                operator=lambda: DecodeValues(topic, decoder),
                parallelism=parallelism,
                bounded=bounded,
                policy=policy,
                label_lasts=True,
            )
            if dead_letter is not None:
                stream.side_output(DEAD_LETTERS).to_dead_letters(dead_letter)
        return stream

    def from_items(
        self, items: Iterable[Any], *, name: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """A bounded stream of these items; with n subtasks item i goes to subtask i mod n.

        Arrays (first axis = record) and ``Columns`` stay what they are; other iterables are listed now. Of a table of
        pandas, polars or Arrow the items are its rows, as ``Columns``; its columns need texts as names, and the index
        of pandas is left out (``….reset_index()`` makes a column of it). Of a ``Series`` they are its values. Missing
        numbers become NaN, other missing values None: see :mod:`streamiter.tables`, which says what becomes of each
        type. Raises GraphError for a mapping, a text, any other table and columns that are not plain data.

        >>> flow = Flow("items")
        >>> items = flow.from_items(number * number for number in range(4)).collect()
        >>> flow.run().state, items.items
        ('finished', [0, 1, 4, 9])
        """
        batch = listed_items("from_items", items)
        return self._add_source(
            name or "items",
            name,
            lambda: ItemsSource(batch),
            operator=Identity,
            parallelism=parallelism,
            bounded=True,
        )

    def from_source(
        self, source: SourceFactory, *, name: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """A stream from your own :class:`~streamiter.operators.Source`: its class, or a callable making one.

        Its ``bounded`` (that of the class, or an attribute of the callable) says whether it ever ends; a
        callable without one counts as bounded.

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
        operator: Callable[[], Any],
        parallelism: int | None,
        bounded: bool,
        policy: RejectionPolicy = "fail",
        label_lasts: bool = False,
    ) -> Stream:
        check_name(name)
        if self.loop is not None:
            raise GraphError(
                f"step {label!r}: expected no sources inside an iteration body, given one; make it outside "
                "and pass its stream as a data stream"
            )
        parallelism = check_parallelism(self.parallelism if parallelism is None else parallelism, step=label)
        unique_name = self.graph.unique_name(label, named=name is not None)
        step = Step(
            name=unique_name,
            has_lasting_name=(name is not None or label_lasts) and not self.graph.is_numbered(unique_name),
            parallelism=parallelism,
            where=user_line(),
            factory=operator,
            source=source,
            policy=policy,
            bounded=bounded,
            shape="source",
        )
        return self.add_step(step)

    # -- building (used by Stream and by iterations) -----------------------------------------------------

    def add_step(self, step: Step) -> Stream:
        """For the engine: put a step into the graph; gives its main output."""
        self.graph.add(step)
        return Stream(self, step)

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """For the engine: where the block raises, take out again all that was added to the flow in it.

        Whatever it raises, KeyboardInterrupt too: the session of a notebook outlives it. Blocks may be nested.
        """
        loop, steps = self.loop, self.graph.savepoint()
        of_loop = None if loop is None else loop.savepoint()
        models, structs = len(self.published_models), self.plain_data.struct_count
        try:
            yield
        except BaseException:
            self.graph.roll_back(steps)
            while len(self.published_models) > models:
                self.published_models.popitem()
            self.plain_data.forget_structs(structs)
            self.loop = loop
            if loop is not None:
                loop.roll_back(of_loop)
            raise

    def keyed_stream(
        self, key_of: Callable[[Any], Any], outlets: Iterable[StepOutput], *, whole_batches: bool = False
    ) -> KeyedStream:
        """For the engine: what ``key_by`` gives; Stream cannot import the class that derives from it."""
        return KeyedStream(self, key_of, outlets, whole_batches=whole_batches)

    def register_struct_of(self, codec: Any) -> None:
        """For the engine: what a decoder makes becomes plain data of this flow, if it is made of ``msgspec.Struct`` s.

        Of two classes of one name the first; the other one is refused where it comes to be stored.
        """
        for struct in getattr(codec, "struct_types", ()):
            with contextlib.suppress(ConfigurationError):
                self.register(struct)

    def register(self, struct: type[msgspec.Struct]) -> None:
        """Let a ``msgspec.Struct`` count as plain data, under its class name, so that it can be stored."""
        self.plain_data.register(struct)

    # -- running ---------------------------------------------------------------------------------------

    def run(self, *, on_interrupt: OnInterrupt = "suspend", **options: Any) -> JobStatistics:
        """Run to the end, in an event loop of its own (uvloop); returns the final statistics.

        Takes the options of :meth:`start`. ``on_interrupt`` is what SIGTERM and Ctrl-C do:

        - ``"suspend"`` the job: nothing more is read, and what was read is handled, but for records that a step
          does not want yet, such as mini-batches that wait for their model. No step hears of an end, so what it
          would emit there does not come out. With ``checkpoints`` all this is kept for the next run, which goes on
          from there; without, it is gone.
        - ``"drain"`` it: the inputs end here, a bounded iteration with the epoch under way, and all steps hear of
          it. So the result so far comes out, such as that of ``last_round``, and the job is ``finished``.

        A second one aborts it, and a third one raises KeyboardInterrupt, also within a step that does not return. A
        signal that is ignored stays ignored, as SIGINT is where a script starts the program with ``&``.

        Raises JobFailed if a step failed. A transaction that was open for longer than its
        timeout, because a server or the machine stood still, is no failure of a step: the job is started again, from
        its last checkpoint.
        """
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            raise GraphError(
                f"flow {self.name!r}: run() expected no running event loop, given one; "
                "write: job = await flow.start(); await job.wait()"
            )
        self._check_complete("run")
        # With all that runs a job: see start.
        from streamiter.runtime.running import check_on_interrupt, run_in_own_loop, run_jobs

        check_on_interrupt(self.name, on_interrupt, shares=options.get("worker") is not None)
        if "changed_steps" in options:  # Asked for again where the job is started again.
            options["changed_steps"] = _checked_steps(self.name, options["changed_steps"])
        return run_in_own_loop(run_jobs(self.start, options, first=on_interrupt))

    async def start(
        self,
        *,
        clock: Clock | None = None,
        channel_limits: ChannelLimits | None = None,
        stall_after_s: float | None = None,
        checkpoints: Checkpoints | None = None,
        restore: Literal["last"] | int | None = "last",
        changed_steps: Iterable[str] = (),
        snapshot: JobSnapshot | None = None,
        worker: tuple[int, int] | None = None,
        run_id: str | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> Job:
        """Start the job in the running event loop; returns when every step is open.

        ``clock`` is where it takes its time from, ``new_id`` the names of its runs (at random unless given). Input
        without progress for ``stall_after_s`` seconds (60 unless given) is logged with the blocked step.
        ``snapshot`` is what ``await job.snapshot()`` of this flow gave: the job goes on from there, whatever the
        job of that snapshot did afterwards.

        With ``checkpoints`` the job survives crashes: it begins where the last committed checkpoint of this flow was
        taken, and what it writes to outputs with transactions becomes visible with the next one, exactly once. Steps
        that keep state need a ``name=``. ``restore`` chooses: ``"last"`` (or a fresh start, if there was never one),
        the number of a checkpoint, or None to begin anew. Of ``changed_steps`` the state is left behind or begins
        anew; any other step that was added or taken away is an error. See :class:`~streamiter.Checkpoints`.

        ``worker=(index, count)`` makes this one of ``count`` processes that run the same flow and share its loops
        through topics (see :func:`~streamiter.feedback_through`); all of them are given one ``run_id``, a new one
        for each run. Sources share out their partitions and items over all workers; every other stream but the
        feedback stays in its own. Such loops are unbounded, asynchronous and without listeners, and end when each
        worker is stopped. What one of them has not handled then stays in the topic.

        Raises JobFailed if a step cannot be opened.
        """
        self._check_complete("start")
        # What runs a job is a fifth of the import of this package, and nothing that builds or draws a flow needs.
        from streamiter.models.update import ModelSnapshot
        from streamiter.runtime.checkpointing.restore import check_restore_option
        from streamiter.runtime.job import Job, JobOptions
        from streamiter.runtime.topic_feedback import worker_of

        self.register(ModelSnapshot)
        check_restore_option(self.name, restore)
        _check_one_of(self.name, checkpoints, snapshot, worker)
        changed = _checked_steps(self.name, changed_steps)
        _check_of_checkpoints(self.name, checkpoints, restore, changed)
        given: dict[str, Any] = {
            "clock": clock,
            "channel_limits": channel_limits,
            "stall_after_s": stall_after_s,
            "checkpoints": checkpoints,
            "changed_steps": changed,
            "worker": worker_of(worker, run_id, snapshot),
            "new_id": new_id,
        }
        options = JobOptions(**{name: option for name, option in given.items() if option is not None})
        options = replace(options, restore=restore)
        job = Job(self.name, self.steps, self.plain_data, options)
        await job.start(snapshot)
        return job

    def _check_complete(self, method: str) -> None:
        if self.loop is not None:
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
        """The graph as text: Mermaid or SVG; or as bytes: PNG, which takes the extra ``draw``.

        An iteration is a box, with its feedback dotted; where streams enter it one sees of which epochs their
        records are. A parameter server is a node of its own, with dashed lines to the steps that work with it. With
        statistics, ``job.statistics()`` or what :meth:`run` returned, the steps show the records they were given
        and emitted, and how far their epochs have come; a server shows its workers and where its matrices stand.

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
        from streamiter.flow.drawing import draw  # drawing is not what a flow is imported for

        return draw(self.name, self.steps, statistics, format)

    def __repr__(self) -> str:
        return f"Flow({self.name!r}, {len(self.steps)} steps)"


def _check_one_of(flow: str, checkpoints: object, snapshot: object, worker: object) -> None:
    for option, given in (("snapshot", snapshot), ("worker", worker)):
        if checkpoints is not None and given is not None:
            raise ConfigurationError(
                f"flow {flow!r}: expected either checkpoints= or {option}=, given both; a checkpoint is of one "
                "process, and goes on from the last one by itself"
            )


def _checked_steps(flow: str, given: object) -> frozenset[str]:
    """The names in ``changed_steps=``. A str is an iterable, too, of its letters."""
    names = None if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if names is None or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"flow {flow!r}: expected changed_steps= to be a list of names of steps, given "
            f'{shortened(given if names is None else names)}; write changed_steps=["name of the step"]'
        )
    return frozenset(names)


def _check_of_checkpoints(flow: str, checkpoints: object, restore: object, changed: frozenset[str]) -> None:
    """Without checkpoints nobody would look at these."""
    if checkpoints is not None:
        return
    for option, given, is_given in (
        ("restore", restore, restore != "last"),
        ("changed_steps", sorted(changed), bool(changed)),
    ):
        if is_given:
            raise ConfigurationError(
                f"flow {flow!r}: expected checkpoints= together with {option}=, given {option}={given!r} alone; "
                f"add checkpoints=Checkpoints(…), or leave {option}= out"
            )


def listed_items(owner: str, items: Any) -> Batch:
    """For the engine: what a user gives as records, as a batch; GraphError for what are none."""
    if isinstance(items, (list, Columns)) or (isinstance(items, np.ndarray) and items.ndim):
        return items
    if isinstance(items, Mapping):
        raise GraphError(
            f"{owner}: expected records, given a mapping: {shortened(items)}; write list(….items()) for pairs, "
            "Columns(…) for named arrays, or […] for one record"
        )
    if (rows := rows_of_table(owner, items, GraphError)) is not None:
        return rows
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes, np.ndarray)):
        raise GraphError(
            f"{owner}: expected a list, an array whose first axis is the record, Columns or another "
            f"iterable of records, given {shortened(items)}; for one record write [record]"
        )
    return list(items)


P = ParamSpec("P")
T = TypeVar("T")


def all_or_nothing(build: Callable[P, T]) -> Callable[P, T]:
    """For a function that adds several steps: where it raises, it leaves none of them in the flow.

    The flow is one of its arguments, or that of a stream among them.

    >>> @all_or_nothing
    ... def halves(stream):
    ...     return stream.map(lambda x: x / 2, name="half"), stream.map(None)
    >>> flow = Flow("halves")
    >>> halves(flow.from_items([1]))
    Traceback (most recent call last):
    streamiter.errors.GraphError: map: expected a function, given None; write a function or a lambda (at ...)
    >>> flow
    Flow('halves', 1 steps)

    What functions that make several steps of a stream have in common.
    """

    @wraps(build)
    def build_or_roll_back(*args: P.args, **kwargs: P.kwargs) -> T:
        flow = _flow_of(*args, *kwargs.values())
        if flow is None:  # It will be refused.
            return build(*args, **kwargs)
        with flow.all_or_nothing():
            return build(*args, **kwargs)

    return build_or_roll_back


def _flow_of(*arguments: object) -> Flow | None:
    for given in arguments:
        if isinstance(given, Flow):
            return given
        if isinstance(given, Stream):
            return given.flow
    return None


def step_names(flow: Flow, name: str | None) -> Callable[[str], str]:
    """What gives each step its name: what it does, behind the ``name`` that the user chose for the algorithm.

    Without one, the names of a second algorithm of the same kind get a number.

    >>> flow = Flow("names")
    >>> step_names(flow, None)("train"), step_names(flow, "clicks")("train")
    ('train', 'clicks: train')
    """
    check_name(name)

    def name_of(step: str) -> str:
        return flow.graph.unique_name(step if name is None else f"{name}: {step}", named=name is not None)

    return name_of


def check_stream(owner: str, given: Any, of_what: str, *, bounded: bool = False) -> None:
    """Raise GraphError for what is no stream; ``bounded`` only says how to make one."""
    if not isinstance(given, Stream):
        source = 'flow.source(…, stop="latest")' if bounded else "flow.source(…)"
        raise GraphError(
            f"{owner}: expected a stream of {of_what}, given {shortened(given)}; make one with {source} or "
            "flow.from_items(…)"
        )
