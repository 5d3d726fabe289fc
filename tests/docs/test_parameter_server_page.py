"""The tables of docs/parameter-server.md are complete, and contain only names that exist."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from streamiter import errors
from streamiter.parameter_server import Matrix, psf

PAGE = (Path(__file__).parents[2] / "docs" / "parameter-server.md").read_text(encoding="utf-8")

BASE_CLASSES = {"PartitionFunction", "UpdateFunction", "GetFunction"}
FUNCTIONS = sorted(set(psf.__all__) - BASE_CLASSES)


def first_cells(heading: str) -> list[str]:
    """Return the code in the first column of the tables below a heading."""
    [section] = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
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
