"""Commands that are refused, with the texts in ``refusals.txt``.

``PYTHONPATH=tests python tests/cli/test_refusals.py`` writes the texts as they are now.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cli.program import streamiter
from cli.test_cli_run import write_flows
from cli.test_cli_topics import LINES, written
from cli.test_cli_train import write_network
from networks.training_support import document
from support.refusals import Call, refusals_test, write

from streamiter.networks.network import Network
from streamiter.networks.serving import save_network

FILE = Path(__file__).with_name("refusals.txt")


class Exit(Exception):
    """The exit code of a command, and what it has printed to the standard error, with ⏎ between the lines."""


def left(folder: Path) -> set[str]:
    """Return the files of a folder without those that Python and SQLite keep for themselves."""
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if "__pycache__" not in file.parts}
    return {file for file in files if not file.endswith(("-wal", "-shm"))}


@contextmanager
def new_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made).resolve()


def in_a_folder(fill: Callable[[Path], Any] = lambda _: None) -> Call:
    """Run commands in a folder that they leave as it is, with lines at their standard input."""

    async def call(code: str) -> object:
        with new_folder() as folder:
            if (filling := fill(folder)) is not None:
                await filling
            before = left(folder)

            def run(line: str) -> str:
                ran = streamiter(*line.split(), cwd=folder, given=LINES)
                if ran.returncode == 0:
                    return ran.stdout
                assert (ran.stdout, left(folder)) == ("", before)
                lines = " ⏎ ".join(filter(None, ran.stderr.splitlines()))
                raise Exit(f"{ran.returncode}: {lines}".replace(str(folder), "…"))

            return eval(code, {"run": run, "train": lambda options: run(f"{TRAIN} {options}")})

    return call


def save_larger_network(folder: Path) -> None:
    """Save a network that has one layer more than the network of the other folder."""
    larger = document()
    larger["layers"].append({"name": "other", "type": "simpleinputlayer", "outputdim": 1})
    larger["layers"][4]["inputlayers"].append("other")
    made = Network.from_json(larger)
    save_network(folder, made, made.initial_parameters(seed=1))


def write_networks(folder: Path) -> None:
    """Write a configuration, the rows of its network, and files that do not fit."""
    write_network(folder)
    (folder / "torn.dummy").write_text("1 0 6 12 18\n1 0 6 x 18\n")
    (folder / "zeros.dummy").write_text("1 0 6 12 18\n0 0 6 12 19\n" * 4)
    (folder / "short.dummy").write_text("1 0 6 12 18\n-1 0 6 12\n")
    (folder / "far.dummy").write_text("1 0 6 12 49\n")
    save_larger_network(folder / "larger.model")


TRAIN = "train --config small.json --data train.dummy --epochs 1"
CALLS = {
    "topics and models, where there are none": in_a_folder(),
    "topics, of which there is one": in_a_folder(lambda folder: written(folder, [b"1"])),
    "networks": in_a_folder(write_networks),
    "flows": in_a_folder(write_flows),
}

test_wrong_commands_are_refused_with_their_texts = refusals_test(FILE, CALLS)


if __name__ == "__main__":
    write(FILE, CALLS)
