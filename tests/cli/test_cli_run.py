"""`streamiter run` finds flows, runs them, and reports their errors."""

import json
import re

import pytest
from cli.program import on_terminal, started, streamiter
from topics.topic_case import write

from streamiter.topics import topic

FLOWS = """
from streamiter import Flow, IterationBodyResult, Operator, connect, iterate_unbounded_streams, topic
from streamiter import iterate_bounded_streams_until_termination
from streamiter.iteration import last_round, terminate_after

flow = Flow("clicks")
flow.from_items(range(1000)).map(lambda x: x + 1, name="plus").collect()

number = 5

def make():
    made = Flow("made")
    made.from_items([4, 0, 2]).map(lambda x: 1 / x, name="invert").collect()
    return made

def broken():
    return {}["missing"]

def printing():
    made = Flow("printing")
    made.from_items([1, 2]).map(lambda x: print("seen", x), name="print").collect()
    return made

def nothing():
    pass

async def later():
    return flow

def needs(url, *, count=1):
    return flow

def main() -> None:
    print("the whole program runs")

def leaves():
    raise SystemExit(3)

def wrong():
    flow = Flow("wrong")
    flow.from_items([1]).batch(0)
    return flow

def endless():
    flow = Flow("endless")
    flow.source(topic("sqlite:///events.db?topic=events")).map(lambda x: print(x, flush=True), name="show").collect()
    return flow

class Stuck(Operator):
    async def process(self, record, out):
        import asyncio
        print("stuck", flush=True)
        await asyncio.Event().wait()

class Train(Operator):
    def process_model(self, model, out):
        out.emit(model + 1)

    def process_examples(self, examples, out):
        pass

def loop():
    def body(variables, data):
        models = connect(model=variables[0], examples=data[0]).process(Train, name="train")
        models = models.filter(lambda model: model < 5)
        return IterationBodyResult(feedback_variable_streams=[models], output_streams=[models])

    flow = Flow("loop")
    iterate_unbounded_streams([flow.from_items([0])], [flow.from_items([1])], body)[0].collect()
    return flow

def rounds(count=20):
    def seen(number):
        if number == 100:
            print("in round 100", flush=True)
        return number + 1

    def body(variables, data):
        numbers = variables[0].map(seen, name="seen")
        criteria = terminate_after(numbers, rounds=count)
        return IterationBodyResult([numbers], [last_round(numbers)], criteria)

    flow = Flow("rounds")
    starts = [flow.from_items([0], name="start")]
    [last] = iterate_bounded_streams_until_termination(starts, [], body)
    last.map(lambda number: print("result", number, flush=True), name="print").collect()
    return flow

def many_rounds():
    return rounds(10**9)

def picky():
    flow = Flow("picky")
    flow.from_items([1, 0]).map(lambda x: 1 // x, name="invert", on_error="skip").collect()
    return flow

def stuck():
    flow = Flow("stuck")
    flow.from_items([1]).process(Stuck).collect()
    return flow

def logged():
    import streamiter.cli.figures
    streamiter.cli.figures._LINE_EVERY_S = 0.05
    return stuck()

class Odd(Flow):
    def draw(self, **options):
        raise KeyError("no such thing")

odd = Odd("odd")

def telling():
    import logging
    made = Flow("telling")
    log = logging.getLogger("streamiter.learn")
    made.from_items([1]).map(lambda x: log.info("compiling [it] for %d", x), name="learn").collect()
    return made
"""


@pytest.fixture
def folder(tmp_path):
    write_flows(tmp_path)
    return tmp_path


def write_flows(folder):
    (folder / "clicks.py").write_text(FLOWS)
    (folder / "needy.py").write_text("import no_such_module_at_all\n")
    (folder / "made.py").write_text("from streamiter import Flow\ndef flow() -> Flow:\n    return Flow('made')\n")
    (folder / "unfinished.py").write_text("def f(:\n")


@pytest.mark.parametrize("target", ["clicks:flow", "clicks.py:flow"])
def test_a_flow_of_a_module_or_a_file_runs_quietly(folder, target):
    """A script or a container got more output than the outcome of the run."""
    ran = streamiter("run", target, cwd=folder)
    assert (ran.returncode, ran.stdout) == (0, "")
    assert re.fullmatch(r"clicks: finished, \d+\.\d s, 1,000 records read\n", ran.stderr)


def test_a_file_in_another_folder_may_import_its_neighbours(folder):
    """A flow that imports its neighbours ran only from its own folder, unlike with `python file.py`."""
    inner = folder / "inner"
    inner.mkdir()
    (inner / "helper.py").write_text(
        "from streamiter import Flow\nflow = Flow('helped')\nflow.from_items([1]).collect()\n"
    )
    (inner / "main.py").write_text("from helper import flow\n")
    ran = streamiter("run", "inner/main.py:flow", cwd=folder)
    assert (ran.returncode, ran.stderr.partition(":")[0]) == (0, "helped")


def test_the_statistics_as_json_are_one_document(folder):
    """A program could not parse the statistics, because other output was mixed into them."""
    ran = streamiter("run", "clicks:flow", "--json", cwd=folder)
    statistics = json.loads(ran.stdout)
    assert (statistics["flow"], statistics["state"]) == ("clicks", "finished")
    steps = [step for task in statistics["tasks"] for step in task["steps"]]
    assert {step["step"]: step["counts"]["records_in"] for step in steps}["plus"] == 1000
    assert ran.stderr == ""


@pytest.mark.parametrize("arguments", [("--debug", "run", "clicks:make"), ("run", "clicks:make", "--debug")])
def test_debug_shows_the_traceback_at_any_place_in_the_line(folder, arguments):
    """A user typed --debug at the end of the failed line, and the program refused it there."""
    ran = streamiter(*arguments, cwd=folder)
    assert ran.returncode == 1
    assert "Traceback (most recent call last):" in ran.stderr
    assert "ZeroDivisionError" in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("error: flow 'made', step 'invert'")


def test_an_unexpected_error_asks_to_be_reported(folder):
    """A bug of the program looked like a mistake of the user."""
    ran = streamiter("draw", "clicks:odd", cwd=folder)
    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [
        "error: unexpected KeyError: 'no such thing'",
        "Please report it, with the output of --debug.",
    ]


async def _events(folder, count):
    events = topic(f"sqlite:///{folder}/events.db?topic=events")
    await events.create()
    await write(events, [b"%d" % number for number in range(count)])


def test_without_a_terminal_figures_are_logged(folder):
    """A job in a container printed nothing until its end: was it slow, or did it wait?"""
    with started("run", "clicks:logged", cwd=folder) as program:
        assert program.stdout.readline() == "stuck\n"
        lines = [json.loads(program.stderr.readline()) for _ in range(2)]
    assert re.fullmatch(r"stuck: running, \d\.\d s, 1 records read, 0\.0 records/s, lag 0 records", lines[1]["message"])
    assert (lines[1]["logger"], lines[1]["level"], lines[1]["records_per_s"]) == ("streamiter.job", "info", 0.0)
    assert lines[1]["elapsed_s"] >= lines[0]["elapsed_s"]


async def test_on_a_terminal_figures_are_live_and_ctrl_c_suspends(folder):
    """The live figures were not those of the running flow, or disappeared after Ctrl-C."""
    await _events(folder, 2)
    code, printed = on_terminal("run", "clicks:endless", cwd=folder, interrupt_at=["endless: running"])
    assert code == 0
    last = printed.rpartition("endless: suspended")[2]
    assert "show" in last
    assert "Traceback" not in printed


def test_the_output_of_steps_goes_into_the_file_of_the_shell(folder):
    """The live figures took the steps' output to the terminal, and ``streamiter run … > results`` was empty."""
    with (folder / "results").open("wb") as results:
        code, _ = on_terminal("run", "clicks:printing", cwd=folder, stdout=results)
    assert code == 0
    assert (folder / "results").read_text().split() == ["seen", "1", "seen", "2"]


def test_the_log_of_learners_is_printed_above_the_figures(folder):
    """The first model took ten seconds to compile, and the figures stood still without a reason."""
    code, printed = on_terminal("run", "clicks:telling", cwd=folder)
    assert code == 0
    assert "compiling [it] for 1" in printed
    assert "compiling" not in streamiter("run", "clicks:telling", cwd=folder).stderr


def test_epochs_of_a_loop_are_among_the_figures(folder):
    """Users of a loop could not see its epoch."""
    code, printed = on_terminal("run", "clicks:loop", cwd=folder)
    assert code == 0
    last = printed.rpartition("loop: finished")[2]
    assert "epoch" in last
    assert re.search(r"train +\d+ +5 +[\d,]+ +4\r", last)


@pytest.mark.parametrize(
    ("target", "ends"),
    [
        ("loop", "iteration 1 (variable 0): ended in epoch 5, nothing was fed back, 4 records fed back"),
        (
            "rounds",
            "iteration 1 (variable 0): ended in epoch 20, the termination criteria brought nothing, "
            "{fed_back} records fed back",
        ),
    ],
)
def test_a_log_has_the_last_epoch_of_each_loop_and_the_reason_of_its_end(folder, target, ends):
    """A loop that stopped after its last round looked like a loop that converged."""
    ran = streamiter("run", f"clicks:{target}", cwd=folder)
    first, *loops = ran.stderr.splitlines()
    assert first.startswith(f"{target}: finished, ")
    statistics = json.loads(streamiter("run", f"clicks:{target}", "--json", cwd=folder).stdout.splitlines()[-1])
    assert loops == [ends.format(fed_back=statistics["loops"][0]["fed_back_records"])]


def test_a_terminal_shows_the_epoch_of_a_loop_and_then_its_last_one(folder):
    """The table shows epochs of steps only, so users could not see the epoch that is complete for the whole loop."""
    options = ("--on-interrupt", "drain")
    code, printed = on_terminal(
        "run", "clicks:many_rounds", *options, cwd=folder, width=160, interrupt_at=["iteration 1 (variable 0): epoch "]
    )
    assert code == 0
    last = printed.rpartition("rounds: finished")[2]
    assert re.search(
        r"iteration 1 \(variable 0\): ended in epoch [\d,]+, the job was drained, [\d,]+ records fed back\r", last
    )


def test_an_unknown_way_to_interrupt_is_a_usage_error(folder):
    """The error about an unknown way to interrupt did not list the ways."""
    ran = streamiter("run", "clicks:flow", "--on-interrupt", "abort", cwd=folder)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "'suspend', 'drain'" in ran.stderr


def test_a_log_has_the_number_of_rejected_records(folder):
    """A container's log said that all went well, although records were rejected."""
    ran = streamiter("run", "clicks:picky", cwd=folder)
    assert re.fullmatch(r"picky: finished, \d+\.\d s, 2 records read, 1 rejected\n", ran.stderr)


def test_after_ctrl_c_the_terminal_confirms_it(folder):
    """After Ctrl-C the terminal showed no reaction, so the user typed it again, which aborted the job."""
    code, printed = on_terminal("run", "clicks:stuck", cwd=folder, interrupt_at=["stuck: running", "Suspending"])
    assert code == 130
    assert "Ctrl-C again aborts." in printed
    assert "stuck: aborted, " in printed


def test_a_narrow_terminal_cuts_no_numbers(folder):
    """A narrow terminal cut a number to `3,…`."""
    code, printed = on_terminal("run", "clicks:flow", cwd=folder, width=36)
    assert code == 0
    last = printed.rpartition("clicks: finished")[2]
    assert last.count("1,000") >= 3
    assert "…" not in last
