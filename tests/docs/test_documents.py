"""The code in the documents runs, the names in them exist, and their tables are complete."""

import ast
import builtins
import dataclasses
import functools
import importlib
import json
import os
import re
import socket
import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from support.fork_server import FORKS_PROCESSES
from support.kafka_server import free_ports
from support.processes import forked_run
from support.waiting import PATIENCE_S
from topics.contract_lifecycle import LifecycleContract
from topics.contract_range import RangeContract
from topics.contract_reading import ReadingContract
from topics.contract_writing import WritingContract
from topics.topic_case import TopicCase

import streamiter.errors
from streamiter import errors
from streamiter.cli.app import app
from streamiter.networks import Network
from streamiter.networks.configuration.layer_kinds import ALIASES, LAYER_KINDS, LayerKind
from streamiter.networks.configuration.sections import LOSSES, OPTIMIZERS, TRANSFER_FUNCTIONS, FunctionKinds
from streamiter.networks.settings import LEARNING_RATES
from streamiter.parameter_server import Matrix, psf
from streamiter.service import service
from streamiter.service.observing.logs import figures_of
from streamiter.service.observing.observations import Observations
from streamiter.topics import topic
from streamiter.topics.urls import ENTRY_POINT_GROUP
from streamiter_kafka.options import KafkaOptions

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(
        file
        for room in ("docs", "examples")
        for file in sorted((ROOT / room).rglob("*.md"))
        if "node_modules" not in file.parts
    ),
]
BLOCK = re.compile(
    r"^```(?P<language>\w+)\n(?P<code>.*?)^```(\n\n```text\n(?P<printed>.*?)^```)?", re.MULTILINE | re.DOTALL
)
PICTURES = ROOT / "docs" / "pictures"


def blocks(language: str, *, programs: bool = True) -> list[object]:
    """Return the code blocks of a language in all documents, each with its document and line as its name.

    Without ``programs``, return the parts of programs instead of the whole ones.
    """
    return [
        pytest.param(match, id=place)
        for place, match in all_blocks()
        if match["language"] == language and is_program(match["code"]) is programs
    ]


@functools.cache
def all_blocks() -> list[tuple[str, re.Match[str]]]:
    """Return all code blocks with their places; all processes of the tests read them, to collect the tests."""
    return [
        (f"{document.relative_to(ROOT)}:{1 + match.string.count(chr(10), 0, match.start())}", match)
        for document in DOCUMENTS
        for match in BLOCK.finditer(document.read_text(encoding="utf-8"))
    ]


def is_program(code: str) -> bool:
    """Return whether the code is a whole program: it has no ``async with`` outside of functions."""
    return not re.search("^async with ", code, re.MULTILINE)


@pytest.mark.parametrize("block", blocks("python"))
def test_python_of_a_document_runs(block: re.Match[str], tmp_path: Path) -> None:
    """A reader pasted an example, and it failed on a name that had changed, or printed other lines.

    A picture that the example draws must equal the one in ``docs/pictures``. After a change of the drawings, copy the
    new picture there.
    """
    program = tmp_path / "example.py"
    program.write_text(at_free_ports(block["code"]), encoding="utf-8")
    # A flow in several processes is behind such a line, and its processes are forks, too.
    env = os.environ | (FORKS_PROCESSES if 'if __name__ == "__main__":' in block["code"] else {})
    run = forked_run([sys.executable, "-W", "error", str(program)], cwd=tmp_path, env=env, limit_s=PATIENCE_S)
    assert run.returncode == 0, run.stderr
    if block["printed"] is not None:
        assert run.stdout == block["printed"]
    for drawn in tmp_path.glob("*.svg"):
        shown = PICTURES / drawn.name
        assert drawn.read_text(encoding="utf-8") == shown.read_text(encoding="utf-8"), drawn


def at_free_ports(code: str) -> str:
    """Return the code with a port that is free now in place of the one that its reader opens in a browser."""
    return re.sub(r"(?<=127\.0\.0\.1:)\d{5}\b", str(*free_ports(1)), code)


def test_the_service_of_the_tutorial_says_that_its_port_is_in_use(tmp_path: Path) -> None:
    """The program waited a minute for a model, and then named the model instead of the port."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    [code] = [match["code"] for match in BLOCK.finditer(text) if "OnlineLearningService" in match["code"]]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = re.sub(r"(?<=127\.0\.0\.1:)\d{5}\b", str(taken.getsockname()[1]), code)
        run = forked_run([sys.executable, "-c", code], cwd=tmp_path, limit_s=PATIENCE_S)
    assert (run.returncode, run.stdout) == (1, "")
    assert "http.address: expected an address of this machine with a free port" in run.stderr
    assert "never retrieved" not in run.stderr  # as of an error beside which the program goes on


@pytest.mark.parametrize("block", blocks("python", programs=False))
def test_a_part_of_a_program_imports_names_that_exist(block: re.Match[str]) -> None:
    """A reader copied three lines of the first page, and did not know where their names come from."""
    nodes = list(ast.walk(ast.parse(block["code"])))
    imports = [(node.module, each.name) for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names]
    assert all(hasattr(importlib.import_module(str(module)), name) for module, name in imports)
    names = [node for node in nodes if isinstance(node, ast.Name)]
    used, made = ({each.id for each in names if isinstance(each.ctx, use)} for use in (ast.Load, ast.Store))
    assert used <= made | {name for _, name in imports} | set(dir(builtins))


def test_the_readme_says_what_its_first_example_prints(tmp_path: Path) -> None:
    """The first example printed something else than the text below it says."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = next(match["code"] for match in BLOCK.finditer(text) if match["language"] == "python")
    run = forked_run([sys.executable, "-c", code], cwd=tmp_path, check=True, limit_s=PATIENCE_S)
    claimed = re.search(r"It prints `(.*?)`", text)
    assert claimed is not None
    assert run.stdout.strip() == claimed[1]


def test_examples_that_learn_print_their_quality_beside_the_baseline() -> None:
    """An example printed how many rows it had learned from, and hid that always predicting the share was better."""
    codes = {block.id: block.values[0]["code"] for block in blocks("python")}  # type: ignore[attr-defined]
    codes |= {str(path): path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")}
    learns = {name: code for name, code in codes.items() if "train_online(" in code and ".validation" in code}
    assert len(learns) > 10
    silent = [name for name, code in learns.items() if not re.search("always|baseline|of the mean", code)]
    assert silent == []


@pytest.mark.parametrize("block", blocks("sh"))
def test_commands_of_a_document_exist(block: re.Match[str]) -> None:
    """A document named a make target or a command that does not exist."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in block["code"].splitlines():
        words = line.split("#", maxsplit=1)[0].split()
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
        elif words[:1] == ["streamiter"]:
            check_command(words[1:], line)
        elif words[:1] == ["python"] and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), line
        elif words[:2] == ["docker", "compose"]:
            assert (ROOT / "docker-compose.yml").is_file(), line


@functools.cache
def whole_command() -> Any:
    """Return the command of all commands, which takes 30 ms to make."""
    return typer.main.get_command(app)


def check_command(words: list[str], where: str) -> None:
    """Fail if no command of ``streamiter`` has these words, arguments behind them left aside."""
    command: Any = whole_command()
    for word in words:
        if (below := getattr(command, "commands", None)) is None or word.startswith("-"):
            break  # the remaining words are arguments
        assert word in below, where
        command = below[word]


FORMATS = ("checkpoint-format.md", "model-updates.md")
"""Pages in which `streamiter …` is the beginning of a file."""


def test_commands_in_sentences_exist() -> None:
    """The tutorial ended with the advice to run `streamiter models list`, which there has never been."""
    sentences = [
        (document, command.split())
        for document in DOCUMENTS
        if document.name not in FORMATS
        for command in re.findall("`streamiter ([a-z][^`]+)`", document.read_text(encoding="utf-8"))
    ]
    assert len(sentences) > 20
    for document, words in sentences:
        check_command(words, f"{document.name}: streamiter {' '.join(words)}")


def test_links_between_documents_have_targets() -> None:
    """A page was renamed, and links still had its old name."""
    assert [
        f"{document.relative_to(ROOT)}: {target}"
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists()
    ] == []


CONNECTOR_PAGE = (Path(__file__).parents[2] / "docs" / "your-own-connector.md").read_text(encoding="utf-8")


def first_block(language: str) -> str:
    """Return the first code block of a language."""
    found = re.search(rf"^```{language}\n(.*?)^```", CONNECTOR_PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


class TestConnectorOfThePage(WritingContract, RangeContract, ReadingContract, LifecycleContract):
    """A reader copied a connector that lost records, and that no URL led to."""

    @pytest.fixture
    def case(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TopicCase]:
        [(scheme, value)] = tomllib.loads(first_block("toml"))["project"]["entry-points"][ENTRY_POINT_GROUP].items()
        module = value.partition(":")[0]
        (tmp_path / f"{module}.py").write_text(first_block("python"), encoding="utf-8")
        metadata = tmp_path / f"{module}-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {module}\nVersion: 1\n", encoding="utf-8")
        entry_point = f"[{ENTRY_POINT_GROUP}]\n{scheme} = {value}\n"
        (metadata / "entry_points.txt").write_text(entry_point, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        yield TopicCase(handle=lambda name: topic(f"{scheme}://{name}"))
        sys.modules.pop(module, None)


KAFKA_PAGE = Path(__file__).parents[2] / "docs" / "kafka.md"


def test_the_page_has_every_option_and_its_default() -> None:
    """A page had other defaults than the code, and lacked the options of a year."""
    section = KAFKA_PAGE.read_text(encoding="utf-8").partition("## Options")[2].partition("## Reading")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.MULTILINE))
    assert documented == {option.name: shown(option.default) for option in fields(KafkaOptions)}


def shown(default: object) -> str:
    match default:
        case None:
            return "–"
        case bool():
            return f"`{str(default).lower()}`"
        case int() | float():
            return f"{default:,.10g}"
    return f"`{default}`"


NETWORKS_PAGE = (Path(__file__).parents[2] / "docs" / "networks.md").read_text(encoding="utf-8")

SMALLEST: Mapping[str, Any] = {
    "layers": {
        "wide": {"type": "simpleinputlayer", "outputdim": 1},
        "loss": {"type": "losslayer", "inputlayer": "wide"},
    }
}


def rows_of_networks(heading: str, head: str = "") -> list[list[str]]:
    """Return the rows of the tables below a heading whose first line begins with ``head``, without that line."""
    [section] = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", NETWORKS_PAGE, re.MULTILINE | re.DOTALL)
    tables = re.findall(rf"^\| {re.escape(head)}.*?\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for table in tables for line in table.splitlines()
    ]


def codes(cell: str) -> list[str]:
    """Return the code in a cell."""
    return re.findall(r"`(.*?)`", cell)


def test_each_type_of_layer_is_in_the_table() -> None:
    """A type of layer was missing in the table, or had its old name."""
    named = [name.lower() for row in rows_of_networks("Layers", "type") for name in codes(row[0])]
    assert sorted(named) == sorted([*(kind.lower() for kind in LAYER_KINDS), *ALIASES])


@pytest.mark.parametrize("name", LAYER_KINDS)
def test_each_type_of_layer_has_its_keys_in_the_table(name: str) -> None:
    """A key in the table was unknown to the reader, or a required key was missing in the table."""
    [row] = [row for row in rows_of_networks("Layers", "type") if codes(row[0])[0] == name]
    assert set(codes(row[2])) == keys_of(LAYER_KINDS[name])


def keys_of(kind: LayerKind) -> set[str]:
    """Return all keys that the reader asks for, except ``name`` and ``type``."""
    keys = {"outputdim"}
    if kind.inputs != "none":
        keys.add("inputlayer" if kind.inputs == "one" else "inputlayers")
    if kind.folded:
        keys |= {"outputdims", "transfuncs"}
    if kind.has_transfer_function:
        keys.add("transfunc")
    if kind.is_trainable:
        keys.add("optimizer")
    if kind.has_factors:
        keys.add("numfactors")
    if kind.has_weight_dims:
        keys |= {"weightdim", "weightdims"}
    if kind.is_loss:
        keys.add("lossfunc")
    return keys


@pytest.mark.parametrize(
    ("heading", "kinds", "common"),
    [
        ("Transfer functions", TRANSFER_FUNCTIONS, set()),
        ("Losses", LOSSES, set()),
        ("Optimizers", OPTIMIZERS, {"reg1", "reg2"}),
    ],
)
def test_functions_are_in_their_tables_with_their_defaults(
    heading: str, kinds: FunctionKinds, common: set[str]
) -> None:
    """A function was missing in the table, or its default had changed."""
    listed = {codes(row[0])[0]: parameters(row[-1]) for row in rows_of_networks(heading, "type")}
    assert listed == {
        name: {key: default for key, (default, _) in numbers.items() if key not in common}
        for name, (_, numbers) in kinds.kinds.items()
    }


def parameters(cell: str) -> dict[str, float]:
    """Return the names in code with the number that follows each of them."""
    return {name: float(number) for name, number in re.findall(r"`(\w+)` ([\d.]+)", cell)}


@pytest.mark.parametrize("section", ["data", "model", "train"])
def test_each_key_of_a_section_is_in_its_table_with_its_default(section: str) -> None:
    """A key was missing in the table, or its default had changed."""
    listed = {codes(row[0])[0]: row[2] for row in rows_of_networks("The file", f"key of `{section}`")}
    canonical = Network.from_json(SMALLEST).to_json()[section]
    # The canonical form leaves these keys out if the file does not have them.
    left_out = {"data": {"path"}, "model": {"loadpath", "savepath", "init"}, "train": set()}[section]
    assert set(listed) == set(canonical) | left_out
    for key, value in canonical.items():
        assert json.loads(codes(listed[key])[0]) == value, key


@pytest.mark.parametrize("section", ["data", "model"])
def test_keys_that_have_no_default_are_known(section: str) -> None:
    """A key in the table caused a warning."""
    listed = {codes(row[0])[0]: row[2] for row in rows_of_networks("The file", f"key of `{section}`")}
    optional = {key: "somewhere" for key, default in listed.items() if default == "–"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Network.from_json({**SMALLEST, section: optional})


def test_the_keys_of_the_file_are_known() -> None:
    """A key in the table caused a warning, or was required under another name."""
    listed = {codes(row[0])[0]: codes(row[2]) for row in rows_of_networks("The file", "key of the file")}
    assert set(listed) == {"data", "default_optimizer", "default_transfunc", "default_lossfunc", "layers"}
    document = dict(SMALLEST)
    document |= {key: default[0] for key, default in listed.items() if key.startswith("default_")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network = Network.from_json(document)
    assert network.to_json() == Network.from_json(SMALLEST).to_json()


def test_each_learning_rate_and_each_initialization_is_in_its_table() -> None:
    """A name that is valid in the file was missing in the table."""
    assert [codes(row[0])[0] for row in rows_of_networks("Learning rates")] == list(LEARNING_RATES)
    assert [codes(row[0])[0] for row in rows_of_networks("Initial values")] == ['"xavier"', '"angel"']


OPERATIONS_ROOT = Path(__file__).parents[2]
OPERATIONS_PAGE = (OPERATIONS_ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
RULES = OPERATIONS_ROOT / "examples" / "online_service" / "prometheus" / "rules.yaml"


def rows_of_operations(title: str) -> list[str]:
    """Return the names in the first column of the first table below a title."""
    section = OPERATIONS_PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)[`{]", cell)]


def test_the_page_says_what_to_do_for_each_error() -> None:
    """An error came at night, and the page for the people on duty did not have it."""
    tree = re.findall(r"^[│ ]*[├└]── (\w+) ", streamiter.errors.__doc__ or "", re.MULTILINE)
    assert rows_of_operations("Errors") == ["StreamiterError", *tree]


def test_the_page_explains_each_alert() -> None:
    """An alert fired, and no page explained it."""
    [group] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    alerts = [rule["alert"] for rule in group["rules"]]
    assert [name for name in rows_of_operations("Metrics") if name in alerts] == alerts


def test_the_page_has_all_fields_of_the_log() -> None:
    """A panel of the log showed nothing, because a field had another name than on the page."""
    figures = figures_of(Observations("clicks"), 30.0)
    assert rows_of_operations("Logs") == ["time", "level", "logger", "message", "traceback", *figures]


def test_the_page_has_all_exit_codes() -> None:
    """A supervisor restarted a service that another run had replaced, and the two took over from each other."""
    section = OPERATIONS_PAGE.split("\n## Exit codes\n")[1].split("\n## ")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    ends = {service.SUCCEEDED, service.FAILED, service.STALLED, service.TAKEN_OVER, service.ABORTED}
    assert codes == ends | {2}  # 2 is the code of a wrong command line.


SERVER_PAGE = (Path(__file__).parents[2] / "docs" / "parameter-server.md").read_text(encoding="utf-8")

BASE_CLASSES = {"PartitionFunction", "UpdateFunction", "GetFunction"}
FUNCTIONS = sorted(set(psf.__all__) - BASE_CLASSES)


def first_cells(heading: str) -> list[str]:
    """Return the code in the first column of the tables below a heading."""
    [section] = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", SERVER_PAGE, re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    return [code for cell in cells for code in re.findall(r"`(.*?)`", cell)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_is_in_one_table_with_its_arguments(name: str) -> None:
    """A function was missing in the tables, or its arguments had other names."""
    cells = first_cells("Functions where the parameters are")
    [given] = [cell for cell in cells if cell.startswith(f"{name}(")]
    fields = [field.name for field in dataclasses.fields(getattr(psf, name)) if field.init]
    expected = [field for field in fields if field not in ("matrix", "_")]
    listed = [argument for argument in given.removeprefix(f"{name}(").removesuffix(")").split(", ") if argument]
    assert sorted(listed) == sorted(expected)


def test_the_tables_name_only_existing_functions() -> None:
    """A function was renamed, and the table still had its old name."""
    named = [cell.split("(")[0] for cell in first_cells("Functions where the parameters are") if "(" in cell]
    assert sorted(named) == FUNCTIONS


def test_each_setting_of_a_matrix_is_in_the_table() -> None:
    """A setting was missing in the table."""
    settings = [field.name for field in dataclasses.fields(Matrix) if field.name != "name"]
    assert sorted(first_cells("Matrices")) == sorted(settings)


def test_each_error_of_the_parameter_server_is_in_the_table() -> None:
    """A user had an error, and the page did not say what to do."""
    raised = {
        name
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, errors.ParameterServerError)
    }
    named = {cell for cell in first_cells("When something is wrong") if hasattr(errors, cell)}
    assert named == raised
