"""Runs of offline training show their progress, and return the model after Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import process
from support.waiting import PATIENCE_S

from streamiter import Flow, IterationBodyResult, iterate_bounded_streams_until_termination, topic
from streamiter.errors import JobFailed, ModelError
from streamiter.learn import Examples, LinearRegression, LogisticRegression, SparseRows
from streamiter.learn.estimators import run_offline

PROGRAM = Path(__file__).with_name("offline_program.py")

on_unix = pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals are those of Unix")


def ways(**numbers: str) -> pytest.MarkDecorator:
    """Return a mark that runs a test with one signal in a script, and with the other signal in an event loop."""
    cases = [(where.replace("_", " "), getattr(signal, number)) for where, number in numbers.items()]
    return pytest.mark.parametrize(("where", "number"), cases, ids=lambda case: getattr(case, "name", case))


class Terminal:
    """Reads the output of a program from the terminal that is its stderr."""

    def __init__(self, process: subprocess.Popen[str], screen: int) -> None:
        self.process = process
        self._screen = screen
        self._shown = ""

    def wait_for(self, pattern: str) -> None:
        """Wait until the program has shown this text; fail if the program ends before."""
        while not re.search(pattern, self._shown):
            shown = self._read()
            assert shown, f"the program ended, and showed {self._shown!r}"

    def rest(self) -> str:
        """Return the whole output up to the end of the program."""
        while self._read():
            pass
        return self._shown

    def _read(self) -> str:
        try:
            shown = os.read(self._screen, 65_536).decode(errors="replace")
        except OSError:  # Linux raises OSError after the program has ended.
            shown = ""
        self._shown += shown
        return shown


@contextmanager
def running(where: str, what: str) -> Iterator[Terminal]:
    screen, stderr = os.openpty()
    command = [sys.executable, str(PROGRAM), where, what]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}
    with process(command, is_forked=True, stdout=subprocess.PIPE, stderr=stderr, env=environment) as started:
        os.close(stderr)
        try:
            yield Terminal(started, screen)
        finally:
            os.close(screen)


@on_unix
@ways(script="SIGINT", event_loop="SIGTERM")
def test_ctrl_c_ends_the_training_with_the_round_under_way_and_keeps_the_model(
    where: str, number: signal.Signals
) -> None:
    """Ctrl-C after an hour of training printed a traceback, and the model was lost."""
    with running(where, "fit") as terminal:
        terminal.wait_for(r"LogisticRegression\.fit.*round [1-9]\d* of 1000000000.*loss 0\.\d+")
        terminal.process.send_signal(number)
        shown = terminal.rest()
        out, _ = terminal.process.communicate(timeout=PATIENCE_S)
    assert out == "interruption True True\n", shown
    assert re.search(r"LogisticRegression\.fit: interrupted; the model of round [1-9]\d* is kept", shown)
    assert terminal.process.returncode == 0
    assert "Traceback" not in shown


@on_unix
@ways(script="SIGTERM", event_loop="SIGINT")
def test_a_second_ctrl_c_aborts_a_round_that_does_not_end(where: str, number: signal.Signals) -> None:
    """A second Ctrl-C must end the program while a step waits, and must still close every operator."""
    with running(where, "hang") as terminal:
        terminal.wait_for(r"hanging.*round 1 ")
        terminal.process.send_signal(number)
        terminal.wait_for("Ctrl-C again aborts")
        terminal.process.send_signal(number)
        shown = terminal.rest()
        out, _ = terminal.process.communicate(timeout=PATIENCE_S)
    assert out == "closed\ninterrupted\n", shown
    assert terminal.process.returncode == 130
    assert "Traceback" not in shown


@pytest.mark.parametrize("progress", [None, False])
def test_nothing_is_shown_without_a_terminal(progress: bool | None, capfd: pytest.CaptureFixture[str]) -> None:
    """Escape sequences, or a line for each of a thousand rounds, make a log unreadable."""
    LinearRegression(1).fit([[1.0]], [1.0], rounds=3, progress=progress)
    assert capfd.readouterr() == ("", "")


def test_progress_lines_are_shown_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    """A log needs plain lines; the last line names the round in which the training ended."""
    LinearRegression(1).fit([[1.0]], [1.0], rounds=3, progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"LinearRegression\.fit: round 3 of 3, loss 0\.\d+", lines[-1])
    assert all(line.startswith("LinearRegression.fit: round ") for line in lines)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_no_more_rounds_are_reported_than_are_made(mode: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """An asynchronous loop makes one round more than it learns, so progress showed round 4 of 3."""
    LinearRegression(1).fit([[1.0]], [1.0], rounds=3, mode=mode, progress=True)
    assert "round 3 of 3" in capfd.readouterr().err.splitlines()[-1]


def test_a_flow_without_a_known_number_of_rounds_and_without_a_loop(capfd: pytest.CaptureFixture[str]) -> None:
    """A flow of another model may have no known number of rounds, or no loop."""
    flow = Flow("count")

    def body(variables: Any, data: Any) -> IterationBodyResult:
        raised = variables[0].map(lambda x: x + 1)
        return IterationBodyResult([raised.filter(lambda x: x < 5)], [raised])

    iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    run_offline(flow, title="counting", progress=True, describe=lambda: "as [far] as it goes")
    assert capfd.readouterr().err.splitlines()[-1] == "counting: round 5, as [far] as it goes"
    plain = Flow("plain")
    plain.from_items([1]).collect()
    assert run_offline(plain, title="plain").state == "finished"


async def test_it_runs_inside_an_event_loop() -> None:
    """The cells of a notebook run in an event loop; the result and the errors must be the same there."""
    model = LinearRegression(1)
    assert model.fit([[1.0], [2.0]], [1.0, 2.0], rounds=5).steps == 5
    with pytest.raises(JobFailed, match="too large to compute with"):
        model.fit([[1.0], [2.0]], [1.0, 2.0], rounds=5_000, learning_rate=100.0)


def test_a_fit_shows_how_it_went_in_one_line() -> None:
    """The representation of a fit printed a thousand losses."""
    fit = LinearRegression(1).fit([[1.0], [2.0]], [1.0, 2.0], rounds=1000)
    assert re.fullmatch(r"Fit\(rounds=1000, loss=\S+, ended_by='rounds'\)", repr(fit))
    assert (fit.rounds, fit.steps, fit.loss) == (1000, 1000, fit.losses[-1])


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("workers", [1, 2])
def test_rounds_without_a_row_that_counts_are_rounds(mode: Any, workers: int) -> None:
    """A mini-batch of weights 0 makes no step, so the training reported an interruption by Ctrl-C."""
    features, weights = np.ones((8, 1)), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    model = LinearRegression(1)
    fit = model.fit(features, np.ones(8), weights, rounds=6, mini_batch=4, mode=mode, parallelism=workers)
    assert (fit.rounds, fit.ended_by) == (6, "rounds")
    assert fit.steps >= 3
    assert model.weights[0] > 0.0


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_topic_whose_weights_are_all_0_is_refused(mode: Any, tmp_path: Path) -> None:
    """The training ended without a step, and reported an interruption."""
    path = tmp_path / "examples.jsonl"
    path.write_text('{"x": 1}\n{"x": 2}\n')
    model = LinearRegression(1)
    with pytest.raises(ModelError, match=r"LinearRegression\.fit: .* sample weights that are all 0; give some"):
        model.fit(
            topic(f"file:{path}"),
            extract=lambda rows: Examples([[row["x"]] for row in rows], [1.0] * len(rows), [0.0] * len(rows)),
            rounds=3,
            mode=mode,
        )
    assert (model.version, model.records) == (0, 0)


# -- the source of the examples ----------------------------------------------------------------------------------


def sparse_case(count: int = 300) -> tuple[SparseRows, Any]:
    generator = np.random.default_rng(2)
    dense = (generator.random((count, 6)) < 0.4).astype(float)
    targets = (dense @ [2.0, -1.0, 0.5, 0.0, -2.0, 1.0] + generator.normal(size=count) > 0).astype(float)
    return SparseRows.from_dense(dense), targets


def lines_of(rows: SparseRows, targets: Any, kind: str) -> str:
    lines = []
    for (indices, values), target in zip(rows.rows(), targets, strict=True):
        label = "1" if target else "-1"
        features = (
            [f"{index + 1}:{value:g}" for index, value in zip(indices, values, strict=True)]
            if kind == "libsvm"
            else map(str, indices)
        )
        lines.append(" ".join([label, *features]))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("options", [{}, {"mini_batch": 60, "parallelism": 3}, {"replay": True}], ids=str)
@pytest.mark.parametrize("kind", ["libsvm", "dummy"])
def test_a_file_gives_the_same_model_as_its_rows(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The labels −1 and 1 of the file are translated, and workers get its rows as they get rows of arrays."""
    rows, targets = sparse_case()
    path = tmp_path / f"examples.{kind}"
    path.write_text(lines_of(rows, targets, kind))
    of_file, of_arrays = LogisticRegression(6, labels="-1/1"), LogisticRegression(6)
    of_file.fit(topic(f"file:{path}"), rounds=30, **options)
    of_arrays.fit(rows, targets, rounds=30, **(options | {"replay": False}))
    assert of_file.weights == pytest.approx(of_arrays.weights, rel=1e-12)
    assert of_file.predict_probability(rows).tolist() == of_file.predict(rows).tolist()
    assert (of_file.version, of_file.records) == (30, of_arrays.records)


def test_any_topic_works_with_a_function_that_makes_examples(tmp_path: Path) -> None:
    """The records may have any form, and a topic that can grow is read up to its present end."""
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(f'{{"a": {x}, "b": {2 * x + 1}, "n": 2}}\n' for x in range(5)))

    def extract(records: Any) -> Examples:
        columns = {name: [record[name] for record in records] for name in ("a", "b", "n")}
        return Examples(np.array(columns["a"])[:, None], columns["b"], columns["n"])

    model = LinearRegression(1)
    model.fit(topic(f"file:{path}"), extract=extract, rounds=500)
    assert model.predict([[10.0]])[0] == pytest.approx(21.0, abs=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2:1\n-1 9:1\n", r"step 'train'.*expected indices from 0 to 5 \(width 6\), given 8"),
        ("1 2:1\n3 1:1\n", "expected targets −1 or 1, given 3.0"),
        ("1 2:1\nx 1:1\n", "expected a finite number, given b'x'"),
        ("", "expected examples to learn from, given none"),
    ],
)
def test_an_invalid_file_fails_with_the_reason(text: str, message: str, tmp_path: Path) -> None:
    """The error must name the reason, and the model must stay unchanged."""
    path = tmp_path / "examples.libsvm"
    path.write_text(text)
    model = LogisticRegression(6, labels="-1/1")
    with pytest.raises(JobFailed, match=message):
        model.fit(topic(f"file:{path}"))
    assert model.version == 0


def test_records_of_another_form_need_a_function(tmp_path: Path) -> None:
    """The error must be one clear line, and not a KeyError."""
    path = tmp_path / "examples.jsonl"
    path.write_text('{"x": 1}\n')
    with pytest.raises(JobFailed, match=r"expected records with label, indices and values, .* write extract="):
        LogisticRegression(1).fit(topic(f"file:{path}"))
    with pytest.raises(ModelError, match=r"expected targets in the records of topic"):
        LogisticRegression(1).fit(topic(f"file:{path}"), [1.0])
