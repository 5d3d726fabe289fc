"""The online-learning service: the flow of its settings, and the runs of its job."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from streamiter.engine.graph.statistics import JobStatistics, StalledTask
from streamiter.engine.job.job import Job, StopMode
from streamiter.engine.job.running import causes_of, run_jobs
from streamiter.engine.storage.store import Checkpoints
from streamiter.errors import (
    CheckpointError,
    JobFailed,
    OffsetOutOfRange,
    OtherModel,
    ProducerFenced,
    StoreUnavailable,
    StreamiterError,
    TopicUnavailable,
    TransactionExpired,
    described,
)
from streamiter.flow.flow import Flow
from streamiter.flow.stream import Stream
from streamiter.learn import OnlineTraining
from streamiter.learn.online.challengers import challenged
from streamiter.models import Rollbacks, initial_model
from streamiter.models.rollbacks import early_deletion
from streamiter.service.leadership import Leadership
from streamiter.service.learning import (
    CHALLENGER_STEPS,
    ServiceLearning,
    challenger_step,
    decoder_for,
    decoder_of,
    fields_in_columns,
    flow_without_challenger,
    has_texts,
    learner_in_words,
    rejections_of,
)
from streamiter.service.observing.challenger import Challenger
from streamiter.service.observing.observations import LoopBlock
from streamiter.service.observing.prediction_log import RecordsOfFile, file_of_predictions
from streamiter.service.settings.labels import reads_truth, with_truth
from streamiter.service.settings.tables import ServiceSettings
from streamiter.service.surfaces import FAILED, SUCCEEDED, ServiceSurfaces
from streamiter.service.tracing import Traces
from streamiter.topics import topic
from streamiter.topics.topic import StartPosition
from streamiter.values.helpers.clock import Clock

_log = logging.getLogger("streamiter.service")

# Further exit codes of the process. 130 is that of a program which Ctrl-C ended.
STALLED: Final = 3
TAKEN_OVER: Final = 4
ABORTED: Final = 130
_CODES: Final[Mapping[str, int]] = {"stall": STALLED, "time": ABORTED}

# After an outage of a topic the job is started again: at first soon, since most outages are restarts of a broker.
_WAITS_S: Final = (1.0, 2.0, 5.0, 10.0)

HISTORY_STEPS: Final = ("history", "history of answers")
"""The names of the sources of histories."""

# They bring predictions from their file into their log.
_LOG_STEPS: Final = ("predictions on record", "log predictions")

# A stop commits a last checkpoint, unless that takes this long: the first while the broker is away, the second while it
# answers. An abort takes up to 8 s while it is away. Compose kills the process after 45 s, Kubernetes after 60.
_STOP_S: Final = 15.0
_STOP_ANSWERED_S: Final = 25.0
_ANSWER_S: Final = 2.0


class OnlineLearningService(ServiceSurfaces):
    """A flow that reads a topic, learns from it and publishes its model; with health, metrics, predictions and a page.

    ``flow``, the stream ``events`` and the streams of ``training`` may get further steps before ``run``::

        service = OnlineLearningService(read_settings("service.toml"))
        service.training.predictions.sink(topic("kafka://127.0.0.1:9092/predictions"), name="write predictions")
        raise SystemExit(service.run())
    """

    def __init__(
        self, settings: ServiceSettings, *, clock: Clock | None = None, without_checkpoint: bool = False
    ) -> None:
        """``without_checkpoint``: start from the last version, and read the input from its ``start`` on."""
        self.learning = ServiceLearning(settings)
        self._learnings = [self.learning]
        """Those of the service and of its challenger."""
        super().__init__(
            settings,
            self.learning.features,
            role="service" if settings.standby_s is None else "standby",
            clock=clock,
            checkpoint_interval_s=settings.checkpoints.interval_s,
        )
        self._leadership: Leadership | None = None
        if settings.standby_s is not None:
            process = f"{socket.gethostname()}-{secrets.token_hex(6)}"
            self._leadership = Leadership(self._updates, self.name, process, settings.standby_s, self._clock)
        self._restore: Literal["last"] | None = None if without_checkpoint else "last"
        self.observations.history_steps = HISTORY_STEPS
        self.flow = Flow(self.name)
        """The flow; it has the name of the service."""
        given = settings.input
        self.history, self.answers_history = (
            None if url is None else self._read(url, name, "earliest", is_history=True)
            for url, name in zip((given.history, given.answers_history), HISTORY_STEPS, strict=True)
        )
        """The decoded records of two histories: of the input, and of the topic of answers; None where there is none."""
        self._events = self._read(given.topic, "events", given.at)
        self._objects: Stream | None = None
        of_answers = given.answers
        self.answers: Stream | None = (
            None if of_answers is None else self._read(of_answers, "answers", given.answers_at)
        )
        """The decoded records of the topic of answers; None if there is none."""
        # Without a challenger, a version of a challenger that was promoted is one to start from.
        own = None if settings.challenger.file is None else ""
        # A run without a checkpoint starts from the last version.
        last = initial_model(self._updates, model=self.name, default=None, learner=own)
        newest = self.flow.from_source(last, name="last version", parallelism=1)
        rollbacks = Rollbacks(self._updates, self.name, own)
        self.training: OnlineTraining = self.learning.train(
            self._events, rollbacks, newest, self.answers, self.history, self.answers_history
        )
        """The streams of the training: models, validation, predictions, drifts, fields."""
        self.challenger: OnlineTraining | None = None
        """The same streams of the challenger; None if there is none."""
        served = (
            self.training.models if settings.challenger.file is None else self._challenged(settings.challenger.file)
        )
        served.publish_model(self._updates, model=self.name, changes=settings.publish.changes, name="publish")
        self.training.validation.map(self.observations.validated, name="observe validation")
        # One step, so that the drawing of the flow fits on the first screen of the page.
        shifts = self.training.drifts.union(self.training.fields)
        shifts.map(self.observations.quality.shifted, name="observe drifts")
        self._log_predictions()
        self._without_challenger: Flow | None = None
        """The flow that runs since the challenger has failed; None: it has not."""
        self._traces = Traces()
        self._stops: Sequence[StopMode] = ()
        """The stops that signals have told the job."""
        self._ended_by: Literal["stall", "time", "challenger"] | None = None
        """Why the service has aborted the job: no progress of the service or of its challenger alone, or no last
        checkpoint in time."""

    def _read(self, url: str, name: str, at: StartPosition | None, *, is_history: bool = False) -> Stream:
        given, read = self.settings.input, topic(url)
        is_by_topic = "answers" in name and given.decoder == "predictions"
        by_topic = read.default_decoder() if is_history else None
        is_by_topic = is_by_topic or by_topic is not None
        stream = self.flow.source(
            read,
            decode=decoder_of("default") if is_by_topic else decoder_for(self.settings, read),
            start=given.start if at is None else at,
            stop="latest" if is_history else None,
            on_lost=given.on_lost,
            name=name,
            **rejections_of(given),
        )
        learn = self.settings.learn
        if not (is_history and has_texts(url)) or not reads_truth(learn):
            return stream
        labelled = partial(with_truth, field=learn.label.field)
        return stream.map(labelled, name=f"labels of {name}", **rejections_of(given))

    @property
    def events(self) -> Stream:
        """The decoded records of the input; without the history, and answers that have a topic of their own."""
        if fields_in_columns(self.settings) is None:
            return self._events
        if self._objects is None:
            # The rows of columns are the records, and a step may take batches.
            self._objects = self._events.map_batch(list, name="records of events")
        return self._objects

    def _log_predictions(self) -> None:
        """Bring predictions from their file into their log, if it has each of them exactly once."""
        file, log = file_of_predictions(self.settings), self.settings.predictions.log
        if file is not None and log is not None:
            codec, (source, sink) = RecordsOfFile(), _LOG_STEPS
            on_lost = self.settings.input.on_lost
            records = self.flow.source(file, decode=codec, on_lost=on_lost, name=source, parallelism=1)
            # A record above the limit is refused before it is answered; it comes here only if the limit was not known.
            records.sink(topic(log), encode=codec, on_error="skip", name=sink)

    def _challenged(self, given: ServiceSettings) -> Stream:
        """Add the training of the challenger, and publish its versions; return the versions of the one that serves."""
        step, rollbacks = challenger_step(given.name), Rollbacks(self._updates, self.name, given.name)
        last = initial_model(self._updates, model=given.name, default=None)
        newest = self.flow.from_source(last, name=f"{step}: last version", parallelism=1)
        self._learnings.append(ServiceLearning(given))
        self.challenger = self._learnings[-1].train(self._events, rollbacks, newest, beside=self.training)
        after = self.settings.challenger.after
        learners = [learner_in_words(each.learn) for each in (self.settings, given)]
        served, own = challenged(
            self.training,
            self.challenger,
            rollbacks,
            after=after,
            name=step,
            learners=learners,
            has_stopped=lambda: self._without_challenger is not None,
        )
        own.publish_model(self._updates, model=given.name, changes=given.publish.changes, name=f"{step}: publish")
        validated = partial(self.observations.validated, learner=given.name)
        self.challenger.validation.map(validated, name=f"{step}: observe validation")
        return served

    # -- the run -----------------------------------------------------------------------------------------

    async def serve(self) -> int:
        """Run the service in this event loop until its job ends; return the exit code of the process. Call it once.

        SIGTERM or Ctrl-C suspends the job: it commits a last checkpoint, and the next run resumes from it. If this
        takes more than 25 s, or 15 s while the broker is away, the job is aborted without it. A second signal aborts
        the job, too. SIGHUP reads the file of the settings again. While a topic does not answer, the job is started
        again and again.

        Codes: 0 suspended or finished, 1 failed, 3 stalled, if the settings ask for it, 4 another run has taken over,
        130 aborted. Raises ConfigurationError for an address that is in use.
        """
        return await super().serve()

    def _end_of_wait(self) -> None:
        _log.info("the service ends while no job runs: the next run resumes from the last checkpoint")
        self.observations.enter("suspended")

    def _take_over(self, settings: ServiceSettings) -> None:
        super()._take_over(settings)
        learn, given = self.settings.learn, settings.learn
        if given.learner == learn.learner:
            rate = {name: value for name, value in given.learner_settings.items() if name == "learning_rate"}
            kept = {name: value for name, value in learn.learner_settings.items() if name != "learning_rate"}
            self.settings = replace(self.settings, learn=replace(learn, learner_settings=kept | rate))
        self.learning.apply(self.settings)
        if self.observations.job is not None:
            self.observations.job.stall_after(settings.health.stall_limit_s)

    def _warn_of_block(self, block: LoopBlock) -> None:
        super()._warn_of_block(block)
        self._traces.slow_batch(self.name, block.task, self._clock.now_ms(), block.seconds)

    async def _take_sample(self) -> None:
        if self._stops and self.observations.phase.phase == "running":
            self.observations.enter("stopping")
        if self.observations.phase.phase == "stopping":
            await self._end_in_time()
        if (statistics := self.observations.sample()) is not None:
            self._traces.checkpoint(statistics)
            await self._end_if_stalled(statistics)
        if (predictions := self.observations.prediction_log) is not None:
            await predictions.count_waiting()

    async def _end_in_time(self) -> None:
        """Abort a job whose last checkpoint takes too long; one that is only slow has more time."""
        seconds = self.observations.seconds_in_phase
        if seconds > _STOP_ANSWERED_S or (seconds > _STOP_S and not await self._broker_answers()):
            await self._abort_late()

    async def _broker_answers(self) -> bool:
        with contextlib.suppress(StreamiterError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await self._updates.describe()
                return True
        return False

    async def _abort_late(self) -> None:
        if self._ended_by is None:
            seconds = self.observations.seconds_in_phase
            _log.warning("no last checkpoint after %.0f s: the next run resumes from the one before", seconds)
            await self._abort("time")

    async def _end_if_stalled(self, statistics: JobStatistics) -> None:
        stalled = [each for each in statistics.stalled if each.cause == "step"]
        if not stalled or self._ended_by is not None:
            return
        challenger, hangs = self.observations.challenger, stalled_challenger(statistics.stalled)
        if challenger is not None and challenger.failure is None and hangs is not None and not self._stops:
            self._go_without(challenger, f"no progress for {hangs.stalled_s:.0f} s: {hangs.reason}")
            await self._abort("challenger")
        elif self.settings.health.exit_when_stalled:
            _log.error("the service ends: no progress for %.0f s: %s", stalled[0].stalled_s, stalled[0].reason)
            await self._abort("stall")

    async def _abort(self, why: Literal["stall", "time", "challenger"]) -> None:
        self._ended_by, job = why, self.observations.job
        if job is not None:
            with contextlib.suppress(StreamiterError):  # job.wait() raises it, too.
                await job.stop("abort")

    def _meanwhile(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {} if self._leadership is None else {"signs_of_life": self._leadership.tell()}

    async def _lead(self) -> None:
        """Wait until this process leads, if there may be several."""
        if self._leadership is not None and not self._leadership.leads:
            self.observations.role = "standby"
            self.observations.follow()
            _log.info("a standby: it predicts, and learns as soon as no other process does")
            # Otherwise the event loop would be blocked meanwhile, and the next standby would take over.
            await asyncio.to_thread(self._make_ready)
            why = await self._leadership.win()
            if self._leadership.has_heard:  # Its checkpoints are newer than the wish to start without one.
                self._restore = "last"
            self.observations.role = "leader"
            _log.info("the leader: it learns from now on, since %s", why)

    def _make_ready(self) -> None:
        for learning in self._learnings:
            learning.make_ready()

    def _is_standby_again(self, error: StreamiterError) -> bool:
        """Whether another process has taken over, from which this one may take over again."""
        if self._leadership is None or self._stops or not is_taken_over(error):
            return False
        _log.warning("%s", error)
        self._leadership.leads = False
        # The process that leads now has the challenger; what has stopped it here may not come again.
        self._without_challenger = self._ended_by = None
        if self.observations.challenger is not None:
            self.observations.challenger.failure = None
        return True

    async def _work(self) -> int:
        await self._warn_of_deletion()
        try:
            return await self._run_again_and_again()
        finally:
            if self._leadership is not None:
                await self._leadership.leave()

    async def _warn_of_deletion(self) -> None:
        """Warn if the topic of the model does not keep versions for as long as the settings say."""
        with contextlib.suppress(StreamiterError):  # The job tells what is wrong with the topic.
            description = await self._updates.describe()
            if early := early_deletion(self._updates, description, self.settings.publish.roll_back_s):
                _log.warning("%s: %s", self._updates.url, early)

    async def _run_again_and_again(self) -> int:
        """Run the job; start it again after an outage."""
        given = self.settings.checkpoints
        options = {"checkpoints": Checkpoints(given.store, interval_s=given.interval_s, keep=given.keep)}
        outages = 0
        while True:
            began_s = self._clock.monotonic_s()
            try:
                await self._lead()
                restore = {"restore": self._restore}
                statistics = await run_jobs(self._start, options | restore, while_running=self._while_running)
                if self._resumes():
                    continue
            except StreamiterError as error:
                if self._is_standby_again(error) or (not is_taken_over(error) and self._resumes()):
                    continue
                if self._challenger_stops(error):
                    continue
                if self._ended_by is not None and not is_taken_over(error):
                    _log.warning("%s", error)
                    self.observations.enter("aborted")
                    return _CODES[self._ended_by]
                if self._stops or not is_outage(error):
                    return self._failed(error)
                if self._clock.monotonic_s() - began_s > _WAITS_S[-1]:
                    outages = 0
                wait_s = _WAITS_S[min(outages, len(_WAITS_S) - 1)]
                outages += 1
                if self._leadership is not None and _has_cause(error, StoreUnavailable):
                    await self._leadership.leave()  # Another process may reach the store; of a topic none could tell.
                _log.warning("%s; trying again in %g s", error, wait_s)
                self.observations.enter("waiting", str(error))
                await self._clock.sleep(wait_s)
            else:
                state = statistics.state
                self.observations.enter(state)
                if self._ended_by is not None:
                    return _CODES[self._ended_by]
                return ABORTED if state == "aborted" else SUCCEEDED

    def _resumes(self) -> bool:
        """Whether the job was aborted because its challenger hangs, so that it resumes without it."""
        if self._ended_by != "challenger":
            return False
        self._ended_by = None
        return not self._stops

    def _challenger_stops(self, error: StreamiterError) -> bool:
        """Whether only the challenger has failed, so that the job resumes without it."""
        challenger = self.observations.challenger
        if challenger is None or challenger.failure is not None or self._stops or not is_of_challenger(error):
            return False
        _log.error("%s", error)
        self._go_without(challenger, described(error.__cause__ or error))  # Without the record, which the log has.
        return True

    def _go_without(self, challenger: Challenger, why: str) -> None:
        """Let the next job run without the challenger."""
        challenger.failure = why
        self._without_challenger = flow_without_challenger(self.flow)
        _log.error(
            "the challenger %r has stopped; the service resumes from its last checkpoint without it, and tries it "
            "again when the process is started again",
            challenger.name,
        )

    def _failed(self, error: StreamiterError) -> int:
        _log.error("%s", error)
        if remedy := remedy_of(error):
            _log.error("%s", remedy)
        self.observations.enter("failed", str(error))
        return TAKEN_OVER if is_taken_over(error) else FAILED

    async def _start(self, **options: Any) -> Job:
        """Start the job. While a checkpoint is read, the phase names it."""
        self.observations.enter("starting")
        if (predictions := self.observations.prediction_log) is not None and predictions.is_exactly_once:
            predictions.limit = await topic(str(self.settings.predictions.log)).size_limit()
        start = partial(
            (self._without_challenger or self.flow).start,
            clock=self._clock,
            stall_after_s=self.settings.health.stall_limit_s,
            on_rejected=self.observations.refused,
            on_restore=lambda number: self.observations.enter("restoring", f"checkpoint {number}"),
            **options,
        )
        try:
            return await start()
        except CheckpointError as error:
            if not concerns_challenger(error, *_LOG_STEPS):
                raise
            # They have come, or have gone, since the checkpoint: all other steps keep their state.
            return await start(changed_steps=list(error.changes))

    @contextlib.asynccontextmanager
    async def _while_running(self, job: Job, stops: Sequence[StopMode]) -> AsyncIterator[None]:
        self.observations.job, self._stops, self._restore = job, stops, "last"
        self.observations.enter("running")
        try:
            yield
        except asyncio.CancelledError:  # A surface has failed; the job must not run without it.
            self.observations.enter("stopping")
            with contextlib.suppress(StreamiterError):
                try:
                    async with asyncio.timeout(_STOP_S):
                        await job.stop("suspend")
                except TimeoutError:
                    await self._abort_late()
            raise


def concerns_challenger(error: CheckpointError, *others: str) -> bool:
    """Whether only steps of challengers, or these ``others``, differ from those in the checkpoint."""
    return bool(error.changes) and all(name.startswith((CHALLENGER_STEPS, *others)) for name in error.changes)


def stalled_challenger(stalled: Sequence[StalledTask]) -> StalledTask | None:
    """Return the task of a challenger for which alone all stalled tasks wait; None if there is none.

    >>> behind = StalledTask("learn[0]", "learn[0] waits for room", 61.0, "step")
    >>> hangs = StalledTask("challenger b: learn[0]", "it is at work on a batch", 61.0, "step", is_at_work=True)
    >>> stalled_challenger([behind, hangs]) is hangs, stalled_challenger([behind])
    (True, None)
    """
    # A task that is held waits for input, perhaps of one at work; others wait for room, or for a barrier.
    culprits = [each for each in stalled if each.is_at_work] or [each for each in stalled if each.cause == "held"]
    return culprits[0] if culprits and all(each.name.startswith(CHALLENGER_STEPS) for each in culprits) else None


def is_of_challenger(error: BaseException) -> bool:
    """Whether a job failed because a step of the challenger did, and for no outage."""
    is_so = any(isinstance(cause, JobFailed) and cause.step.startswith(CHALLENGER_STEPS) for cause in causes_of(error))
    return is_so and not is_outage(error) and not is_taken_over(error)


def is_outage(error: BaseException) -> bool:
    """Whether a job failed because a topic or the store did not answer, so that the next one may succeed."""
    return _has_cause(error, TopicUnavailable, StoreUnavailable) and not is_taken_over(error)


def _has_cause(error: BaseException, *kinds: type[BaseException]) -> bool:
    return any(isinstance(cause, kinds) for cause in causes_of(error))


def remedy_of(error: BaseException) -> str | None:
    """Return how a service that cannot use its checkpoint can keep what it has learned; None for other errors."""
    causes = list(causes_of(error))
    if _has_cause(error, OffsetOutOfRange):
        return (
            "the input has deleted records that were not read, or it is another topic than that of the checkpoint; to "
            'keep the model and read on, write on_lost = "skip" in [input]'
        )
    if any(isinstance(cause, CheckpointError) and concerns_challenger(cause) for cause in causes):
        return (
            "the settings of the challenger were changed: write its [learn] as before, or give its file another "
            "service.name; it then learns from the beginning, and the service resumes"
        )
    if any(_says_another_model(cause) for cause in causes):
        return (
            "what the service has learned is of other settings in [learn]: write these again, or give it another name "
            "in [service]; it then learns from the beginning"
        )
    if _has_cause(error, CheckpointError):
        return (
            "to start from the last version of the model, without a checkpoint: streamiter serve --without-checkpoint; "
            "the input is then read from its start in [input] on, and labels of earlier questions are unknown"
        )
    return None


def _says_another_model(error: BaseException) -> bool:
    """Whether a checkpoint, or a version, is of a model for other labels."""
    if isinstance(error, CheckpointError):
        return any(change.startswith(("task was", "positive was")) for change in error.changes.get("learn", ()))
    return isinstance(error, OtherModel)


def is_taken_over(error: BaseException) -> bool:
    """Whether a job failed because another run has claimed its flow."""
    return any(
        isinstance(cause, ProducerFenced) and not isinstance(cause, TransactionExpired) for cause in causes_of(error)
    )
