"""When a question with a late label is learned: what each schedule assumes, takes back, and keeps between two runs."""

import math
from collections import Counter
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from learn.frozen_states import frozen
from learn.late_label_support import LABELS, SCHEDULES, Loop, Trained, events, in_two_runs, start_of, timed
from learn.online_support import Record

from streamiter.learn import LogisticRegression, SparseRows
from streamiter.learn.gradients.training import GradientSum
from streamiter.learn.online.gradient_workers import DelayedLabelsWorker, OnlineWorkerOptions
from streamiter.models import LinearPredictor
from streamiter.parameter_server.optimizers import SGD
from streamiter.testing import VirtualClock


@pytest.mark.parametrize(
    ("shares", "delay_s", "within_s"),
    [({"a": 0.5, "b": 0.2}, (1, 40), 60.0), ({"a": 0.12, "b": 0.02}, (500, 1_500), 2_000.0)],
    ids=["frequent and soon", "rare and late"],
)
def test_predictions_have_no_bias_after_the_first_wait(
    shares: dict[str, float], delay_s: tuple[float, float], within_s: float
) -> None:
    """Only positives were learned until the first wait was over, and every prediction tended to 1.

    The last answers come when there are no questions any more: what is published then must not follow them. A quarter
    of the rare stream has 205 True, a standard error of 7 %: "weighted" cannot keep a bound of a tenth there.
    """
    given = start_of(shares, delay_s, 20_000)
    losses = {}
    for schedule in (None, "weighted"):
        labels = replace(LABELS, within_s=within_s, schedule=schedule, features=["kind"])
        found = Trained(labels, lambda flow: timed(flow.from_items(given, parallelism=1)))
        assert found.metrics["count"] == 20_000
        losses[schedule] = found.metrics["loss"]
        waits = round(within_s)
        assert found.predictions[: waits // 2].max() <= 0.5 + 0.5 * (max(shares.values()) > 0.3)
        after = slice(2 * waits, 20_000 - 2 * waits)  # With "weighted", positives are settled before negatives.
        for predictions, targets in zip(
            np.array_split(found.predictions[after], 4), np.array_split(found.targets[after], 4), strict=True
        ):
            bound = 0.1 if schedule is None else 0.25
            assert abs(predictions.mean() - targets.mean()) < bound * targets.mean()
        if schedule is None:
            predict = LinearPredictor(found.parameters)
            for kind, share in shares.items():
                assert abs(float(predict({"kind": kind})) - share) < 0.25 * share + 0.02
    best = float(np.mean([-p * math.log(p) - (1 - p) * math.log(1 - p) for p in shares.values()]))
    # The default learns nothing in the first wait, and knows only a lower bound of the share.
    assert losses[None] < best + 0.03
    assert losses["weighted"] < best + 0.02


def test_a_late_answer_never_ends_a_job_by_default() -> None:
    """The first answer after its wait ended a training whose policy was to fail."""
    given = [
        {"id": 1, "at": 0, "kind": "a", "x": 1.0},
        {"id": 2, "at": 9_000, "kind": "a", "x": 1.0},
        {"id": 1, "at": 9_001, "label": True},
        {"id": 3, "at": 9_500, "kind": "a", "x": 1.0},
    ]
    found = Trained(LABELS, lambda flow: timed(flow.from_items(given, parallelism=1)))
    assert (found.late, found.metrics["count"]) == (1, 3)
    with pytest.raises(Exception, match="an answer without a question that waits for it"):
        Trained(replace(LABELS, unknown="refuse"), lambda flow: timed(flow.from_items(given, parallelism=1)))


def test_rows_before_the_first_label_are_validated() -> None:
    """The count of validation left out the questions that were asked before the first label was known."""
    given = [{"id": n, "at": 100 * n, "kind": "a", "x": 1.0} for n in range(50)]
    given += [{"id": n, "at": 5_000 + n, "label": n % 2 > 0} for n in range(50)]
    for schedule in SCHEDULES:
        labels = replace(LABELS, within_s=100.0, schedule=schedule)
        found = Trained(labels, lambda flow: timed(flow.from_items(given, parallelism=1)))
        assert found.metrics["count"] == 50
        assert np.isfinite(found.predictions).all()
        assert Counter(found.targets.tolist()) == {0.0: 25, 1.0: 25}


def test_the_default_waits_no_longer_than_answers_take() -> None:
    """Each question was learned a day later, since labels may take a day, where most answers came within minutes."""
    shares, found = {"a": 0.5, "b": 0.1}, {}
    given = start_of(shares, (1, 40), 6_000)
    # The kinds change places every 1,000 questions.
    given = [e | ({"kind": "ab"[e["kind"] == "a"]} if "kind" in e and e["id"] // 1_000 % 2 else {}) for e in given]
    for schedule in (None, "end"):
        labels = replace(LABELS, within_s=900.0, schedule=schedule, features=["kind"])
        found[schedule] = Trained(labels, lambda flow: timed(flow.from_items(given, parallelism=1))).metrics["loss"]
    assert found[None] < found["end"] - 0.03


def test_an_outage_of_answers_is_no_sign_of_false() -> None:
    """While no answers came, all questions were learned as False, and predictions fell to nothing."""
    draw, given = Random(6), []
    for n in range(4_000):
        given.append({"id": n, "at": 1_000 * n, "kind": "a", "x": 0.5})
        if draw.random() < 0.3:
            at = 1_000 * n + draw.randrange(20_000)
            given.append({"id": n, "at": max(at, 3_100_000) if at > 3_000_000 else at, "label": True})
    given.sort(key=itemgetter("at"))
    labels = replace(LABELS, within_s=200.0, features=["kind"])
    found = Trained(labels, lambda flow: timed(flow.from_items(given, parallelism=1)))
    assert abs(found.predictions[found.questions.argsort()][3_020:3_100].mean() - 0.3) < 0.1


def test_answers_in_bursts_make_no_clumps_of_true() -> None:
    """All answers of an hour were learned in one go, but few questions as False before: the loss was a half higher."""
    draw, given = Random(8), []
    for n in range(12_000):
        given.append({"id": n, "at": 1_000 * n, "kind": "ab"[n % 2], "x": 0.5})
        if draw.random() < (0.12, 0.02)[n % 2]:
            at = 1_000 * n + draw.randrange(100_000, 1_000_000)
            given.append({"id": n, "at": -(-at // 600_000) * 600_000, "label": True})
    given.sort(key=itemgetter("at"))
    labels = replace(LABELS, within_s=2_000.0, features=["kind"])
    losses = {}
    for schedule in (None, "end"):
        found = Trained(replace(labels, schedule=schedule), lambda flow: timed(flow.from_items(given, parallelism=1)))
        losses[schedule] = found.metrics["loss"]
        made = found.predictions[found.questions.argsort()][4_000:]
        assert abs(made.mean() - 0.07) < 0.007
    assert losses[None] < 1.01 * losses["end"]


@pytest.mark.parametrize("pair", [("no", "yes"), (0, 1), (np.False_, np.True_)], ids=str)
def test_any_two_labels_are_learned_as_true_and_false(pair: tuple[Any, Any]) -> None:
    """Only the very object False got the default schedule: with "no", 0 or numpy's False the model was a wait old."""
    given, found = start_of({"a": 0.5, "b": 0.1}, (1, 40), 1_500), []
    for negative, positive in (pair, (False, True)):
        labels = replace(
            LABELS,
            within_s=300.0,
            features=["kind"],
            otherwise=negative,
            target_of=lambda answer, names=(negative, positive): names[answer["label"]],
        )
        found.append(Trained(labels, lambda flow, labels=labels: timed(flow.from_items(given, parallelism=1))))
    assert found[0].predictions.tobytes() == found[1].predictions.tobytes()
    assert found[0].metrics["loss"] == found[1].metrics["loss"]
    assert found[0].parameters["weights"].tobytes() == found[1].parameters["weights"].tobytes()


@pytest.mark.parametrize("third", ["aye", 2.5, "maybe"])
def test_a_label_that_is_no_negative_one_is_never_assumed(third: Any) -> None:
    """Of "no" and "aye" the positive one is "no"; of three texts each is a class; and 0 may be a number."""
    names = (third, "yes" if third == "maybe" else third)
    given = [event | ({"label": names[event["id"] % 2]} if "label" in event else {}) for event in events(1_500)]
    labels = replace(LABELS, schedule="expected", otherwise="no" if isinstance(third, str) else 0)
    found = [
        Trained(each, lambda flow: timed(flow.from_items(given, parallelism=1)))
        for each in (labels, replace(labels, schedule="end"))
    ]
    assert found[0].bits == found[1].bits
    assert found[0].metrics == found[1].metrics


@pytest.mark.parametrize(
    "second", [{"schedule": "end"}, {"schedule": "weighted"}, {"otherwise": True}, {"weight_of": lambda answer: 1.0}]
)
@pytest.mark.parametrize("is_back", [False, True])
async def test_the_schedule_may_change_between_two_runs(second: dict[str, Any], is_back: bool, tmp_path: Path) -> None:
    """A change of `otherwise` was refused, since the default schedule became another one."""
    first = replace(LABELS, features=["kind"])
    before, after = [first, replace(first, **second)][:: -1 if is_back else 1]
    _, predictions, metrics = await in_two_runs(events(2_000), 2_400, (before, after), tmp_path)
    assert metrics[-1]["count"] == 2_000
    made, targets = (np.concatenate([rows[field] for rows in predictions]) for field in ("predictions", "targets"))
    assert "otherwise" in second or abs(made.mean() - targets.mean()) < 0.05


@pytest.mark.parametrize("is_rolled_back", [False, True])
def test_a_question_that_waits_is_plain_for_the_model_of_a_rollback(is_rolled_back: bool) -> None:
    """A True answer took back what only the model before the rollback had learned: predictions were too high."""
    model = LogisticRegression(2, optimizer=SGD(0.2))
    labels = replace(LABELS, features=lambda rows: SparseRows.from_dense([[0.5, 1.0]] * len(rows)), schedule="weighted")
    worker = DelayedLabelsWorker(OnlineWorkerOptions(lambda: model, None, synchronous=False), labels)  # type: ignore[arg-type]
    worker.open(
        SimpleNamespace(name="join", epoch=0, parallelism=2, subtask_index=0, clock=VirtualClock(), set_timer=print)
    )  # type: ignore[arg-type]
    parameters = model.parameters(state=False)
    reports: list[Any] = []
    out: Any = SimpleNamespace(emit=lambda record, tag=None: reports.append((tag, record)))
    worker.process_model(parameters, out)
    worker.process_examples([{"id": 1, "x": 0.5}], out)
    worker.process_model(parameters | ({"starts": 1} if is_rolled_back else {}), out)
    worker.process_examples([{"id": 1, "label": True}], out)
    records = [GradientSum.from_record(report).gradient for tag, report in reports if tag is None]
    assert [gradient.records for gradient in records if gradient is not None] == [1, int(is_rolled_back)]


async def test_a_restart_in_the_middle_keeps_what_is_known_of_delays(tmp_path: Path) -> None:
    """After a restart questions would wait as if nothing was known of answers: another model than without it."""
    given = events(1_500)
    models, _, _ = await in_two_runs(given, 2_100, (LABELS, LABELS), tmp_path)
    loop = Loop(given, "expected")
    assert loop.assumed
    assert frozen(models[-1].parameters) == frozen(loop.model.parameters(state=False))


@pytest.mark.parametrize("model", [None, lambda: LogisticRegression(2, optimizer=SGD(0.2))], ids=["rows", "gradients"])
def test_an_assumed_question_that_has_no_label_is_taken_back(model: Any) -> None:
    """Questions that were learned as False, and then had no label, made predictions too low."""
    draw, given = Random(4), []
    for n in range(4_000):
        given.append({"id": n, "at": 100 * n, "kind": "a", "x": 0.5})
        at, is_true = 100 * n + draw.randrange(3_500), draw.random() < 0.4
        if is_true or draw.random() < 0.5:
            given.append({"id": n, "at": at, "label": is_true if is_true or n < 1_500 else None})
    labels, options = replace(LABELS, schedule="expected"), {}
    if model is not None:
        labels = replace(labels, features=lambda rows: SparseRows.from_dense([[0.5, 1.0]] * len(rows)))
        options = {"model": model, "workers": 1, "mini_batch": 50}
    given.sort(key=itemgetter("at"))
    found = Trained(labels, lambda flow: timed(flow.from_items(given, parallelism=1)), **options)
    assert abs(found.predictions[-1_000:].mean() - 0.4 / 0.7) < 0.06


@pytest.mark.parametrize("kind", ["number", "classes"])
def test_numbers_and_classes_are_learned_at_the_end_of_the_wait(kind: str) -> None:
    """A fake label False was learned for questions whose label is a number or a text."""
    given = [
        event | ({"label": 3.0 if kind == "number" else "yes"} if "label" in event else {}) for event in events(300)
    ]
    labels = replace(LABELS, otherwise=1.5 if kind == "number" else "no")
    assert labels.chosen_schedule() == ("end" if kind == "number" else "expected")
    assert replace(LABELS, weight_of=lambda answer: 2.0).chosen_schedule() == "end"
    task: Any = "regression" if kind == "number" else None
    found = Trained(labels, lambda flow: timed(flow.from_items(given, parallelism=1)), task=task)
    assert found.metrics["count"] + found.version_metrics.get("unpredicted_rows", 0) == found.records == 300


def test_a_schedule_for_true_and_false_takes_other_numbers() -> None:
    """A model that had found numbers was told to learn a question as False, which ended the job."""
    given = [event | ({"label": 1.5 + event["id"] % 3} if "label" in event else {}) for event in events(1_500)]
    labels = replace(LABELS, schedule="expected", otherwise=0)
    found = Trained(labels, lambda flow: timed(flow.from_items(given, parallelism=1)))
    assert found.metrics["count"] == found.records == 1_500


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_a_wait_may_become_longer_or_shorter_between_two_runs(schedule: Any, tmp_path: Path) -> None:
    """With a longer wait up to a quarter of the questions of a checkpoint were never learned."""
    questions = [{"id": n, "at": 1_000 * n, "kind": "ab"[n % 2], "x": n % 5 / 5} for n in range(30)]
    answers = [{"id": n, "at": 1_000 * n + 12_000, "label": n % 4 > 1} for n in range(0, 30, 2)]
    given = sorted([*questions, *answers], key=lambda event: event["at"])
    for number, (before_s, after_s) in enumerate([(5, 20), (20, 5), (5, 5), (20, 20)]):
        for cut in (7, 35) if before_s != after_s else (20,):
            waits = tuple(replace(LABELS, within_s=float(each), schedule=schedule) for each in (before_s, after_s))
            models, _, metrics = await in_two_runs(given, cut, waits, tmp_path / f"{number} {cut}")  # type: ignore[arg-type]
            assert models[-1].records == metrics[-1]["count"] == 30, (before_s, after_s, cut)


@pytest.mark.parametrize("model", [None, lambda: LogisticRegression(2, optimizer=SGD(0.2))], ids=["rows", "gradients"])
@pytest.mark.parametrize("lost", ["none", "bad", "raises", "asked again", "delivered again", "too many"])
def test_a_question_without_a_label_leaves_no_trace(lost: str, model: Any) -> None:
    """With weights, a question that never got a label stayed learned as False: predictions were half of the share."""
    draw, given = Random(3), []
    for n in range(800):
        given.append({"id": n, "at": 100 * n, "kind": "a", "x": 0.5})
        if lost == "asked again" and n % 2:
            given.append({"id": n, "at": 100 * n + 10, "kind": "a", "x": 0.5})
        has_no_label = lost in ("none", "bad", "raises") and n % 2
        label: Any = {"none": None, "bad": "maybe", "raises": [1]}[lost] if has_no_label else draw.random() < 0.6
        given.append({"id": n, "at": 100 * n + 1_050, "label": label})
        if lost == "delivered again":
            # Behind the answer, as a producer that starts again with what it has not confirmed sends it.
            given.append({**given[-2], "sent": 100 * n + 1_300})
    given.sort(key=lambda event: event.get("sent", event["at"]))

    def target_of(answer: Record) -> Any:
        return answer["label"] if lost != "raises" else answer["label"] + 0

    labels = replace(LABELS, schedule="weighted", target_of=target_of, waiting_max=8 if lost == "too many" else 1_000)
    options: Any = {}
    if model is not None:
        labels = replace(labels, features=lambda rows: SparseRows.from_dense([[0.5, 1.0]] * len(rows)))
        options = {"model": model, "workers": 1, "mini_batch": 50}
    found = Trained(labels, lambda flow: timed(flow.from_items(given, parallelism=1)), on_error="skip", **options)
    lost_all = lost == "too many"
    is_complete = lost in ("asked again", "delivered again")
    assert (found.metrics["count"] == 800) is is_complete
    half = len(found.predictions) // 2
    if not lost_all:
        assert abs(found.predictions[half:].mean() - found.targets[half:].mean()) < 0.08
        assert abs(found.targets[half:].mean() - 0.6) < 0.08
