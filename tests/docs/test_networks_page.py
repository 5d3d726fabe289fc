"""The tables of docs/networks.md are complete, and contain only names that exist."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streamiter.networks import Network
from streamiter.networks.configuration.layer_kinds import ALIASES, LAYER_KINDS, LayerKind
from streamiter.networks.configuration.sections import LOSSES, OPTIMIZERS, TRANSFER_FUNCTIONS, FunctionKinds
from streamiter.networks.settings import LEARNING_RATES

PAGE = (Path(__file__).parents[2] / "docs" / "networks.md").read_text(encoding="utf-8")

SMALLEST: Mapping[str, Any] = {
    "layers": {
        "wide": {"type": "simpleinputlayer", "outputdim": 1},
        "loss": {"type": "losslayer", "inputlayer": "wide"},
    }
}


def rows(heading: str, head: str = "") -> list[list[str]]:
    """Return the rows of the tables below a heading whose first line begins with ``head``, without that line."""
    [section] = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    tables = re.findall(rf"^\| {re.escape(head)}.*?\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for table in tables for line in table.splitlines()
    ]


def codes(cell: str) -> list[str]:
    """Return the code in a cell."""
    return re.findall(r"`(.*?)`", cell)


def test_each_type_of_layer_is_in_the_table() -> None:
    """A type of layer was missing in the table, or had its old name."""
    named = [name.lower() for row in rows("Layers", "type") for name in codes(row[0])]
    assert sorted(named) == sorted([*(kind.lower() for kind in LAYER_KINDS), *ALIASES])


@pytest.mark.parametrize("name", LAYER_KINDS)
def test_each_type_of_layer_has_its_keys_in_the_table(name: str) -> None:
    """A key in the table was unknown to the reader, or a required key was missing in the table."""
    [row] = [row for row in rows("Layers", "type") if codes(row[0])[0] == name]
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
    listed = {codes(row[0])[0]: parameters(row[-1]) for row in rows(heading, "type")}
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
    listed = {codes(row[0])[0]: row[2] for row in rows("The file", f"key of `{section}`")}
    canonical = Network.from_json(SMALLEST).to_json()[section]
    # The canonical form leaves these keys out if the file does not have them.
    left_out = {"data": {"path"}, "model": {"loadpath", "savepath", "init"}, "train": set()}[section]
    assert set(listed) == set(canonical) | left_out
    for key, value in canonical.items():
        assert json.loads(codes(listed[key])[0]) == value, key


@pytest.mark.parametrize("section", ["data", "model"])
def test_keys_that_have_no_default_are_known(section: str) -> None:
    """A key in the table caused a warning."""
    listed = {codes(row[0])[0]: row[2] for row in rows("The file", f"key of `{section}`")}
    optional = {key: "somewhere" for key, default in listed.items() if default == "–"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Network.from_json({**SMALLEST, section: optional})


def test_the_keys_of_the_file_are_known() -> None:
    """A key in the table caused a warning, or was required under another name."""
    listed = {codes(row[0])[0]: codes(row[2]) for row in rows("The file", "key of the file")}
    assert set(listed) == {"data", "default_optimizer", "default_transfunc", "default_lossfunc", "layers"}
    document = dict(SMALLEST)
    document |= {key: default[0] for key, default in listed.items() if key.startswith("default_")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network = Network.from_json(document)
    assert network.to_json() == Network.from_json(SMALLEST).to_json()


def test_each_learning_rate_and_each_initialization_is_in_its_table() -> None:
    """A name that is valid in the file was missing in the table."""
    assert [codes(row[0])[0] for row in rows("Learning rates")] == list(LEARNING_RATES)
    assert [codes(row[0])[0] for row in rows("Initial values")] == ['"xavier"', '"angel"']
