"""A challenger beside a training: rows meet by their number, and the bound of the difference holds at any time."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from flow.test_topics_in_flows import made
from iteration.iteration_support import cut_items, run
from learn.online_support import DELAYED, FEATURES, Record, trips
from learn.test_comparison import Heard, predicted
from learn.test_late_labels import delayed_events
from models.model_case import write

from streamiter import Flow, topic
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import GraphError, ModelError
from streamiter.learn import LogisticRegression, SquaredLoss, train_online
from streamiter.learn.losses import LogLoss
from streamiter.learn.online.challengers import (
    CHALLENGER,
    CHALLENGER_STOPPED,
    DIFFERENCE_MAX,
    CompareChallenger,
    ComparedRows,
    MeanDifference,
    challenged,
)
from streamiter.models import ModelSnapshot, ModelUpdateEncoder, Rollbacks, promote
from streamiter.testing import RestoreProcess, check_restore
from streamiter.topics import MemoryBroker
from streamiter.values.helpers.clock import SystemClock
from streamiter.values.numbers import Floats

STREAMS, ROWS = 250, 1_200


def equal(draw: np.random.Generator) -> tuple[Floats, Floats]:
    """Differences of two equally good learners, a few of them large, and their expectations."""
    is_rare = draw.random((STREAMS, ROWS)) < 0.02
    noise = draw.uniform(-0.05, 0.05, (STREAMS, ROWS))
    return np.where(is_rare, 1.9, -1.9 * 0.02 / 0.98) + noise, np.zeros((STREAMS, ROWS))


def changing(draw: np.random.Generator) -> tuple[Floats, Floats]:
    """Differences whose expectation wanders, and depends on the row before."""
    noise, expected, found = draw.uniform(-0.8, 0.8, (STREAMS, ROWS)), np.zeros((2, STREAMS, ROWS)), 0.0
    for row in range(ROWS):
        expected[0, :, row] = 0.6 * found + 0.2 * np.sin(row / 300)
        found = expected[1, :, row] = expected[0, :, row] + noise[:, row]
    return expected[1], expected[0]


def test_one_may_look_and_stop_at_any_time() -> None:
    """A challenger as good as the champion was promoted by who looked every minute until it seemed better."""
    looks = sorted({int(1.1**n) for n in range(1, 200) if 1.1**n < ROWS} | {ROWS})
    wrong = wrong_for_one_look = 0
    for seed, differences in enumerate((equal, changing)):
        found, expected = differences(np.random.default_rng(seed))
        counts = np.arange(1, ROWS + 1)
        means, truth = np.cumsum(found, axis=1) / counts, np.cumsum(expected, axis=1) / counts
        # The interval for one look, of the deviation of the rows themselves.
        half = 1.96 * np.sqrt((np.cumsum(found**2, axis=1) / counts - means**2) / counts)
        is_wrong = np.abs(means - truth) > half
        wrong_for_one_look += np.count_nonzero(is_wrong[:, [rows - 1 for rows in looks if rows > 100]].any(axis=1))
        for stream in range(STREAMS):
            bound, first = MeanDifference(), 0
            bounds = []
            for rows in looks:
                bound.add(found[stream, first:rows])
                bounds.append(bound.bound())
                first = rows
            at_looks = truth[stream, np.array(looks) - 1]
            _, least, most = np.array(bounds).T
            wrong += not np.all((least <= at_looks) & (at_looks <= most))
    assert wrong <= 0.05 * 2 * STREAMS
    assert wrong_for_one_look > 0.15 * 2 * STREAMS  # The streams are hard enough to tell both apart.


def test_a_difference_is_found_and_the_sums_do_not_depend_on_cuts() -> None:
    """A bound that never closed was never wrong."""
    found = np.random.default_rng(1).normal(-0.05, 0.3, 20_000).clip(-DIFFERENCE_MAX, DIFFERENCE_MAX)
    whole, cut = MeanDifference(), MeanDifference()
    whole.add(found)
    closed = None
    for rows in np.array_split(found, 997):
        restored = MeanDifference()
        restored.restore(cut.state())
        restored.add(rows)
        cut = restored
        if closed is None and cut.bound().most < 0.0:
            closed = cut.count
    assert cut.state() == whole.state()
    assert closed is not None
    assert 500 < closed < 2_000
    assert whole.bound().most - whole.bound().least < 0.025
    assert MeanDifference().bound().least == -DIFFERENCE_MAX


class Both:
    """A champion that knows little, and a challenger that may join later: what is told about them."""

    def __init__(self, flow: Flow, stream: Any, models: Any, *, after: int, **options: Any) -> None:
        shared = {"report_every": 100_000, "mini_batch": 20, **options}
        features = {} if "labels" in options else {"features": ["wind"]}
        champion = train_online(stream, **shared, **features)
        features = {} if "labels" in options else {"features": FEATURES}
        challenger = train_online(stream, **{**shared, **features}, beside=champion, name="b")
        rollbacks = Rollbacks(models, "late", "b")
        served, own = challenged(champion, challenger, rollbacks, after=after, name="b")
        self._own, self._served = own.collect(), served.collect()
        self._predicted = [each.predictions.collect() for each in (champion, challenger)]

    @property
    def told(self) -> ComparedRows | None:
        return ComparedRows.of(self._own.items[-1].metrics)

    @property
    def first_label(self) -> int:
        """The number of the event that told the challenger its first label."""
        return int(self._predicted[1].items[0]["numbers"][0])

    def losses(self, label: str) -> list[dict[int, float]]:
        """The loss of champion and challenger by the number of the record, or of the question."""
        loss: Any = SquaredLoss() if label == "minutes" else LogLoss()
        return [
            {
                int(which): value
                for rows in predicted.items
                for which, value in zip(
                    rows.get("questions", rows["numbers"]),
                    loss.values(rows["predictions"], rows["targets"]).tolist(),
                    strict=True,
                )
            }
            for predicted in self._predicted
        ]


async def compared(records: list[Record], seed: int, *, after: int = 0, **options: Any) -> Both:
    """Compare under the schedule of a seed."""
    models = await made(MemoryBroker(), "models")
    flow = Flow("f")
    both = Both(flow, cut_items(flow, records, seed=seed), models, after=after, **options)
    await asyncio.to_thread(run, flow, seed=seed, limits=ChannelLimits(records=4 + 30 * seed))
    return both


@pytest.mark.parametrize("label", ["late", "minutes"])
async def test_the_rows_of_both_learners_meet_whatever_the_schedule(label: str) -> None:
    """Losses of other rows were compared, and the bound depended on how far one learner was ahead."""
    seen, first = [], int(label == "minutes")  # Nothing is known of the first number.
    for seed in (0, 3):
        both = await compared(trips(900), seed, after=300, label=label)
        champion, challenger = both.losses(label)
        assert champion.keys() == challenger.keys() == set(range(first, 900))
        told = both.told
        assert told is not None
        assert told.compared_rows == 600 - first
        assert told.champion_loss == pytest.approx(np.mean([champion[row] for row in range(300 + first, 900)]))
        assert told.challenger_loss == pytest.approx(np.mean([challenger[row] for row in range(300 + first, 900)]))
        seen.append(told)
    assert seen[0] == seen[1]
    assert told.verdict == "better"
    if label == "late":
        differences = [challenger[row] - champion[row] for row in range(300, 900)]
        assert told.cut_differences == sum(abs(each) > DIFFERENCE_MAX for each in differences)
        assert told.loss_difference == pytest.approx(np.clip(differences, -DIFFERENCE_MAX, DIFFERENCE_MAX).mean())


async def test_late_labels_meet_by_their_question() -> None:
    """Labels that one learner settles at another event than the other were never compared."""
    seen = []
    for seed in (0, 3):
        both = await compared(delayed_events(200, "late"), seed, labels=replace(DELAYED, waiting_max=1_000))
        champion, challenger = both.losses("late")
        assert champion == challenger
        told, first = both.told, both.first_label
        assert told is not None
        # What was asked before the challenger had learned anything does not count.
        assert told.compared_rows == sum(question >= first for question in champion) > 120
        assert (told.loss_difference, told.verdict) == (0.0, "not known yet")
        seen.append(told)
    assert seen[0] == seen[1]


def test_a_training_beside_another_reads_its_mini_batches() -> None:
    """Learners that number their rows each for itself would be compared on other rows, without a word."""
    flow = Flow("f")
    rows = flow.from_items(trips(10), parallelism=1)
    plain = train_online(rows, lambda: LogisticRegression(1), label="late", features=lambda rows: [[1.0]] * len(rows))
    with pytest.raises(GraphError, match=r"expected two trainings of the ready-made model.*given one of another model"):
        train_online(rows, label="late", beside=plain)
    with pytest.raises(GraphError, match="given another model or mode"):
        train_online(rows, label="late", mode="synchronous", beside=train_online(rows, label="late"))


# ---- the operator


class WithoutTopic(CompareChallenger):
    """Finds no earlier rollback: the process that restores it has no topic."""

    async def open(self, context: Any) -> None:
        self._context = context


def compare() -> CompareChallenger:
    return WithoutTopic(Rollbacks(topic("memory://models"), "late", "b"), after=4)


def versioned(learner: str, version: int, since: tuple[int, int] = (0, 0)) -> Record:
    parameters = {"weights": np.full(2, float(version))}
    return {"learner": learner, "model": ModelSnapshot(parameters, version, since_rollback=since)}


def settled(learner: str, numbers: Any, questions: Any, error: float) -> Record:
    told = predicted(learner, numbers, error)
    told["rows"]["questions"] = np.array(questions)
    return told


TOLD = [
    record
    for n in range(1, 6)
    for record in (
        settled("", range(5 * n, 5 * n + 5), range(5 * n, 5 * n + 5), 0.3),
        versioned("", n, (3, 1) if n > 4 else (0, 0)),
        # It settles each question five events later.
        *([settled("b", range(5 * n, 5 * n + 5), range(5 * n - 5, 5 * n), 0.1)] if n > 1 else []),
        versioned("b", n, (2, 1) if n > 2 else (0, 0)),
    )
]


def test_a_restored_comparison_continues_as_one_that_was_never_stopped(restore_process: RestoreProcess) -> None:
    """After a restart late labels that waited for the other learner were lost, or another learner was served."""
    check_restore("learn.test_challengers:compare", TOLD, tags=[CHALLENGER], cuts=9, process=restore_process)


async def test_the_last_rollback_says_whose_versions_are_served() -> None:
    """A version of the champion, trained before a promotion, replaced the challenger that was promoted."""
    operator, heard = compare(), Heard()
    timers: list[float] = []
    clock = SimpleNamespace(monotonic_s=lambda: sum(timers))
    operator._context = cast(Any, SimpleNamespace(clock=clock, set_timer=timers.append))
    for told in TOLD:
        operator.process(cast(Any, told), cast(Any, heard))
    served = [(model.records, model.parameters.get("learner", "")) for model in heard.reports]
    assert served == [(1, ""), (2, ""), (3, ""), (3, "b"), (4, "b"), (5, "")]
    assert [model.since_rollback for model in heard.best] == [None] * 5
    told = ComparedRows.of(heard.best[-1].metrics)
    assert told is not None
    assert told.compared_rows == 11
    assert heard.best[1].metrics == {}
    # Rows that are compared after the last version are told with this version again, unless another one comes soon.
    for more in (settled("", range(30, 35), range(30, 35), 0.3), settled("b", range(30, 35), range(25, 30), 0.1)):
        operator.process(cast(Any, more), cast(Any, heard))
    await operator.on_timer(None, cast(Any, heard))
    assert (len(heard.best), timers) == (5, [2.0, 2.0])
    await operator.on_timer(None, cast(Any, heard))
    told = ComparedRows.of(heard.best[-1].metrics)
    assert told is not None
    assert (told.compared_rows, heard.best[-1].records) == (16, 5)
    await operator.on_timer(None, cast(Any, heard))
    operator.finish(cast(Any, heard))
    assert len(heard.best) == 6
    # At the end of a stream no other version comes, and no timer is due: the last rows were told of by nobody.
    for more in (settled("", range(35, 40), range(35, 40), 0.3), settled("b", range(35, 40), range(30, 35), 0.1)):
        operator.process(cast(Any, more), cast(Any, heard))
    operator.finish(cast(Any, heard))
    told = ComparedRows.of(heard.best[-1].metrics)
    assert told is not None
    assert (told.compared_rows, len(heard.best)) == (21, 7)


async def test_a_start_finds_the_learner_that_was_promoted() -> None:
    """After a start without a checkpoint the champion was served again, or the versions of nobody."""
    models, clock = await made(MemoryBroker(), "models"), SystemClock()
    for name in ("late", "b"):
        await write(
            models, ModelUpdateEncoder(name, 1, clock=clock).encode([ModelSnapshot({"weights": np.zeros(2)}, 7)])
        )
    promoted = await promote(models, "late", "b", "1.1")
    assert (promoted.rank, promoted.parameters["learner"], promoted.parameters["promoted"]) == ((2, 1), "b", "1.1")
    timers: list[Any] = []
    context, heard = cast(Any, SimpleNamespace(clock=clock, set_timer=lambda *timer: timers.append(timer))), Heard()
    operator = CompareChallenger(Rollbacks(models, "late", "b"), after=0)
    await operator.open(context)
    for told in (versioned("", 8), versioned("b", 9, (2, 1))):
        operator.process(cast(Any, told), cast(Any, heard))
    assert [model.records for model in heard.reports] == [9]
    with pytest.raises(ModelError, match=r"given 2\.1, of 'b'; name the file of that one in \[challenger\]"):
        await CompareChallenger(Rollbacks(models, "late", "c"), after=0).open(context)
    # Replicas learned with the next version that the challenger had stopped, or ran again: on a quiet stream, never.
    for has_stopped in (True, False):
        operator = CompareChallenger(Rollbacks(models, "late", "b"), after=0, has_stopped=has_stopped)
        await operator.open(context)
        for _ in range(2):
            await operator.on_timer(timers[-1][1], cast(Any, heard))
        assert timers.pop()[0] == 0.0
        assert not timers
        told = heard.reports[-1]
        assert (told.records, told.metrics.get(CHALLENGER_STOPPED)) == (7, 1.0 if has_stopped else None)
        assert (told.parameters["learner"], told.since_rollback) == ("b", (2, 1))
        await write(models, ModelUpdateEncoder("late", 2, clock=clock).encode([told]))
    assert len(heard.reports) == 3
