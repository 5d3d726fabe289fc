"""`streamiter train` trains a network, and `streamiter predict` predicts with it."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from cli.program import on_terminal, started, streamiter
from networks.training_support import document, records, rows
from support.waiting import PATIENCE_S

from streamiter.networks.serving import load_network


def dummy_file(path: Path, count: int, seed: int) -> None:
    lines = (
        " ".join([f"{record['label']:g}", *map(str, record["indices"].tolist())])
        for record in records(rows(count, seed=seed))
    )
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a configuration, rows to learn from, and rows to evaluate."""
    write_network(tmp_path)
    return tmp_path


def write_network(folder: Path) -> None:
    dummy_file(folder / "train.dummy", 600, 1)
    dummy_file(folder / "test.dummy", 200, 2)
    (folder / "small.json").write_text(json.dumps(document(train={"epoch": 4})))


TRAIN = ("train", "--config", "small.json", "--data", "train.dummy")


def test_train_prints_the_results_of_each_epoch_and_saves_a_model_that_predicts(folder: Path) -> None:
    """One of the two commands that each new user runs first failed, or printed figures that cannot be believed."""
    ran = streamiter(*TRAIN, "--validate", "test.dummy", cwd=folder)
    assert (ran.returncode, ran.stderr) == (0, "")
    *epochs, last = ran.stdout.splitlines()
    number = r"\d\.\d{4}"
    for epoch, line in enumerate(epochs, 1):
        figures = rf"training loss {number}  validation loss {number}, accuracy {number}, AUC {number}"
        assert re.fullmatch(rf"epoch +{epoch}  {figures}", line)
    assert (len(epochs), last) == (4, "Saved the model in small.model.")
    predicted = streamiter("predict", "--model", "small.model", "--data", "test.dummy", cwd=folder)
    assert predicted.returncode == 0
    header, *lines = predicted.stdout.splitlines()
    assert header == "score\tprobability\tlabel"
    assert len(lines) == 200
    assert all(re.fullmatch(r"-?[\d.e-]+\t[\d.e-]+\t-?1", line) for line in lines)
    evaluated = re.fullmatch(r"200 rows: (loss .*)\n", predicted.stderr)
    assert evaluated is not None
    assert epochs[-1].endswith(f"validation {evaluated[1]}")


def test_as_json_there_is_one_document(folder: Path) -> None:
    """A program could not parse the results, because the progress for people was mixed into them."""
    ran = streamiter(*TRAIN, "--json", "--model", "m", "--epochs", "2", "--workers", "3", cwd=folder)
    assert (ran.returncode, ran.stderr) == (0, "")
    summary = json.loads(ran.stdout)
    assert (summary["model"], summary["ended_by"]) == ("m", "epochs")
    assert [each["epoch"] for each in summary["epochs"]] == [1, 2]
    assert summary["epochs"][1]["validation"]["rows"] == 150
    predicted = streamiter("predict", "--model", "m", "--data", "test.dummy", "--json", "-o", "p.jsonl", cwd=folder)
    assert (predicted.returncode, predicted.stdout) == (0, "")
    lines = [json.loads(line) for line in (folder / "p.jsonl").read_text().splitlines()]
    assert len(lines) == 200
    assert all((line["probability"] >= 0.5) == (line["label"] == 1) for line in lines)


@pytest.mark.parametrize("how", ["bsp", "ASP", "ssp:2"])
def test_workers_share_the_rows_under_each_consistency(folder: Path, how: str) -> None:
    """A consistency in upper or lower case, as configurations of clusters have it, was refused."""
    ran = streamiter(*TRAIN, "--workers", "3", "--consistency", how, "--json", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    losses = [each["validation"]["loss"] for each in json.loads(ran.stdout)["epochs"]]
    assert losses[-1] < losses[0]


def test_the_same_seed_saves_the_same_bytes_and_another_does_not(folder: Path) -> None:
    """The checksum of a deployed model did not identify it, because the same seed saved other bytes."""
    contents = []
    for seed in ("1", "1", "2"):
        assert streamiter(*TRAIN, "--seed", seed, "--epochs", "1", cwd=folder).returncode == 0
        contents.append((folder / "small.model" / "parameters.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_training_resumes_from_a_saved_model(folder: Path) -> None:
    """A training could not start from yesterday's model."""
    first = json.loads(streamiter(*TRAIN, "--json", cwd=folder).stdout)["epochs"]
    ran = streamiter(*TRAIN, "--json", "--start", "small.model", "--model", "next", "--epochs", "1", cwd=folder)
    [then] = json.loads(ran.stdout)["epochs"]
    assert then["training_loss"] < first[1]["training_loss"]


@pytest.mark.parametrize(("name", "begins"), [("t.svg", b"<svg"), ("t.png", b"\x89PNG")])
def test_the_plot_shows_loss_accuracy_and_auc(folder: Path, name: str, begins: bytes) -> None:
    """The plot for a report had no loss, no accuracy or no AUC."""
    if name.endswith(".png"):
        pytest.importorskip("resvg_py", reason="drawing PNG takes the extra draw")
    ran = streamiter(*TRAIN, "--epochs", "2", "--plot", name, cwd=folder)
    assert ran.stdout.endswith(f"Saved the model in small.model, the plot as {name}.\n")
    content = (folder / name).read_bytes()
    assert content.startswith(begins)
    if name.endswith(".svg"):
        for words in (b"Loss", b"Accuracy", b"Area under the ROC curve", b"training", b"validation"):
            assert words in content


def endless(folder: Path) -> None:
    """Write a configuration with more epochs than a test can wait for."""
    (folder / "small.json").write_text(json.dumps(document(train={"epoch": 1_000_000})))


def test_ctrl_c_keeps_the_model(folder: Path) -> None:
    """A user pressed Ctrl-C to keep the model, and got a traceback."""
    endless(folder)
    with started(*TRAIN, cwd=folder) as program:
        shown = ""
        while not shown.startswith("epoch   3"):
            shown = program.stdout.readline()
        program.send_signal(signal.SIGINT)
        printed, said = program.communicate(timeout=PATIENCE_S)
    assert (program.returncode, said) == (0, "")
    end = printed.splitlines()[-2:]
    interrupted = re.fullmatch(r"Interrupted in epoch (\d+); the model is what was learned until then\.", end[0])
    assert interrupted is not None
    assert int(interrupted[1]) >= 3
    assert end[1] == "Saved the model in small.model."
    saved = load_network(folder / "small.model")
    assert (saved.parameters["deep.weight"] != saved.network.initial_parameters(seed=0)["deep.weight"]).any()


def test_on_a_terminal_a_bar_shows_the_epochs_and_ctrl_c_ends_it(folder: Path) -> None:
    """A user watched the training for hours without its progress and its results."""
    endless(folder)
    code, printed = on_terminal(*TRAIN, cwd=folder, width=160, interrupt_at=["epoch   5"])
    assert code == 0
    assert re.search(r"training .* epoch \d+ of 1000000", printed)
    assert re.search(r"\r\x1b\[2Kepoch   2  training loss [^\r]*\r\n", printed), "a line of its own above the bar"
    assert "Saved the model in small.model." in printed
    assert "Traceback" not in printed


def test_a_terminal_of_unknown_width_gets_the_output(folder: Path) -> None:
    """After the training, the line with the model's folder failed with "invalid width 0"."""
    code, printed = on_terminal(*TRAIN, cwd=folder, width=0)
    assert code == 0
    assert "Saved the model in small.model." in printed


def steep(folder: Path, rate: float) -> None:
    """Write rows and a regression that diverges at this rate, because the features are not scaled."""
    features = 10.0 * np.random.default_rng(1).normal(size=(125, 2))
    lines = (f"{row @ [1.0, -2.0]:g} {row[0]:g} {row[1]:g}\n" for row in features)
    (folder / "steep.txt").write_text("".join(lines))
    network = {
        "data": {"format": "dense", "validateratio": 0.2},
        "train": {"epoch": 50, "numupdateperepoch": 5, "lr": rate, "decayclass": "Constant"},
        "default_optimizer": "SGD",
        "layers": {
            "value": {"type": "simpleinputlayer", "outputdim": 1},
            "loss": {"type": "losslayer", "lossfunc": "l2loss", "inputlayer": "value"},
        },
    }
    (folder / "steep.json").write_text(json.dumps(network))


STEEP = ("train", "--config", "steep.json", "--data", "steep.txt")
DIVERGED = (
    "error: epoch 5, step 3 of 5: layer 'loss': expected a finite loss, given inf; lower lr, scale the features, or "
    "take another seed\n"
)


def test_a_diverging_training_saves_its_last_finite_model(folder: Path) -> None:
    """A training diverged and saved no model, or had exit code 0, so a script used the model."""
    steep(folder, rate=0.1)
    ran = streamiter(*STEEP, "--plot", "t.svg", cwd=folder)
    assert (ran.returncode, ran.stderr) == (1, DIVERGED)
    *epochs, kept, saved = ran.stdout.splitlines()
    assert len(epochs) == 4
    assert kept == "The training diverged; the model is that of epoch 4, the last one that was finite."
    assert saved == "Saved the model in steep.model, the plot as t.svg."
    results = json.loads((folder / "steep.model" / "results.json").read_text())
    assert [result["epoch"] for result in results] == [1, 2, 3, 4]
    assert np.isfinite(load_network(folder / "steep.model").parameters["value.weight"]).all()
    ran = streamiter(*STEEP, "--json", "--model", "m", cwd=folder)
    assert (ran.returncode, ran.stderr) == (1, DIVERGED)
    summary = json.loads(ran.stdout)
    assert (summary["ended_by"], len(summary["epochs"]), summary["model"]) == ("divergence", 4, "m")


def test_a_training_that_diverges_at_once_leaves_no_model(folder: Path) -> None:
    """A training that diverged in its first epoch saved its initial parameters as a model."""
    steep(folder, rate=1e30)
    ran = streamiter(*STEEP, cwd=folder)
    assert (ran.returncode, ran.stdout) == (1, "")
    said, error = ran.stderr.splitlines()
    assert said == "The training diverged before its first epoch was over; there is no model to save."
    assert re.match(r"error: epoch 1, step \d of 5: .*expected .*finite .*; lower lr", error)
    assert not (folder / "steep.model").exists()


def test_a_warning_before_the_training_names_the_model_to_be_replaced(folder: Path) -> None:
    """Last week's model was replaced without a warning, because the default folder has the configuration's name."""
    assert streamiter(*TRAIN, "--epochs", "1", cwd=folder).stderr == ""
    ran = streamiter(*TRAIN, "--epochs", "1", cwd=folder)
    assert (ran.returncode, ran.stderr) == (
        0,
        "small.model holds a model, which the new one will replace; --model saves it elsewhere\n",
    )
    assert streamiter(*TRAIN, "--epochs", "1", "--model", "new", cwd=folder).stderr == ""


def test_the_error_about_missing_data_names_the_option(folder: Path) -> None:
    """The error about missing rows did not name the option, although most configurations have no path of data."""
    ran = streamiter("train", "--config", "small.json", cwd=folder)
    assert ran.returncode == 1
    assert ran.stderr == (
        "error: --data: expected a file of rows, given none, and no path in the data section of the network; "
        "write --data FILE\n"
    )


def test_placeholder_labels_are_no_error_of_predictions(folder: Path) -> None:
    """Rows to predict were refused, because they have 0 instead of a label."""
    assert streamiter(*TRAIN, "--epochs", "1", cwd=folder).returncode == 0
    (folder / "new.dummy").write_text("0 0 6 12 18\n0 1 7 13 19\n")
    ran = streamiter("predict", "--model", "small.model", "--data", "new.dummy", cwd=folder)
    assert (ran.returncode, len(ran.stdout.splitlines())) == (0, 3)
    assert ran.stderr.startswith("2 rows; how good they are is not known: ")
