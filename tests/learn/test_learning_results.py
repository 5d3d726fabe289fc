"""The benchmark of learning quality: learners of several libraries learn a stream, and a page shows their losses."""

import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import learning, learning_late, learning_late_real, learning_streams
from benchmarks.learning_late_streams import LATE_STREAMS, SCHEDULES, LateStream, Schedule, order
from benchmarks.learning_peers import (
    AMF,
    FOREST,
    LEARNERS,
    LINEAR,
    OURS,
    TREE,
    installed_learners,
    loss,
    losses,
    without_flow,
)
from benchmarks.learning_streams import LearningStream, MissingStream, Task
from benchmarks.row_steps import row_steps
from benchmarks.session import PROJECT, Session
from streamiter import Columns
from streamiter.learn import SparseRows

ROWS = 300


def stream(task: Task, *, is_sparse: bool = False) -> LearningStream:
    """Return a stream with a number and a text, or with the places of texts; the label follows from them."""
    drawn = np.random.default_rng(seed=3)
    number, town = drawn.normal(size=ROWS), drawn.integers(0, 3, ROWS)
    scores = number + town
    labels = {"binary": scores > 1.0, "classes": np.array(["a", "b b", "c:c"])[town], "number": scores}[task]
    features: Columns | SparseRows = Columns({"number": number, "town": np.array(["Rom", "La Paz", "x:|"])[town]})
    if is_sparse:
        features = SparseRows(np.arange(ROWS + 1), town, np.ones(ROWS), 3)
    return LearningStream("small stream", task, features, labels)


def late(events: np.ndarray) -> LearningStream:
    """Return the stream with truth values whose labels come later."""
    given = stream("binary")
    return LearningStream("late", "binary", given.features, given.labels, events)


def learner(name: str):
    """Return the learner, or skip the test where its package is missing."""
    if name != OURS:
        pytest.importorskip("vowpalwabbit" if name.startswith("VW") else "river")
    return LEARNERS[name]


TASKS: tuple[Task, ...] = ("binary", "classes", "number")


@pytest.mark.parametrize(("task", "is_sparse"), [("binary", False), ("classes", True), ("number", False)])
@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_is_scored_on_predictions_from_before_it_learned(name: str, task: Task, is_sparse: bool) -> None:
    """A learner was scored on rows that it had learned from, and seemed to be the best of all."""
    learn = learner(name)
    given = stream(task, is_sparse=is_sparse)
    changed = np.roll(given.labels, 1)
    changed[:100] = given.labels[:100]
    other = LearningStream(given.name, task, given.features, changed)
    # Labels from row 100 on are others; the prediction for row 100 does not know its own.
    first, second = learn(given).predictions, learn(other).predictions
    # Predictions of classes are the probabilities of the true ones.
    known = 100 if task == "classes" else 101
    assert first[:known].tolist() == second[:known].tolist()
    # The median: trees give some true classes the probability 0.
    assert loss(given, np.median(losses(given, first), keepdims=True)) < uninformed(given)


def uninformed(given: LearningStream) -> float:
    """Return the loss of a prediction that knows nothing: ½, each class alike, or 0."""
    guess = {"binary": 0.5, "classes": 1 / 3, "number": 0.0}[given.task]
    return loss(given, losses(given, np.full(len(given), guess)))


@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_does_not_know_late_labels(name: str) -> None:
    """Each label was learned before the prediction for its row, or before it had come."""
    learn = learner(name)
    rows = np.arange(ROWS)
    if name in (TREE, FOREST):
        assert learn(late(2 * rows)) is None
        return
    all_late = learn(late(np.concatenate([2 * rows, 2 * rows[:-10] + 1])))
    assert all_late.predictions.tolist() == [0.5] * ROWS
    a_row_late = learn(late(np.concatenate([[0], np.ravel([2 * rows[1:], 2 * rows[:-1] + 1], order="F")])))
    at_once = learn(stream("binary"))
    assert a_row_late.predictions[0] == at_once.predictions[0]
    assert a_row_late.predictions.tolist() != at_once.predictions.tolist()


def test_rows_that_are_never_answered_have_no_loss() -> None:
    """A cancelled flight counted as one that was not late."""
    given = late(np.array([0, 2, 4, 3]))
    assert np.flatnonzero(given.answered).tolist() == [1]
    label = bool(given.labels[1])
    assert losses(given, np.array([0.1, 0.8, 0.1] + [0.5] * (ROWS - 3))) == pytest.approx(
        [-math.log(0.8 if label else 0.2)]
    )
    assert given.head(1).events.tolist() == [0]


def test_the_page_shows_each_stream_and_who_is_better(tmp_path: Path) -> None:
    """A stream was missing on the page, or its picture could not be read."""
    results = [learning.compare(stream(task), installed_learners()) for task in TASKS]
    renamed = [replace(result, stream=name) for name, result in zip(("Bananas", "flights", "Mv"), results, strict=True)]
    page = learning.as_page(renamed, {"census": "no file"}, minutes=2.4)
    assert "in about 2 minutes" in page
    assert "census (no file)" in page
    for result in renamed:
        assert f"| {result.stream} | {ROWS} | 2 |" in page
        assert f"(pictures/learning/{result.picture})" in page
        root = ElementTree.fromstring(result.drawn())
        assert len(root.findall(".//{*}polyline")) == len(set(result.losses) - {TREE, FOREST, AMF})
        assert result.accuracies.keys() == (
            set() if result.task == "number" else {OURS, LINEAR, TREE, FOREST} & set(result.losses)
        )
    if TREE in results[0].losses:
        [line] = [line for line in page.splitlines() if line.startswith("| Mv | number | ")]
        assert line.count(" – ") == 3


@pytest.mark.parametrize(("ours", "better", "than_all"), [(0.1, 1, 1), (0.25, 1, 0), (0.35, 0, 0), (math.nan, 0, 0)])
def test_wins_are_counted(ours: float, better: int, than_all: int) -> None:
    """A stream that was lost counted as won."""
    given = {OURS: ours, LINEAR: 0.3, "river": 0.3, "VW": 0.4, "VW --coin": 0.2, "VW --ftrl": math.nan, TREE: 0.01}
    if not math.isnan(ours):
        given["VW --ftrl"] = 9.0
    compared = learning.Compared("Mv", "number", 5, 2, given, dict.fromkeys(given, 1.0), [], {})
    page = learning.as_page([compared], {}, 1)
    assert f"both defaults on {better} of 1 streams, better than all 4 on {than_all}, and better than its" in page
    assert f"than its linear model alone on {better}." in page


def test_all_streams_of_this_machine_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a stream had fewer labels, or a name appeared twice in the table."""
    monkeypatch.setattr(learning_streams, "DATA", Path("no folder"))
    groups = (*learning_streams.MAIN, *learning_streams.FURTHER, *learning_streams.SCALES)
    assert len(set(groups)) == len(groups) == len(learning_streams.STREAMS)
    with pytest.raises(MissingStream, match="no file a9a_123d_train"):
        learning_streams.STREAMS["a9a"]()
    for name in ("v", "1000 v + 50,000", "Phishing", "SolarFlare", "WaterFlow", "Waveform"):
        try:
            made = learning_streams.STREAMS[name]()
        except MissingStream:
            continue
        assert made.name == name
        assert len(made.features) == len(made.labels) == len(made.head(10**6)) > 100
        assert made.labels.dtype.kind == {"binary": "b", "classes": "U"}.get(made.task, made.labels.dtype.kind)


def test_the_command_writes_the_page_and_the_pictures(tmp_path: Path) -> None:
    """A long run left no page."""
    learning.main(["v", "--quick", "--output", str(tmp_path)])
    page = (tmp_path / "learning-results.md").read_text()
    assert "| v | 500 | 10 |" in page
    assert (tmp_path / "pictures" / "learning" / "v.svg").is_file()
    with pytest.raises(SystemExit):
        learning.main(["no stream"])


def test_the_benchmark_of_row_steps_runs() -> None:
    """The benchmark failed on a name that had changed, after an hour of other benchmarks."""
    figures = list(row_steps(Session(quick=True, repeat=1)))
    assert {figure.name.split(": ")[1] for figure in figures} >= {"bare compiled steps", "train_online"}


# ---- labels that come later


def questions(*, every: bool = False) -> LateStream:
    """Return questions; four of five, or ``every`` one, are answered, with True or False, and some too late."""
    drawn = np.random.default_rng(seed=4)
    given = stream("binary")
    asked = np.sort(drawn.integers(0, 100_000, ROWS))
    delays = np.where(drawn.random(ROWS) < 0.9, drawn.integers(0, 4_000, ROWS), drawn.integers(9_000, 20_000, ROWS))
    is_answered = (drawn.random(ROWS) < 0.8) | every
    within_ms = 100_000 if every else 4_000
    labels = given.labels & is_answered & (delays < within_ms)
    return LateStream(replace(given, labels=labels), asked, np.where(is_answered, asked + delays, -1), within_ms, "")


REFERENCE = PROJECT.parent / "shared" / "reference" / "late-labels" / "late_labels.py"


@pytest.mark.skipif(not REFERENCE.exists(), reason="the reference of the order of late labels is not on this machine")
@pytest.mark.parametrize("schedule", [schedule for schedule in SCHEDULES if schedule != "expected"])
def test_the_peer_learns_in_the_order_of_the_reference(schedule: Schedule) -> None:
    """The peer saw its labels in an order of its own, so the schedules of two libraries could not be compared."""
    given = questions()
    events, times = (array.tolist() for array in given.events())
    records = [
        (time, row, bool(given.rows.labels[row]) if is_answer else None)
        for (row, is_answer), time in zip((divmod(event, 2) for event in events), times, strict=True)
    ]
    expected = list(runpy.run_path(str(REFERENCE))["order"](records, given.within_ms, schedule=schedule))
    found: list[tuple[Any, ...]] = []
    for kind, row, _ in order(given, schedule):
        if kind in ("assume", "learn"):
            found.append(("learn", row, kind == "learn" and bool(given.rows.labels[row]), kind == "assume"))
        elif kind != "confirm":
            found.append((kind, row))
    assert found == expected
    assert {event[0] for event in expected} == {"predict", "learn", "late"}


def test_predictions_of_late_labels_belong_to_their_questions() -> None:
    """Predictions were in the order in which labels became known, and were compared with other labels."""
    given = questions(every=True)
    expected = without_flow(replace(given.rows, events=given.events()[0]))
    known = ~np.isnan(expected)
    assert 200 < np.count_nonzero(known) < ROWS
    assert learning_late.ours(given, "at once").predictions[known].tolist() == expected[known].tolist()


def test_no_follower_of_late_labels_knows_one_before_it_came() -> None:
    """A learner was scored on answers that had not come, and seemed to need no schedule."""
    given = questions()
    until = 50_000
    is_late = given.answered_ms >= until
    changed = replace(given, rows=replace(given.rows, labels=given.rows.labels & ~is_late))
    first, second = learning_late.follow(given), learning_late.follow(changed)
    before = given.asked_ms < until
    assert np.count_nonzero(given.rows.labels & is_late & before) > 3
    for name in first.keys() - {"best possible", "label at once"}:
        assert first[name].predictions[before].tolist() == second[name].predictions[before].tolist(), name
        assert first[name].predictions.tolist() != second[name].predictions.tolist(), name


def test_the_section_of_late_labels_is_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To measure late labels again, all streams had to be measured for half an hour; or their results were lost."""
    monkeypatch.setattr(learning, "_QUICK_QUESTIONS", 1_200)
    monkeypatch.setattr(learning_late, "_CUT_SIZES", (50, 500))
    page = tmp_path / "learning-results.md"
    page.write_text(f"# Results\n\n{learning_late.TITLE}\nan old figure\n\n## Loss over time\n\npictures\n")
    learning.main(["--only", "late", "--quick", "threshold, short", "--output", str(tmp_path)])
    text = page.read_text()
    assert text.startswith(f"# Results\n\n{learning_late.TITLE}")
    assert text.endswith("\n## Loss over time\n\npictures\n")
    assert "an old figure" not in text
    for learner in ("as late for all", *(f"streamiter, {schedule}" for schedule in SCHEDULES)):
        assert text.count(f"| threshold, short | {learner} | ") == 1
    assert "The default, *expected*, misses a bound on: " in text
    assert text.count(" | same bits" * 3 + " |\n") == len(SCHEDULES)
    with pytest.raises(SystemExit):
        learning.main(["--only", "late", "flights, labels at arrival"])


def test_the_page_has_late_labels_of_all_streams_whatever_the_cut() -> None:
    """The page of results said nothing of late labels, where a learner was worse than the share alone."""
    page = (PROJECT / "docs" / "learning-results.md").read_text()
    section = page.partition(learning_late.TITLE)[2].partition("\n## ")[0]
    for name in LATE_STREAMS:
        assert section.count(f"| {name} | ") >= 2 + len(SCHEDULES)
    assert "| same bits" in section
    assert "other bits" not in section


# ---- labels some rows later, on real streams


@pytest.mark.parametrize("task", ["binary", "number"])
def test_no_learner_knows_a_label_before_its_rows_are_over(task: Task) -> None:
    """A baseline was scored on labels that had not come, and no learner could be as good."""
    given, delay, until = stream(task), 60, 200
    changed = replace(
        given, labels=np.concatenate([given.labels[: until - delay], given.labels[until - delay :][::-1]])
    )
    first, second = (learning_late_real.follow_real(rows, delay, has_forest=True) for rows in (given, changed))
    assert first.keys() >= {"mean so far", "one expert", "streamiter", "label at once"}
    for name in first.keys() - {"label at once"}:
        assert first[name][delay + 1 : until].tolist() == second[name][delay + 1 : until].tolist(), name
        assert first[name][until:].tolist() != second[name][until:].tolist(), name
    assert first["label at once"][1:].tolist() == without_flow(given)[1:].tolist()
    known = given.labels[: until - delay]
    mean = (known.sum() + 1) / (len(known) + 2) if task == "binary" else known.mean()
    assert first["mean so far"][until] == pytest.approx(mean)


def test_the_section_of_real_streams_is_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream without its data ended the run, or the section of other late labels was lost."""

    def gone() -> LearningStream:
        raise MissingStream("no package")

    for module in (learning, learning_late_real):
        monkeypatch.setattr(module, "IN_TIME", {"small": lambda: stream("number"), "gone": gone})
    page = tmp_path / "learning-results.md"
    page.write_text(f"# Results\n\n{learning_late.TITLE}\nlate figures\n\n## Loss over time\n\npictures\n")
    for _ in range(2):  # The second run is put in place of the first one.
        learning.main(["--only", "real", "--quick", "--output", str(tmp_path)])
    text = page.read_text()
    assert text.startswith(f"# Results\n\n{learning_late.TITLE}\nlate figures\n\n{learning_late_real.TITLE}\n")
    assert text.endswith("\n## Loss over time\n\npictures\n")
    assert text.count("| small | 300 | number | 60 | ") == 1
    assert "of 1 lines" in text
    assert "Left out: gone (`no package`)." in text
    with pytest.raises(SystemExit):
        learning.main(["--only", "real", "flights"])


def test_real_streams_are_in_the_order_of_time() -> None:
    """The hours of each airport were one after the other, so a label came after another airport's year."""
    for name in ("rain", "wind", "flights from July", "minutes from July"):
        try:
            made = learning_streams.IN_TIME[name]()
        except MissingStream:
            pytest.skip("the flights are not installed")
        assert made.name == name
        assert len(made) == 20_000
        assert np.isfinite(made.labels).all()
        months = made.features["month"]
        assert (np.diff(months) >= 0).sum() >= len(months) - 2


def test_the_page_has_late_labels_of_real_streams() -> None:
    """The page had late labels of streams of independent rows only, and drift made a learner worse than the share."""
    page = (PROJECT / "docs" / "learning-results.md").read_text()
    section = page.partition(learning_late_real.TITLE)[2].partition("\n## ")[0]
    for name in learning_streams.IN_TIME:
        assert f"| {name} | " in section or f"{name} (`" in section
    assert "streamiter is worse than *mean so far* on " in section
