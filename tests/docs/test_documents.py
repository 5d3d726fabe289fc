"""The code in the documents runs, and the names in the documents exist."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.processes import forked_run
from support.waiting import PATIENCE_S

from streamiter.cli.app import app

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
    found: list[object] = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            if match["language"] == language and is_program(match["code"]) is programs:
                found.append(pytest.param(match, id=f"{document.relative_to(ROOT)}:{line}"))
    return found


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
    program.write_text(block["code"], encoding="utf-8")
    run = forked_run([sys.executable, "-W", "error", str(program)], cwd=tmp_path, limit_s=PATIENCE_S)
    assert run.returncode == 0, run.stderr
    if block["printed"] is not None:
        assert run.stdout == block["printed"]
    for drawn in tmp_path.glob("*.svg"):
        shown = PICTURES / drawn.name
        assert drawn.read_text(encoding="utf-8") == shown.read_text(encoding="utf-8"), drawn


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
            command: Any = typer.main.get_command(app)
            for word in words[1:]:
                if (below := getattr(command, "commands", None)) is None:
                    break  # the remaining words are arguments
                assert word in below, line
                command = below[word]
        elif words[:1] == ["python"] and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), line
        elif words[:2] == ["docker", "compose"]:
            assert (ROOT / "docker-compose.yml").is_file(), line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_have_targets(document: Path) -> None:
    """A page was renamed, and links still had its old name."""
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target
