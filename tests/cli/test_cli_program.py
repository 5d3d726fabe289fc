"""The program as a whole: its help, its version, wrong arguments."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from cli.program import PROGRAM, streamiter


def test_the_version_is_that_of_the_distribution(tmp_path):
    """A bug report needs it."""
    ran = streamiter("--version", cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"streamiter {version('streamiter')}\n", "")


def test_the_installed_program_is_the_same_as_the_module(tmp_path):
    """`streamiter` and `python -m streamiter` must not drift apart."""
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
    """Whoever asks for help wants a line to copy; each must be a line of its own, not filled up with others."""
    ran = streamiter(*command, "--help", cwd=tmp_path)
    assert ran.returncode == 0
    examples = ran.stdout.partition("Examples:\n")[2].splitlines()
    assert len(examples) >= 2
    assert all(re.match(rf"    (\w.* \| )?streamiter {' '.join(command)}\b", example) for example in examples)


@pytest.mark.parametrize(
    "command", [[], ["topics", "create"], ["topics", "tail"], ["models", "show"]], ids=" ".join
)
def test_urls_with_a_question_mark_are_quoted_in_examples(tmp_path, command):
    """Pasted without quotes, a shell takes the ? for a pattern: zsh says `no matches found`."""
    urls = re.findall(r".?sqlite:\S*\?\S*", streamiter(*command, "--help", cwd=tmp_path).stdout)
    assert urls
    assert all(re.fullmatch(r"'[^']*'", url) for url in urls)


def test_no_arguments_is_the_help(tmp_path):
    """Typed to see what there is."""
    ran = streamiter(cwd=tmp_path)
    assert ran.returncode == 2
    assert "Commands:" in ran.stdout + ran.stderr


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
        (
            ["topics", "produce", "file:x.jsonl", "--partitions", "2"],
            "'--partitions': expected --create with it",
        ),
    ],
)
def test_wrong_arguments_are_usage_errors(tmp_path, arguments, said):
    """Exit code 2, so that a script can tell a typing error from a failure."""
    ran = streamiter(*arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
