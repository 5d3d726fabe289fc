"""The examples run as users run them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from files.files_support import data_file
from PIL import Image
from support.processes import forked_run
from support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
WITHOUT = {"decision_tree.py"}
"""Examples without a flow of their own, because ``fit`` builds it."""
FLOWS = sorted(
    f"{file.relative_to(ROOT)}:flow"
    for room in ("", "linear_regression")
    for file in (ROOT / "examples" / room).glob("*.py")
    if file.name not in WITHOUT
)


def streamiter(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked_run([sys.executable, "-m", "streamiter", *arguments], cwd=ROOT, limit_s=PATIENCE_S, check=True)


def test_the_list_of_examples_is_complete() -> None:
    """The list of examples was empty, and all other tests of this module passed."""
    assert len(FLOWS) >= 7


@pytest.mark.parametrize("target", [*FLOWS, "examples/online_service/trainer.py:training_flow"])
def test_the_flow_of_an_example_is_drawn_without_running_it(target: str) -> None:
    """The whole example ran, and its flow could not be drawn afterwards."""
    drawn = streamiter("draw", target)
    title, *lines = drawn.stdout.removeprefix("---\ntitle: ").splitlines()
    assert title
    assert lines[:2] == ["---", "flowchart LR"]
    assert any("iteration 1" in line for line in lines)
    assert drawn.stderr == ""


@pytest.mark.parametrize("target", FLOWS)
def test_the_flow_of_an_example_runs_and_says_how_its_loop_ended(target: str) -> None:
    """The program around the flow printed the result, so `streamiter run` printed none."""
    ran = streamiter("run", target)
    assert ran.stdout
    assert re.search(r"^iteration 1 \(.*\): ended in epoch \d+, .* fed back$", ran.stderr, re.MULTILINE)


EXAMPLES = Path(__file__).parents[2] / "examples"


def printed_by(name: str, *arguments: str) -> list[str]:
    done = forked_run([sys.executable, str(EXAMPLES / f"{name}.py"), *arguments], limit_s=PATIENCE_S, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_grocers_habits_are_found() -> None:
    """The example missed one of the three rules in its generated baskets."""
    lines = printed_by("frequent_item_sets")
    assert re.fullmatch(r"\d+ item sets in 5000 baskets, such as", lines[0])
    rules = {line.strip().split(" (")[0] for line in lines[lines.index("What follows:") + 1 :]}
    assert {"bread, jam → butter", "crisps → beer", "tea → milk"} <= rules
    assert not any("rice" in rule for rule in rules)


def test_baskets_of_a_topic_are_read_to_its_end(tmp_path: Path) -> None:
    """The example ignored the file of baskets or the share that a user gave."""
    baskets = tmp_path / "baskets.jsonl"
    baskets.write_bytes(b"\n".join(map(orjson.dumps, [["a", "b"], ["a", "b"], ["c"], ["c"]])))
    assert printed_by("frequent_item_sets", f"file:{baskets}", "0.5") == [
        "4 item sets in 4 baskets, such as",
        "  b: 2",
        "  c: 2",
        "  a, b: 2",
        "What follows:",
        "  a → b (confidence 1.00, lift 2.00)",
        "  b → a (confidence 1.00, lift 2.00)",
    ]


def test_the_tree_of_the_flowers_is_printed_and_classifies_others() -> None:
    """The printed tree, which is the only view of it, was unreadable or wrong."""
    *tree, verdict = printed_by("decision_tree")
    assert re.fullmatch(r"petal length ≤ 2\.\d+: setosa \(\d+ rows(, 99\.\d%)?\)", tree[0])
    assert sum("virginica" in line for line in tree) >= 1
    known = re.fullmatch(r"Of other flowers it knows (.*)% \(always one kind: 33\.3%\)\.", verdict)
    assert known is not None, verdict
    assert float(known[1]) > 95


FOLDER = Path(__file__).parents[2] / "examples" / "other_libraries"


@pytest.mark.parametrize(
    ("example", "library", "package"),
    [
        ("river_trees.py", "river", "river"),
        ("scikit_learn.py", "sklearn", "scikit-learn"),
        ("pytorch.py", "torch", "torch"),
    ],
)
def test_an_example_trains_publishes_and_serves_a_model_of_its_library(
    example: str, library: str, package: str
) -> None:
    """A new version of a library changed a method, and the example in the documents no longer ran."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{package} is not installed (pip install {package})")
    ran = forked_run([sys.executable, example], cwd=FOLDER, limit_s=PATIENCE_S, check=True)
    accuracies = [float(found) for found in re.findall(r"accuracy (\d\.\d+)", ran.stdout)]
    assert accuracies
    assert accuracies[-1] > 0.75
    [probability] = re.findall(r"probability that \(0, 0\) is inside: \[?(\d\.\d+)", ran.stdout)
    assert float(probability) > 0.5
    if example == "river_trees.py":
        linear, tree, forest = accuracies
        assert linear < tree < forest


EXAMPLE = Path(__file__).parents[2] / "examples" / "parameter_server" / "stragglers.py"
SECONDS = 2.0
"""A fifth of the full run's time, which is enough for the differences; only the quality needs more."""
ROW = re.compile(
    r"^(?P<how>BSP|SSP\(3\)|ASP) +(?P<epochs>[\d.]+)(?: +(?P<accuracy>0\.\d{4}) +(?P<area>0\.\d{4}))?  "
    r"(?P<waited>[\d.]+ [\d.]+ [\d.]+ [\d.]+) +(?P<losses>[\d. ]+)$",
    re.MULTILINE,
)


MADE_UP = ("file:train.libsvm", "file:test.libsvm", "--seconds", str(SECONDS))


def ran(*arguments: str, cwd: Path) -> dict[str, dict[str, str]]:
    """Run the example, and return the rows of its printed table by consistency."""
    done = forked_run([sys.executable, str(EXAMPLE), *arguments], cwd=cwd, limit_s=PATIENCE_S, check=True)
    assert done.stderr == ""
    return {row["how"]: row.groupdict() for row in ROW.finditer(done.stdout)}


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split()]


def test_it_prints_and_draws_the_cost_of_a_slow_worker(tmp_path: Path) -> None:
    """The table differed between machines, although the example computes it in virtual time."""
    rows = ran("--seconds", "3", cwd=tmp_path)
    epochs = {how: float(row["epochs"]) for how, row in rows.items()}
    # In 3 s the slow worker finishes 60 mini-batches of 200 of 20,000 rows; the others finish 60 with BSP, else 300.
    assert epochs["BSP"] == pytest.approx(4 * 60 * 200 / 20_000 / 3, rel=0.02)
    assert epochs["SSP(3)"] == pytest.approx((3 * 64 + 60) * 200 / 20_000 / 3, rel=0.02)
    assert epochs["ASP"] == pytest.approx((3 * 300 + 60) * 200 / 20_000 / 3, rel=0.02)
    assert numbers(rows["ASP"]["waited"]) == [0.0] * 4
    assert numbers(rows["BSP"]["waited"]) == pytest.approx([2.4, 2.4, 2.4, 0.0], abs=0.1)
    losses = {how: numbers(row["losses"]) for how, row in rows.items()}
    assert [len(each) for each in losses.values()] == [3] * 3
    for at in range(3):  # after half a second, one, and two
        assert losses["ASP"][at] < losses["SSP(3)"][at] < losses["BSP"][at]
    assert all(float(row["accuracy"]) > 0.84 and float(row["area"]) > 0.925 for row in rows.values())
    with Image.open(tmp_path / "stragglers.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (1840, 680))
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20) or []}
    # The picture has a line and a bar for each consistency.
    assert {(9, 105, 218), (191, 57, 137), (26, 127, 55)} <= colours


def test_it_learns_a9a_equally_well_under_each_consistency(tmp_path: Path) -> None:
    """The old gradients of a worker that is five times slower made the model worse."""
    rows = data_file("a9a/a9a_123d_test.dummy").read_text(encoding="utf-8").splitlines()
    (tmp_path / "test.libsvm").write_text("\n".join(map(as_libsvm, rows)) + "\n", encoding="utf-8")
    (tmp_path / "train.libsvm").symlink_to(data_file("a9a/a9a_123d_train.libsvm"))
    results = ran("file:train.libsvm", "file:test.libsvm", "--seconds", "6", cwd=tmp_path)
    assert list(results) == ["BSP", "SSP(3)", "ASP"]
    assert all(float(row["accuracy"]) >= 0.848 and float(row["area"]) >= 0.900 for row in results.values())


def as_libsvm(row: str) -> str:
    """Return a row of ones, whose features count from 0, as a line of LIBSVM, whose features count from 1."""
    label, *features = row.split()
    return " ".join([label, *(f"{int(feature) + 1}:1" for feature in features)])


def test_k_means_learns_faster_if_its_workers_wait_less(tmp_path: Path) -> None:
    """k-means, the example's other algorithm, did not show the cost of waiting for the slow worker."""
    write_made_up_files(tmp_path)
    rows = ran(*MADE_UP, "--k-means", cwd=tmp_path)
    epochs = {how: float(row["epochs"]) for how, row in rows.items()}
    assert epochs["BSP"] == pytest.approx(4 * 40 * 200 / 8_000 / SECONDS, rel=0.02)
    assert epochs["ASP"] == pytest.approx((3 * 200 + 40) * 200 / 8_000 / SECONDS, rel=0.02)
    losses = {how: numbers(row["losses"]) for how, row in rows.items()}
    assert losses["ASP"][0] < losses["BSP"][0]  # after half a second
    assert losses["BSP"][-1] < losses["BSP"][0]
    assert all(row["accuracy"] is None for row in rows.values())
    assert (tmp_path / "stragglers.png").is_file()


def write_made_up_files(folder: Path) -> None:
    for name, count in (("train", 8_000), ("test", 2_000)):
        lines = (
            f"{'+1' if (number % 5 < 2) != (number % 7 == 0) else '-1'} {1 + number % 5}:1 {11 + number % 9}:1"
            for number in range(count)
        )
        (folder / f"{name}.libsvm").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_with_hiccups_bounded_staleness_waits_less_than_going_in_step(tmp_path: Path) -> None:
    """With short hiccups, workers under bounded staleness waited as long as workers in step."""
    write_made_up_files(tmp_path)
    rows = ran(*MADE_UP, "--hiccups", "--picture", "hiccups.svg", cwd=tmp_path)
    epochs = {how: float(row["epochs"]) for how, row in rows.items()}
    assert epochs["BSP"] * 1.2 < epochs["SSP(3)"] < epochs["ASP"]
    waited = {how: sum(numbers(row["waited"])) for how, row in rows.items()}
    assert waited["BSP"] > 1.5 * waited["SSP(3)"] > waited["ASP"] == 0.0
    picture = (tmp_path / "hiccups.svg").read_text(encoding="utf-8")
    for words in ("Loss on rows held out", "Epochs per virtual second", "SSP(3)", "virtual seconds", "log loss"):
        assert words in picture
