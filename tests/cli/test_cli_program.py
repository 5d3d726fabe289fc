"""The program as a whole has a help, a version, and errors for wrong arguments."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from cli.program import PROGRAM, streamiter


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
