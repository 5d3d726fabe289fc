"""The program as a whole, and its commands that draw a flow and show a network."""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cli.program import PROGRAM, on_terminal, streamiter
from PIL import Image


def test_the_version_is_that_of_the_distribution(tmp_path):
    """A bug report had no version, or a wrong one."""
    ran = streamiter("--version", cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"streamiter {version('streamiter')}\n", "")


def test_the_installed_program_is_the_same_as_the_module(tmp_path):
    """`streamiter` and `python -m streamiter` had different commands."""
    installed = Path(sys.executable).parent / "streamiter"
    assert installed.exists()
    assert (
        streamiter("--help", cwd=tmp_path, command=[str(installed)]).stdout
        == streamiter("--help", cwd=tmp_path, command=PROGRAM).stdout
    )


@pytest.mark.parametrize(
    "command",
    [
        ["demo"],
        ["run"],
        ["draw"],
        ["topics", "create"],
        ["topics", "list"],
        ["topics", "produce"],
        ["topics", "tail"],
        ["models", "tail"],
        ["models", "show"],
        ["checkpoints", "list"],
        ["checkpoints", "show"],
        ["checkpoints", "verify"],
        ["checkpoints", "prune"],
        ["network", "show"],
        ["network", "draw"],
        ["network", "check"],
    ],
    ids=" ".join,
)
def test_the_help_of_every_command_has_examples(tmp_path, command):
    """The help had no line that can be copied, because examples were missing or were joined to one paragraph."""
    ran = streamiter(*command, "--help", cwd=tmp_path)
    assert ran.returncode == 0
    examples = ran.stdout.partition("Examples:\n")[2].splitlines()
    assert len(examples) >= 2
    assert all(re.match(rf"    (\w.* \| )?streamiter {' '.join(command)}\b", example) for example in examples)


@pytest.mark.parametrize("command", [[], ["topics", "create"], ["topics", "tail"], ["models", "show"]], ids=" ".join)
def test_urls_with_a_question_mark_are_quoted_in_examples(tmp_path, command):
    """A shell took the ? of a pasted URL for a pattern, and zsh said `no matches found`."""
    urls = re.findall(r".?sqlite:\S*\?\S*", streamiter(*command, "--help", cwd=tmp_path).stdout)
    assert urls
    assert all(re.fullmatch(r"'[^']*'", url) for url in urls)


def test_the_program_without_arguments_says_what_to_do_first(tmp_path):
    """A new user saw ten commands in the order of the alphabet, and did not know where to begin."""
    ran = streamiter(cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (2, "")
    commands = re.findall(r"^ {7}(streamiter .+)$", ran.stdout, re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["demo", "run", "serve"]
    assert "streamiter --help" in ran.stdout


def test_the_first_flow_that_the_program_shows_runs(tmp_path):
    """The first flow that a new user pasted failed."""
    shown = streamiter(cwd=tmp_path).stdout
    lines = re.findall(r"^ {7}((?:from|flow).+)$", shown, re.MULTILINE)
    (tmp_path / "words.py").write_text("\n".join(lines) + "\n")
    ran = streamiter("run", "words.py:flow", cwd=tmp_path)
    assert (ran.returncode, ran.stdout.splitlines()[:2]) == (0, ["to", "be"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "No such command 'nosuch'."),
        (["run"], "Missing argument 'MODULE:FLOW'."),
        (["run", "x:y", "--nosuch"], "No such option: --nosuch"),
        (["models", "tail", "memory://x"], "Missing option '--model' / '-m'."),
        (["demo", "--flights", "0"], "'--flights'"),
        (["demo", "--labels", "never"], "'--labels'"),
        (["topics", "tail", "memory://x", "-n", "-1"], "'--count' / '-n'"),
        (["topics", "produce", "file:x.jsonl", "--partitions", "2"], "'--partitions': expected --create with it"),
    ],
)
def test_wrong_arguments_are_usage_errors(tmp_path, arguments, said):
    """A script could not distinguish a typing error from a failure, because both had one exit code."""
    ran = streamiter(*arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


FLOW = """
from streamiter import Flow

flow = Flow("clicks")
flow.from_items([1, 2]).map(lambda x: x + 1, name="plus").collect()
"""


@pytest.fixture
def folder_of_flows(tmp_path: Path) -> Path:
    (tmp_path / "clicks.py").write_text(FLOW)
    return tmp_path


def _kind(file: Path) -> str:
    content = file.read_bytes()
    if content.startswith(b"\x89PNG"):
        with Image.open(file) as image:
            image.load()
        return "png"
    if content.startswith(b"<svg"):
        ElementTree.fromstring(content)
        return "svg"
    assert b"flowchart LR" in content
    return "mermaid"


def test_a_drawing_without_a_file_is_mermaid_text_on_standard_output(folder_of_flows):
    """The drawing could not be pasted into a document."""
    ran = streamiter("draw", "clicks:flow", cwd=folder_of_flows)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("---\ntitle: clicks\n---\nflowchart LR\n")
    assert '["plus"]' in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "file", "kind"),
    [
        ([], "flow.mmd", "mermaid"),
        ([], "flow.svg", "svg"),
        ([], "flow.png", "png"),
        ([], "FLOW.SVG", "svg"),
        (["--format", "svg"], "flow.xml", "svg"),
        (["--format", "mermaid"], "flow.png", "mermaid"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_the_suffix_of_the_file_chooses_the_format_unless_an_option_does(folder_of_flows, arguments, file, kind):
    """Users had to type the format although the file name has it, or could not choose their own file name."""
    ran = streamiter("draw", "clicks:flow", "-o", file, *arguments, cwd=folder_of_flows)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert _kind(folder_of_flows / file) == kind


SERVED = """
from streamiter import Flow, Operator
from streamiter.parameter_server import ParameterServer

class Train(Operator):
    def process(self, record, out): ...

flow = Flow("training")
flow.from_items([1, 2]).process(Train, parameter_server=ParameterServer(shards=3)).collect()
"""


def test_a_parameter_server_of_the_flow_is_drawn(folder_of_flows):
    """The parameter server, which keeps half of the flow's state, was missing in the drawing."""
    (folder_of_flows / "training.py").write_text(SERVED)
    ran = streamiter("draw", "training:flow", cwd=folder_of_flows)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert '[["parameter server<br>3 shards in this process"]]' in ran.stdout


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
def folder_of_networks(tmp_path: Path) -> Path:
    (tmp_path / "net.json").write_text(json.dumps(NETWORK))
    return tmp_path


def rewritten(folder_of_networks: Path, **keys: Any) -> None:
    (folder_of_networks / "net.json").write_text(json.dumps({**NETWORK, **keys}))


def test_show_prints_the_table(folder_of_networks):
    """The printed table differed from network.summary(), and could not be searched and pasted."""
    ran = streamiter("network", "show", "net.json", cwd=folder_of_networks)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, TABLE, "")


def test_show_on_a_terminal_breaks_cells_and_not_the_table(folder_of_networks):
    """A long row was folded over the next row."""
    code, printed = on_terminal("network", "show", "net.json", cwd=folder_of_networks, width=60)
    assert code == 0
    lines = [line.rstrip() for line in printed.replace("\r", "").splitlines()]
    assert all(len(_plain(line)) <= 60 for line in lines)
    for word in ("net.json: 9 features, float32", "parameters", "wide", "loss", "2 layers, 10 parameters"):
        assert word in printed


def _plain(line: str) -> str:
    """Return the line without the codes that switch colours."""
    parts = line.split("\x1b[")
    return parts[0] + "".join(part.partition("m")[2] for part in parts[1:])


def test_show_as_json_is_one_document(folder_of_networks):
    """Scripts had to parse a table for numbers."""
    ran = streamiter("network", "show", "net.json", "--json", cwd=folder_of_networks)
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


def test_the_canonical_form_of_a_canonical_file_is_the_same(folder_of_networks):
    """The file that is saved with a model was not the canonical form, and changed when it was saved again."""
    ran = streamiter("network", "show", "net.json", "--canonical", cwd=folder_of_networks)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["train"]["numupdateperepoch"] == 10
    (folder_of_networks / "saved.json").write_text(ran.stdout)
    again = streamiter("network", "show", "saved.json", "--canonical", cwd=folder_of_networks)
    assert again.stdout == ran.stdout


def test_two_forms_at_once_are_a_usage_error(folder_of_networks):
    """Of two given forms, one was left out silently."""
    ran = streamiter("network", "show", "net.json", "--canonical", "--json", cwd=folder_of_networks)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "'--canonical': expected one of --json and --canonical, given both" in ran.stderr


def test_check_says_how_large_a_good_network_is(folder_of_networks):
    """The check of a good file printed nothing, so users did not know whether it was checked."""
    ran = streamiter("network", "check", "net.json", cwd=folder_of_networks)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "net.json: 9 features, float32, 2 layers, 10 parameters\n"


def test_check_refuses_a_wrong_file_and_says_where_it_is_wrong(folder_of_networks):
    """A script started a training with a wrong file, or the user got a traceback."""
    layers = [NETWORK["layers"][0], {**NETWORK["layers"][1], "type": "simpleinput"}]
    rewritten(folder_of_networks, layers=layers)
    ran = streamiter("network", "check", "net.json", cwd=folder_of_networks)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        'error: net.json:1: layers.wide.type: expected a type of layer, given "simpleinput"; '
        "did you mean 'SimpleInputLayer'?\n"
    )


@pytest.mark.parametrize("command", ["show", "draw", "check"])
def test_unknown_keys_are_printed_on_stderr(folder_of_networks, command):
    """Warnings were mixed into the output for the next program, or unknown keys were left out silently."""
    rewritten(folder_of_networks, trian={})
    ran = streamiter("network", command, "net.json", cwd=folder_of_networks)
    assert ran.returncode == 0
    assert ran.stderr == ("warning: net.json:1: trian: unknown, and left out; did you mean 'train'?\n")
    assert "trian" not in ran.stdout


def test_draw_prints_mermaid_text(folder_of_networks):
    """The drawing of a network could not be pasted into a document."""
    ran = streamiter("network", "draw", "net.json", cwd=folder_of_networks)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith('---\ntitle: "net.json"\n---\nflowchart LR\n')
    assert 's1["wide<br>SimpleInputLayer, Identity<br>10 parameters' in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "file"),
    [([], "net.svg"), ([], "net.png"), ([], "net.mmd"), (["--format", "svg"], "net.xml")],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_draw_writes_the_format_of_the_suffix_or_of_the_option(folder_of_networks, arguments, file):
    """The suffix of the file did not choose the format, as it does with `streamiter draw`."""
    ran = streamiter("network", "draw", "net.json", "-o", file, *arguments, cwd=folder_of_networks)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    written = folder_of_networks / file
    if file.endswith(".png"):
        with Image.open(written) as image:
            image.load()
    elif file.endswith(".mmd"):
        assert "flowchart LR" in written.read_text()
    else:
        assert ElementTree.fromstring(written.read_bytes()).tag.endswith("svg")
