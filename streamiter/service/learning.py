"""From the settings to a training: labels that come in time, the learner, when versions are published.

``ServiceLearning`` adds the training to the flow of a service.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import orjson

from streamiter.engine.graph.graph import Step
from streamiter.flow.flow import Flow
from streamiter.flow.graph_checks import check_codec
from streamiter.flow.stream import Stream
from streamiter.learn import (
    ADWIN,
    AdaptiveLinearModel,
    FieldWatch,
    LinearModel,
    LinearRegression,
    LogisticRegression,
    OnlineTraining,
    PageHinkley,
    PublishSchedule,
    TrainingAdvice,
    sampled_negatives,
    train_online,
)
from streamiter.learn.late_labels.label_join import LabelJoin
from streamiter.models import Rollbacks
from streamiter.parameter_server.optimizers import Constant, Optimizer
from streamiter.service.observing.prediction_log import LoggedPredictions
from streamiter.service.settings.features import FeatureRows
from streamiter.service.settings.labels import delayed_labels_of, label_of, questions_and_answers, task_of
from streamiter.service.settings.tables import (
    READY_MADE,
    READY_MADE_OPTIONS,
    SERVICE_OPTIMIZERS,
    InputSettings,
    LearnSettings,
    ServiceSettings,
)
from streamiter.topics import Decoder, Json, topic
from streamiter.topics.json_objects import JsonObjects
from streamiter.topics.topic import Topic
from streamiter.values.helpers.importing import imported, of_user
from streamiter.values.numbers import positive
from streamiter.values.records import BATCH_RECORDS

# Each report is a point of the page's charts.
_REPORT_EVERY_S: Final = 1.0
# While the service lags, it learns from this many rows at a time, some 10 ms: half as many as without HTTP, so that
# predictions and probes wait for half as long. More would learn a lag 6 % faster.
_ROWS_OF_A_LAG: Final = BATCH_RECORDS // 4

_ADVICE: Final = TrainingAdvice(
    rows="in the file: look at field, event and key of learn.label, and at learn.features",
    rate=(
        'in the file: learn.learner = "default" needs no scaling and no learning rate; an optimizer needs scales, or a '
        "smaller learning_rate, in learn.settings"
    ),
    labels="learn.label in the file",
)


class ServiceLearning:
    """The training that the settings describe; :meth:`apply` changes its settings that may change while it runs."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self.features = FeatureRows(settings.learn)
        """Reads the rows of the training and of predictions."""
        self._schedule = PublishSchedule(every_s=settings.publish.every_s, records=settings.publish.records)
        rate = _learning_rate(settings.learn)
        self._rate = None if rate is None else ChangeableRate(rate)

    def train(
        self,
        events: Stream,
        rollbacks: Rollbacks | None = None,
        initial: Stream | None = None,
        answers: Stream | None = None,
        history: Stream | None = None,
        answers_history: Stream | None = None,
        *,
        beside: OnlineTraining | None = None,
    ) -> OnlineTraining:
        """Add the training to the flow; ``answers`` are those of a topic of their own; histories come before all.

        ``beside`` is the training of the same events that this one challenges: it refuses what is wrong for both.
        """
        learn = self._settings.learn
        rejections: dict[str, Any] = rejections_of(self._settings.input) if beside is None else {"on_error": "skip"}
        detectors = {"adwin": ADWIN, "page-hinkley": PageHinkley}
        # Keys and classes of the topic must be those of the history.
        as_texts = any(map(has_texts, (self._settings.input.history, self._settings.input.answers_history)))
        options: dict[str, Any] = {
            "label": label_of(learn, as_texts=as_texts),
            "features": self.features,
            "weight": learn.weight,
        }
        if learn.label.event is not None:
            if beside is None:
                events = questions_and_answers(events, answers, learn.label, rejections)
            if history is not None:
                history = questions_and_answers(history, answers_history, learn.label, rejections, of=" of the history")
            options = {"labels": delayed_labels_of(learn, self.features, as_texts=as_texts)}
        if history is not None:
            events = history.then(events, name="history first")
        if learn.negatives is not None and beside is None:
            events = sampled_negatives(events, label=learn.label.field, **learn.negatives, **rejections)
        return train_online(
            events,
            self._make_model(),
            initial=initial,
            publish_every=self._schedule,
            publish_state=self._settings.publish.state,
            mini_batch=learn.learner_settings.get("mini_batch", _rows_of_a_lag(learn)),
            drift=detectors[learn.drift]() if learn.drift else None,
            watch=_watch_of(self._settings) if beside is None else None,
            report_every_s=_REPORT_EVERY_S,
            rollbacks=rollbacks,
            beside=beside,
            name=None if beside is None else challenger_step(self._settings.name),
            advice=_ADVICE,
            **options,
            **rejections,
        )

    def make_ready(self) -> None:
        """Import and compile what the training needs, which takes up to some seconds; another thread may call this."""
        learn, model = self._settings.learn, self._make_model()()
        if isinstance(model, AdaptiveLinearModel):
            model.compile()
        if learn.label.event is not None:
            LabelJoin.compile(also_to_resume=True)

    def apply(self, settings: ServiceSettings) -> None:
        """Take over when to publish, and the learning rate, from other settings of the same service."""
        self._schedule.change(every_s=settings.publish.every_s, records=settings.publish.records)
        if self._rate is not None and (rate := _learning_rate(settings.learn)) is not None:
            self._rate.change(rate)

    def _make_model(self) -> Callable[[], AdaptiveLinearModel] | Callable[[], LinearModel]:
        learn = self._settings.learn
        given = {name: value for name, value in learn.learner_settings.items() if name not in _NOT_THE_OPTIMIZERS}
        if learn.learner in READY_MADE:
            options = {
                name: learn.learner_settings[name] for name in READY_MADE_OPTIONS if name in learn.learner_settings
            }
            options["embeddings"] = self.features.embeddings
            # With shapes, a version has some 90 KB, and a megabyte with the state of its learner, each second.
            options = {"shapes": False} | options
            # Classes of texts and of whole numbers are found as they come.
            options |= {"task": task_of(learn.kind), "positive": learn.label.positive, "other_settings": "keep"}
            options |= {"kinds": self.features.kinds, "time_zone": self.features.time_zone}
            return lambda: AdaptiveLinearModel(**options)
        if self._rate is not None:
            given["learning_rate"] = self._rate
        kind = LinearRegression if learn.kind == "regression" else LogisticRegression
        optimizer: Optimizer = SERVICE_OPTIMIZERS[learn.learner](**given)
        width = self.features.width
        return lambda: kind(width, optimizer=optimizer)


CHALLENGER_STEPS: Final = "challenger "
"""The names of all steps of a challenger, and of no others, begin so."""


def challenger_step(name: str) -> str:
    """Return how the names of the steps of a challenger begin.

    >>> challenger_step("late-flights-b")
    'challenger late-flights-b'
    """
    return f"{CHALLENGER_STEPS}{name}"


def learner_in_words(learn: LearnSettings) -> str:
    """Return what learns, and from what: with others, earlier rows do not say which of two learners is better.

    >>> from streamiter.service.settings.tables import LabelSettings
    >>> learner_in_words(LearnSettings("classification", LabelSettings("late"), features={"km": "number"}))
    '{"fields":{"km":"number"},"label":"late","learner":"default","settings":{},"weight":null}'
    """
    what = {
        "learner": learn.learner,
        "settings": dict(learn.learner_settings),
        "fields": learn.field_kinds if learn.features else dict(learn.kinds),
        "label": learn.label.value,
        "weight": learn.weight,
    }
    # The same keys in another order are no other learner.
    return orjson.dumps(what, default=str, option=orjson.OPT_SORT_KEYS).decode()


_COMPARE: Final = ": compare"
_CHAMPIONS: Final = (_COMPARE, ": model of the champion")
"""The ends of the names of a challenger's steps through which the versions of the champion pass."""


def flow_without_challenger(flow: Flow) -> Flow:
    """Return a flow without the challenger, and without the steps that only read its streams.

    The step that chooses whose versions are published stays, so a promotion still counts. It has another name, and so
    no state: a challenger that comes back is compared from the beginning.
    """
    made, kept = Flow(flow.name, flow.parallelism, state=flow.state), dict[Step, Step]()
    made.plain_data = flow.plain_data
    for step in flow.steps:
        edges = [replace(edge, upstream=kept[edge.upstream]) for edge in step.edges if edge.upstream in kept]
        name, is_of_challenger = step.name, step.name.startswith(CHALLENGER_STEPS)
        if (is_of_challenger and not name.endswith(_CHAMPIONS)) or (step.edges and not edges):
            continue
        if is_of_challenger:
            name = name.replace(_COMPARE, ": stopped")
        is_as_before = [edge.upstream for edge in edges] == [edge.upstream for edge in step.edges]
        kept[step] = made.graph.add(step if is_as_before else replace(step, name=name, edges=edges))
    return made


def _watch_of(settings: ServiceSettings) -> FieldWatch | None:
    given = asdict(settings.watch) | {"name": settings.watch.name or ""}
    return FieldWatch(**given) if given.pop("enabled") and settings.learn.learner in READY_MADE else None


def _rows_of_a_lag(learn: LearnSettings) -> int | None:
    """Return how many rows the learner takes at a time while the service lags; None: as without a service."""
    if learn.learner not in READY_MADE:
        return None
    # A row that is learned has two events.
    return _ROWS_OF_A_LAG if learn.label.event is None else 2 * _ROWS_OF_A_LAG


def _learning_rate(settings: LearnSettings) -> float | None:
    """Return the learning rate of the settings, or else of the optimizer; None for a learner without one."""
    default: float | None = getattr(SERVICE_OPTIMIZERS.get(settings.learner), "learning_rate", None)
    rate: float | None = settings.learner_settings.get("learning_rate", default)
    return rate


_NOT_THE_OPTIMIZERS: Final = ("bits", "scales", "mini_batch")


@dataclass(frozen=True, slots=True)
class ChangeableRate(Constant):
    """A constant learning rate that its owner may change between two steps.

    >>> rate = ChangeableRate(0.5)
    >>> rate.change(0.1)
    >>> rate.at(7)
    0.1
    """

    def change(self, rate: float) -> None:
        """Learn with this rate from now on."""
        object.__setattr__(self, "initial", positive("learning_rate", rate))


def has_texts(history: str | None) -> bool:
    """Whether a history has only texts, as CSV has.

    >>> has_texts("file:trips.csv"), has_texts("file:trips.jsonl"), has_texts(None)
    (True, False, False)
    """
    return history is not None and getattr(topic(history).default_decoder(), "gives_texts", False)


def rejections_of(settings: InputSettings) -> dict[str, Any]:
    """Return the options of a step for records that it refuses."""
    if settings.dead_letter is None:
        return {"on_error": settings.on_error}
    return {"dead_letter": topic(settings.dead_letter)}


def fields_in_columns(settings: ServiceSettings) -> list[str] | None:
    """Return the fields that the training reads, if it reads no others and may read columns; None: it reads dicts.

    It reads dicts if all fields are features, if each record has a comparison as its label, and where a step before it
    handles records one by one: answers of a topic of their own, events of other kinds, weights, negatives, and learners
    with an optimizer. What it learns is the same.
    """
    learn, label = settings.learn, settings.learn.label
    one_by_one = (settings.input.answers, label.question, learn.weight, learn.negatives)
    has_rows = label.event is not None or isinstance(label.value, str)
    if not has_rows or learn.features is None or learn.learner not in READY_MADE or any(one_by_one):
        return None
    others = () if settings.challenger.file is None else fields_in_columns(settings.challenger.file)
    read = (label.field, label.key, label.time, label.event and label.event_field, *learn.field_kinds)
    return None if others is None else list(dict.fromkeys([*filter(None, read), *others]))


def decoder_for(settings: ServiceSettings, read: Topic) -> Decoder | None:
    """Return the decoder of a topic of the input; None: the topic chooses."""
    name, fields = settings.input.decoder, fields_in_columns(settings)
    is_json = name == "json" or (name == "default" and read.default_decoder() is None)
    return JsonObjects(fields) if is_json and fields is not None else decoder_of(name)


def decoder_of(name: str) -> Decoder | None:
    """Return the decoder ``json``, ``predictions`` or of ``module:name``: an object, or a class without arguments.

    ``predictions`` reads a log of predictions. None for ``default``: the topic chooses. Raises ConfigurationError for a
    module or a name that does not exist or fails, and GraphError for an object that is no decoder.
    """
    if name == "predictions":
        return LoggedPredictions()
    if name in ("default", "json"):
        return Json() if name == "json" else None
    owner = f"input.decoder: {name}"
    found = of_user(lambda: imported(name, "input.decoder", "a decoder"), f"{owner} cannot be imported")
    decoder: Decoder = of_user(found, f"{owner} failed") if isinstance(found, type) else found
    check_codec(decoder, "decode", step="events")
    return decoder
