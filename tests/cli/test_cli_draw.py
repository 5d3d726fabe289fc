"""`streamiter draw` draws a flow to standard output or into a file."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from cli.program import streamiter
from PIL import Image

FLOW = """
from streamiter import Flow

flow = Flow("clicks")
flow.from_items([1, 2]).map(lambda x: x + 1, name="plus").collect()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
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


def test_a_drawing_without_a_file_is_mermaid_text_on_standard_output(folder):
    """The drawing could not be pasted into a document."""
    ran = streamiter("draw", "clicks:flow", cwd=folder)
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
def test_the_suffix_of_the_file_chooses_the_format_unless_an_option_does(folder, arguments, file, kind):
    """Users had to type the format although the file name has it, or could not choose their own file name."""
    ran = streamiter("draw", "clicks:flow", "-o", file, *arguments, cwd=folder)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert _kind(folder / file) == kind


SERVED = """
from streamiter import Flow, Operator
from streamiter.parameter_server import ParameterServer

class Train(Operator):
    def process(self, record, out): ...

flow = Flow("training")
flow.from_items([1, 2]).process(Train, parameter_server=ParameterServer(shards=3)).collect()
"""


def test_a_parameter_server_of_the_flow_is_drawn(folder):
    """The parameter server, which keeps half of the flow's state, was missing in the drawing."""
    (folder / "training.py").write_text(SERVED)
    ran = streamiter("draw", "training:flow", cwd=folder)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert '[["parameter server<br>3 shards in this process"]]' in ran.stdout
