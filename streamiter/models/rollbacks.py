"""Rollbacks in a trainer: it follows the topic of its own updates, and resumes from a version that was published again.

:func:`~streamiter.models.roll_back` publishes an earlier version of the topic, :func:`import_model` one of a file. The
owner of the model has a :class:`RollbackWatch`, which tells the owner before each mini-batch whether to start again,
and which rollback its next updates follow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from streamiter.errors import ModelError
from streamiter.models.reader import last_update
from streamiter.models.served import Follower
from streamiter.models.update import (
    LEARNER_ENTRY,
    NO_RANK,
    PROMOTED_ENTRY,
    ModelSnapshot,
    ModelUpdate,
    Rank,
    UpdateHeaders,
    check_model_name,
    learner_in,
    shown_rank,
)
from streamiter.models.versions import find_update, publish_again
from streamiter.operators.operator import Context
from streamiter.topics.source_and_sink import ConsumerGroup
from streamiter.topics.topic import Topic, TopicDescription
from streamiter.values.helpers.clock import Clock, SystemClock

_log = logging.getLogger("streamiter.models")


@dataclass(frozen=True, slots=True)
class Rollbacks:
    """The topic and the name under which a trainer's model is published, for ``train_online(rollbacks=)``.

    >>> from streamiter.topics import topic
    >>> Rollbacks(topic("memory://models"), "ctr").model
    'ctr'
    """

    topic: Topic
    """The topic of the updates."""
    model: str
    """The name of the model."""
    learner: str | None = None
    """Only rollbacks to versions of this learner count, where several learners publish under the name: the entry
    ``learner`` of the parameters, ``""`` for versions without it. None: all count."""

    def concern(self, update: ModelUpdate) -> bool:
        """Whether a rollback to this update counts."""
        return self.learner in (None, learner_in(update.parameters))

    def __post_init__(self) -> None:
        check_model_name(self.model)


def early_deletion(topic: Topic, description: TopicDescription, seconds: float) -> str | None:
    """Return why a rollback may be impossible ``seconds`` later, and what to do; None if it is possible, or unknown.

    >>> from streamiter.topics import topic
    >>> early_deletion(topic("memory://models"), TopicDescription("models", {}), 86_400) is None
    True
    """
    early = topic.early_deletion(description.settings, seconds)
    if early is None:
        return None
    return f"versions may be deleted before {seconds / 3600:g} h are over, and one cannot roll back to them: {early}"


async def import_model(topic: Topic, model: str, given: ModelUpdate, *, clock: Clock | None = None) -> ModelUpdate:
    """Publish a model of a file as a new version of ``model``, later than all others; return the new update.

    ``given`` is what :func:`~streamiter.models.read_model` returns. Consumers and trainers take the version over as
    they take over a version of :func:`roll_back`: with the state of its learner, if it carries one.
    """
    check_model_name(model)
    return await publish_again(topic, replace(given, model=model), None, clock or SystemClock())


async def promote(
    topic: Topic, model: str, challenger: str, version: str | None = None, *, clock: Clock | None = None
) -> ModelUpdate:
    """Publish a version of a challenger as a new version of ``model``, later than all others; return the new update.

    None: the newest version. A service whose challenger it is publishes the versions of the challenger from then on.
    The parameters get the entries ``learner``, the challenger's name, and ``promoted``, the version. To go back, roll
    back to a version of before. Raises NoSuchVersion for a version, or a model, that the topic does not have.
    """
    check_model_name(model)
    if challenger == model:
        raise ModelError(
            f"model {model!r}: expected another model as its challenger, given the same name; to publish an "
            "earlier version again, roll back to it"
        )
    await find_update(topic, model)  # Another name, such as a misspelt one, is that of no service.
    given = await find_update(topic, challenger, version)
    if not isinstance(given.parameters, dict):
        raise ModelError(f"model {challenger!r}: expected a version with named parameters to promote, given an array")
    parameters = {**given.parameters, LEARNER_ENTRY: challenger, PROMOTED_ENTRY: shown_rank(given.rank)}
    update = replace(given, model=model, parameters=parameters)
    return await publish_again(topic, update, None, clock or SystemClock())


# ---- trainers


async def since_rollback(rollbacks: Rollbacks, context: Context) -> ModelSnapshot | None:
    """Return the newest version since the last rollback, for a training that begins; None without a rollback.

    A job that is told to begin anew (``restore=None``) begins without it. Raises the errors of the topic.
    """
    update = await last_update(rollbacks.topic, rollbacks.model, on_error="skip", clock=context.clock)
    if update is None or update.since_rollback is None or not rollbacks.concern(update):
        return None
    subject, rollback = _subject(rollbacks), shown_rank(update.since_rollback)
    if context.scope.get(ConsumerGroup, ConsumerGroup).ignores_positions(context.name):
        _log.warning(
            "%s: the job starts without state, so from its initial parameters, and looks for no rollback such as %s",
            subject,
            rollback,
        )
        return None
    _log_start(subject, update)
    return ModelSnapshot(update.parameters, update.records, since_rollback=update.since_rollback)


class RollbackWatch:
    """Follows the topic in a task, from ``open`` to ``close``, and keeps the newest rollback for the trainer.

    An update names the last rollback that its model follows, so a rollback that compaction dropped, or that an earlier
    run has taken over after its last checkpoint, is not missed: the trainer starts from the newest update since that
    rollback. Only updates since a rollback are decoded. :func:`since_rollback` finds the rollbacks that are older than
    the run.
    """

    def __init__(self, rollbacks: Rollbacks | None) -> None:
        self._rollbacks = rollbacks
        self._follower: Follower | None = None
        self._newest: ModelUpdate | None = None
        self._of_others = NO_RANK
        """The last rollback to a version of another learner, whose updates are not decoded."""
        self.taken: Rank | None = None if rollbacks is None else NO_RANK
        """The rank of the last rollback that the trainer has taken over; None for a trainer that follows none."""

    async def open(self, clock: Clock) -> None:
        """Read the newest update, then follow. Raises the errors of the topic, such as ``TopicNotFound``."""
        if self._rollbacks is None:
            return
        topic, model = self._rollbacks.topic, self._rollbacks.model
        self._newest = await last_update(topic, model, on_error="skip", clock=clock)
        if self._newest is not None and (since := self._newest.since_rollback) is not None:
            if self._rollbacks.concern(self._newest):
                self.taken = since
            else:
                self._newest, self._of_others = None, since
        self._follower = Follower(topic, model, clock, self._keep, lambda error: None, self._is_later)
        self._follower.start()

    def restore(self, taken: Sequence[int] | None) -> None:
        """Take over ``taken`` of a checkpoint; None if the trainer did not follow rollbacks then."""
        if self._rollbacks is not None and taken is not None:
            generation, version = taken
            self.taken = (generation, version)

    async def close(self) -> None:
        """End the task."""
        if self._follower is not None:
            await self._follower.stop()

    def take_over(self, start_from: Callable[[ModelUpdate], None]) -> bool:
        """Call ``start_from`` with the newest update of a new rollback; return whether there is one.

        Raises :class:`~streamiter.errors.ModelError` if the trainer cannot start from it, or if following has ended.
        """
        if self._follower is not None and (failure := self._follower.failure) is not None:
            raise ModelError(f"{self._subject}: following rollbacks has ended: {failure}") from failure
        update = self._newest
        if update is None or update.since_rollback is None or not self._is_new(update.since_rollback):
            self._newest = None  # A large model is not kept.
            return False
        try:
            start_from(update)
        except Exception as error:
            raise ModelError(
                f"{self._subject}: the training cannot resume from update {shown_rank(update.rank)}, which a rollback "
                f"has published: {error}; roll back to a version that this training can start from"
            ) from error
        _log_start(self._subject, update)
        self.taken = update.since_rollback
        return True

    def _keep(self, update: ModelUpdate) -> None:
        assert self._rollbacks is not None
        if self._rollbacks.concern(update):
            self._newest = update
        elif update.since_rollback is not None:
            self._of_others = update.since_rollback

    def _is_later(self, headers: UpdateHeaders) -> bool:
        since = headers.since_rollback
        return since is not None and since > self._of_others and self._is_new(since)

    def _is_new(self, rollback: Rank) -> bool:
        return self.taken is not None and rollback > self.taken

    @property
    def _subject(self) -> str:
        assert self._rollbacks is not None
        return _subject(self._rollbacks)


def _subject(rollbacks: Rollbacks) -> str:
    return f"model {rollbacks.model!r} of {rollbacks.topic.url}"


def _log_start(subject: str, update: ModelUpdate) -> None:
    assert update.since_rollback is not None
    how = "with its state" if update.has_state else "with new learning rates, since it carries no state"
    rank, rollback = shown_rank(update.rank), shown_rank(update.since_rollback)
    _log.info(
        "%s: training resumes from update %s, after the rollback or promotion %s, %s", subject, rank, rollback, how
    )
