"""`streamiter network` shows, draws and checks a configuration file."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cli.program import on_terminal, streamiter
from PIL import Image

NETWORK: dict[str, Any] = {
    "data": {"format": "dummy", "indexrange": 9},
    "train": {"epoch": 2},
    "layers": [
        {"name": "loss", "type": "losslayer", "inputlayer": "wide"},
        {"name": "wide", "type": "simpleinputlayer", "outputdim": 1},
    ],
}
TABLE = """\
net.json: 9 features, float32

layer  type                        inputs      output     parameters  status
─────  ──────────────────────────  ──────────  ─────────  ──────────  ──────
wide   SimpleInputLayer, Identity  mini-batch  (rows, 1)          10  Null
loss   LossLayer, LogLoss          wide        (rows, 1)           0  Null
─────  ──────────────────────────  ──────────  ─────────  ──────────  ──────
2 layers, 10 parameters
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.json").write_text(json.dumps(NETWORK))
    return tmp_path


def rewritten(folder: Path, **keys: Any) -> None:
    (folder / "net.json").write_text(json.dumps({**NETWORK, **keys}))


def test_show_prints_the_table(folder):
    """The printed table differed from network.summary(), and could not be searched and pasted."""
    ran = streamiter("network", "show", "net.json", cwd=folder)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, TABLE, "")


def test_show_on_a_terminal_breaks_cells_and_not_the_table(folder):
    """A long row was folded over the next row."""
    code, printed = on_terminal("network", "show", "net.json", cwd=folder, width=60)
    assert code == 0
    lines = [line.rstrip() for line in printed.replace("\r", "").splitlines()]
    assert all(len(_plain(line)) <= 60 for line in lines)
    for word in ("net.json: 9 features, float32", "parameters", "wide", "loss", "2 layers, 10 parameters"):
        assert word in printed


def _plain(line: str) -> str:
    """Return the line without the codes that switch colours."""
    parts = line.split("\x1b[")
    return parts[0] + "".join(part.partition("m")[2] for part in parts[1:])


def test_show_as_json_is_one_document(folder):
    """Scripts had to parse a table for numbers."""
    ran = streamiter("network", "show", "net.json", "--json", cwd=folder)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout) == {
        "network": "net.json",
        "features": 9,
        "dtype": "float32",
        "layers": [
            {
                "layer": "wide",
                "type": "SimpleInputLayer, Identity",
                "inputs": [],
                "output_dim": 1,
                "parameters": 10,
                "parameters_per_feature": 0,
                "status": "Null",
            },
            {
                "layer": "loss",
                "type": "LossLayer, LogLoss",
                "inputs": ["wide"],
                "output_dim": 1,
                "parameters": 0,
                "parameters_per_feature": 0,
                "status": "Null",
            },
        ],
    }


def test_the_canonical_form_of_a_canonical_file_is_the_same(folder):
    """The file that is saved with a model was not the canonical form, and changed when it was saved again."""
    ran = streamiter("network", "show", "net.json", "--canonical", cwd=folder)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["train"]["numupdateperepoch"] == 10
    (folder / "saved.json").write_text(ran.stdout)
    again = streamiter("network", "show", "saved.json", "--canonical", cwd=folder)
    assert again.stdout == ran.stdout


def test_two_forms_at_once_are_a_usage_error(folder):
    """Of two given forms, one was left out silently."""
    ran = streamiter("network", "show", "net.json", "--canonical", "--json", cwd=folder)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "'--canonical': expected one of --json and --canonical, given both" in ran.stderr


def test_check_says_how_large_a_good_network_is(folder):
    """The check of a good file printed nothing, so users did not know whether it was checked."""
    ran = streamiter("network", "check", "net.json", cwd=folder)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "net.json: 9 features, float32, 2 layers, 10 parameters\n"


def test_check_refuses_a_wrong_file_and_says_where_it_is_wrong(folder):
    """A script started a training with a wrong file, or the user got a traceback."""
    layers = [NETWORK["layers"][0], {**NETWORK["layers"][1], "type": "simpleinput"}]
    rewritten(folder, layers=layers)
    ran = streamiter("network", "check", "net.json", cwd=folder)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        'error: net.json:1: layers.wide.type: expected a type of layer, given "simpleinput"; '
        "did you mean 'SimpleInputLayer'?\n"
    )


@pytest.mark.parametrize("command", ["show", "draw", "check"])
def test_unknown_keys_are_printed_on_stderr(folder, command):
    """Warnings were mixed into the output for the next program, or unknown keys were left out silently."""
    rewritten(folder, trian={})
    ran = streamiter("network", command, "net.json", cwd=folder)
    assert ran.returncode == 0
    assert ran.stderr == ("warning: net.json:1: trian: unknown, and left out; did you mean 'train'?\n")
    assert "trian" not in ran.stdout


def test_draw_prints_mermaid_text(folder):
    """The drawing of a network could not be pasted into a document."""
    ran = streamiter("network", "draw", "net.json", cwd=folder)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith('---\ntitle: "net.json"\n---\nflowchart LR\n')
    assert 's1["wide<br>SimpleInputLayer, Identity<br>10 parameters' in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "file"),
    [([], "net.svg"), ([], "net.png"), ([], "net.mmd"), (["--format", "svg"], "net.xml")],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_draw_writes_the_format_of_the_suffix_or_of_the_option(folder, arguments, file):
    """The suffix of the file did not choose the format, as it does with `streamiter draw`."""
    ran = streamiter("network", "draw", "net.json", "-o", file, *arguments, cwd=folder)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    written = folder / file
    if file.endswith(".png"):
        with Image.open(written) as image:
            image.load()
    elif file.endswith(".mmd"):
        assert "flowchart LR" in written.read_text()
    else:
        assert ElementTree.fromstring(written.read_bytes()).tag.endswith("svg")
