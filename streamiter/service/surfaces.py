"""What a service and its replicas share: the model that is followed, HTTP, signals, the log. And the replicas."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Final

from streamiter.engine.job.running import run_in_own_loop, running_meanwhile, signal_handlers
from streamiter.errors import ConfigurationError, ModelError
from streamiter.models import LinearPredictor, Parameters, ServedModel
from streamiter.models.update import learner_in
from streamiter.service.http.access import Access
from streamiter.service.http.server import serving
from streamiter.service.observing.challenger import Challenger
from streamiter.service.observing.logs import apply_level, log_figures, logging_to
from streamiter.service.observing.observations import SAMPLE_S, LoopBlock, Observations, ProcessRole
from streamiter.service.observing.prediction_log import PredictionLog, file_of_predictions
from streamiter.service.settings.features import FeatureRows
from streamiter.service.settings.file import SettingChange, changed, read_settings
from streamiter.service.settings.tables import ServiceSettings
from streamiter.topics import topic
from streamiter.values.helpers.clock import Clock, SystemClock

_log = logging.getLogger("streamiter.service")

# The exit codes of the process. 130 is that of a program which Ctrl-C ended.
SUCCEEDED: Final = 0
FAILED: Final = 1

# Windows has no such signal. A service under ``nohup``, which ignores it, reads its settings again, too.
_HANGUP: Final = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []

# The last version is found in some milliseconds; where a broker is away, HTTP tells so after this time.
_SEARCH_S: Final = 2.0


class ServiceSurfaces(abc.ABC):
    """The base of :class:`OnlineLearningService` and :class:`ServiceReplica`: all but the work itself.

    A subclass says what the process does (``_work``), and how it ends by a signal while it waits (``_end_of_wait``).
    """

    def __init__(
        self,
        settings: ServiceSettings,
        features: FeatureRows,
        *,
        role: ProcessRole = "service",
        clock: Clock | None = None,
        checkpoint_interval_s: float | None = None,
    ) -> None:
        self.settings = settings
        self.name = settings.name
        """The name of the service, of its flow and of its model."""
        self._features = features
        self._clock = clock or SystemClock()
        self.observations = Observations(
            self.name, limits=settings.health, checkpoint_interval_s=checkpoint_interval_s, clock=self._clock, role=role
        )
        """All that is known about the service."""
        self.observations.texts_at = features.reader.texts_at
        self._updates = topic(settings.publish.topic)
        self.address: str | None = None
        """The address of the HTTP server, such as ``http://127.0.0.1:8080``; None before it listens."""
        self._access: Access | None = None
        self._main: asyncio.Task[Any] | None = None
        self._is_ending = False

    @abc.abstractmethod
    async def _work(self) -> int:
        """Do the work of the process; return its exit code."""

    @abc.abstractmethod
    def _end_of_wait(self) -> None:
        """Note that a signal has ended the process while no job ran."""

    def _meanwhile(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what else runs for as long as the process does, by name."""
        return {}

    def run(self) -> int:
        """Run in an event loop of its own; return the exit code of the process, see :meth:`serve`."""
        with logging_to(sys.stderr, self.settings):
            return run_in_own_loop(self.serve())

    async def serve(self) -> int:
        """Run in this event loop until the work ends; return the exit code of the process. Call it once.

        Raises ConfigurationError for an address that is in use.
        """
        self._main, self._access = asyncio.current_task(), Access(self.settings.http)
        try:
            with (
                signal_handlers(self._on_signal, signal.SIGINT, signal.SIGTERM),
                signal_handlers(self._on_hangup, *_HANGUP, even_ignored=True),
            ):
                async with (
                    self._following(),
                    self._logging_predictions(),
                    serving(self.observations, self.settings.http, self._access) as self.address,
                    running_meanwhile(
                        lag_of_the_event_loop=self.observations.loop_lag.run(self._warn_of_block),
                        tokens_and_certificate=self._access.watch(self._clock),
                        samples=self._sample(),
                        figures_in_the_log=self._log_figures(),
                        **self._meanwhile(),
                    ),
                ):
                    return await self._work()
        except asyncio.CancelledError:
            if not self._is_ending:
                raise
            self._end_of_wait()
            return SUCCEEDED
        except ExceptionGroup as errors:  # A surface has failed.
            for error in errors.exceptions:
                _log.error("the service has failed: %r", error, exc_info=error)
            self.observations.enter("failed", repr(errors.exceptions[0]))
            return FAILED

    def _on_signal(self, *_: object) -> None:
        """End the process while no job runs. While one runs, ``run_jobs`` handles signals."""
        if self._is_ending:
            raise KeyboardInterrupt
        self._is_ending = True
        assert self._main is not None
        self._main.get_loop().call_soon_threadsafe(self._main.cancel)

    def _on_hangup(self, *_: object) -> None:
        assert self._main is not None
        self._main.get_loop().call_soon_threadsafe(self.reload)

    def reload(self) -> None:
        """Read the file of the settings, tokens and certificate again; a file with errors changes nothing."""
        if self._access is not None:
            self._access.reload()
        try:
            settings = read_settings(self.settings.source)
        except ConfigurationError as error:
            _log.error("the settings have not changed: %s", error)
            return
        self.apply(settings)

    def apply(self, settings: ServiceSettings) -> list[SettingChange]:
        """Apply other settings as far as a running process can; return, and log, which ones apply and which do not."""
        changes = changed(self.settings, settings)
        self._take_over(settings)
        self.observations.limits = self.settings.health
        apply_level(self.settings.log)
        for change in changes:
            if change.needs is None:
                _log.info("%s has changed", change.key)
            else:
                _log.warning("%s has changed in the file only: %s", change.key, change.needs)
        return changes

    def _take_over(self, settings: ServiceSettings) -> None:
        """Take over what may change while the process runs."""
        before, given = self.settings, settings.publish
        self.settings = replace(
            before,
            publish=replace(before.publish, every_s=given.every_s, records=given.records),
            log=replace(settings.log, format=before.log.format),
            health=settings.health,
        )

    @contextlib.asynccontextmanager
    async def _following(self) -> AsyncIterator[None]:
        """Follow the published model, and that of the challenger; an error of it is no error of the job."""
        given = self.settings.challenger.file
        features = {"": self._features} if given is None else {"": self._features, given.name: FeatureRows(given.learn)}
        self.observations.served = served = self._follower_of(self.name, features)
        try:
            async with contextlib.AsyncExitStack() as followed:
                if given is not None:
                    other = self._follower_of(given.name, {"": features[given.name]})
                    self.observations.challenger = Challenger(
                        given.name,
                        other,
                        self.settings.challenger,
                        lambda: self.observations.model if self.observations.job is None else None,
                    )
                    await followed.enter_async_context(other)
                await followed.enter_async_context(served)
                # The first request is answered by the last version.
                await served.searched(timeout_s=_SEARCH_S)
                yield
        except ModelError as error:
            _log.warning("%s", error)

    def _follower_of(self, model: str, features: Mapping[str, FeatureRows]) -> ServedModel:
        """Return a follower of a model, whose versions are of learners with these features."""

        def load(parameters: Parameters) -> LinearPredictor:
            own = features.get(learner_in(parameters), self._features)
            return own.predictor(parameters, f"model {model!r}")

        return ServedModel(self._updates, model, load=load, clock=self._clock)

    @contextlib.asynccontextmanager
    async def _logging_predictions(self) -> AsyncIterator[None]:
        """Log predictions, if the settings name a topic for them."""
        if self.settings.predictions.log is None:
            yield
            return
        log = self.observations.prediction_log = PredictionLog(
            self.settings.predictions, self._clock, file_of_predictions(self.settings)
        )
        async with log.writing():
            yield

    def _warn_of_block(self, block: LoopBlock) -> None:
        _log.warning("the event loop was blocked for %.1f s; at work was %s", block.seconds, block.task or "no step")

    async def _sample(self) -> None:
        while True:
            await self._take_sample()
            await self._clock.sleep(SAMPLE_S)

    async def _take_sample(self) -> None:
        """Take one sample of the figures."""
        self.observations.sample()

    async def _log_figures(self) -> None:
        while True:
            every_s = self.settings.log.every_s
            await self._clock.sleep(every_s)
            log_figures(self.observations, every_s)


class ServiceReplica(ServiceSurfaces):
    """Answers as a service of the same settings does, from its published versions alone.

    It reads neither the input nor checkpoints, so any number of replicas may run beside the service, behind a load
    balancer. While the service is away, they answer with its last version. ``/readyz`` tells when a replica has a
    version; flow and checkpoints, which it does not have, are unknown on its page and in its metrics::

        raise SystemExit(ServiceReplica(read_settings("service.toml")).run())
    """

    def __init__(self, settings: ServiceSettings, *, clock: Clock | None = None) -> None:
        """Raises ConfigurationError for ``predictions.exactly_once``, since a replica has no flow."""
        if settings.predictions.exactly_once is not None:
            raise ConfigurationError(
                f"{settings.source}: predictions.exactly_once: expected a log with bounded loss for a replica, given "
                "exactly once, which needs the flow of the service; give replicas a file of their own without this "
                "key, or with wait = true, which loses no answer and may log one twice"
            )
        super().__init__(settings, FeatureRows(settings.learn), role="replica", clock=clock)

    async def _work(self) -> int:
        """Follow until a signal ends the process."""
        self.observations.follow()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    def _end_of_wait(self) -> None:
        _log.info("the replica ends; other replicas, and the service, go on")
        self.observations.enter("finished")
