"""``make mutate`` makes small changes in the pure cores, one at a time, and lists the changes that no test notices.

mutmut makes the changes and runs the tests. ``tests/mutants.toml`` lists the cores with the tests of each, and the
known survivors, each with the reason why it may survive. A survivor that is not listed there fails the command.
A change also counts as noticed if it causes an endless loop, or if mypy refuses it as in `make check`.

    make mutate MODULE=iteration/progress     # all cores whose path contains this text
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

__all__ = ["Mutant", "main", "report"]

ROOT: Final = Path(__file__).resolve().parents[2]
LIST: Final = ROOT / "tests" / "mutants.toml"

# Each run has the same examples, so that the survivors do not change; failing examples are not made smaller.
_ENVIRONMENT: Final = {"STREAMITER_EXAMPLES_SEED": "1", "OPENBLAS_NUM_THREADS": "1"}
_EXAMPLES: Final = 5000
# Random examples of the same pure states on disk take a minute for each change.
_PYTEST_ARGUMENTS: Final = ["--hypothesis-profile=mutation", "-p", "no:cacheprovider", "-k", "not (rocks and models)"]
# A change may make tests slower; a run of more than this many times the usual time is an endless loop.
_TIMEOUT_FACTOR: Final = 8.0
# The module with the most mutants takes less than half this time on two busy cores; each mutant has its own limit.
_LONGEST_S: Final = 4 * 3600.0
# Each changed function is a copy next to the original, so attributes are declared more than once.
_TYPE_CHECK: Final = [
    "mypy",
    "--output",
    "json",
    "--disable-error-code",
    "unused-ignore",
    "--disable-error-code",
    "no-redef",
]
_NOTICED: Final = {"killed", "timeout", "segfault", "caught by type check"}


class Mutant(NamedTuple):
    """A change that no test has noticed: its function, and its lines before and after."""

    where: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.where}\n    - {self.before}\n    + {self.after}"


def main(wanted: list[str]) -> int:
    """Mutate the cores whose path contains one of these texts, or all; return the exit status."""
    listed = tomllib.loads(LIST.read_text())
    cores = [core for core in listed["core"] if not wanted or any(part in core["module"] for part in wanted)]
    if not cores:
        known = "\n  ".join(core["module"] for core in listed["core"])
        print(f"make mutate: expected MODULE to be part of one of these paths, given {', '.join(wanted)}:\n  {known}")
        return 2
    survivors: list[Mutant] = []
    for core in cores:
        os.environ["STREAMITER_EXAMPLES"] = str(core.get("examples", _EXAMPLES))
        count, alive = _mutated(core["module"], core.get("names", []), core["tests"])
        survivors += alive
        print(f"{core['module']}: {count} mutants, {len(alive)} not noticed", flush=True)
    known_ones = {
        Mutant(each["where"], each["before"], each["after"]): each["why"] for each in listed.get("survivor", [])
    }
    names = tuple(_dotted(core["module"]) for core in cores)
    lines, is_good = report(survivors, {each: why for each, why in known_ones.items() if each.where.startswith(names)})
    print("\n".join(lines))
    return 0 if is_good else 1


def report(survivors: Iterable[Mutant], known: dict[Mutant, str]) -> tuple[list[str], bool]:
    """Return the text to print, and whether every survivor is ``known`` with a reason."""
    found = list(dict.fromkeys(survivors))
    new = [mutant for mutant in found if mutant not in known]
    gone = [mutant for mutant in known if mutant not in found]
    lines = [f"\n{mutant}\n    = {known[mutant]}" for mutant in found if mutant in known]
    lines += [f"\nlisted in {LIST.name}, but noticed or no longer made; take it out:\n{mutant}" for mutant in gone]
    lines += [f"\nNOT NOTICED: write a test, or list it in {LIST.name} with the reason:\n{mutant}" for mutant in new]
    return [*lines, f"\n{len(found)} survivors: {len(new)} not explained; {len(gone)} listed ones are gone"], not new


def _mutated(module: str, names: list[str], tests: list[str]) -> tuple[int, list[Mutant]]:
    """Change these functions and classes; return the number of changes, and the unnoticed changes."""
    with TemporaryDirectory(prefix="streamiter-mutants-") as name:
        folder = Path(name)
        for part in ("streamiter", "connectors", "tests"):
            (folder / part).symlink_to(ROOT / part)
        (folder / "pyproject.toml").write_text(_configuration(module, tests))
        children = ["--max-children", workers] if (workers := os.environ.get("WORKERS")) else []
        patterns = [f"{_dotted(module)}{kind}" for name in names for kind in (f"x_{name}__*", f"xǁ{name}ǁ*")]
        _mutmut(folder, "run", *children, *patterns)
        data = json.loads((folder / "mutants" / f"{module}.meta").read_text())
        statuses = [
            (mutant, status)
            for mutant, status in _statuses(_mutmut(folder, "results"))
            if not patterns or any(fnmatchcase(mutant, pattern) for pattern in patterns)
        ]
        alive = [
            _change(mutant, _mutmut(folder, "show", mutant)) for mutant, status in statuses if status not in _NOTICED
        ]
        count = sum(
            not patterns or any(fnmatchcase(mutant, pattern) for pattern in patterns)
            for mutant in data["exit_code_by_key"]
        )
        return count, alive


def _configuration(module: str, tests: list[str]) -> str:
    """Return the project's configuration with the settings of mutmut; a list of texts is the same in JSON and TOML."""
    mutmut = {
        "source_paths": ["streamiter"],
        "only_mutate": [module],
        "pytest_add_cli_args": _PYTEST_ARGUMENTS,
        "pytest_add_cli_args_test_selection": [f"tests/{test}" for test in tests],
        "timeout_multiplier": _TIMEOUT_FACTOR,
        "type_check_command": [*_TYPE_CHECK, "--cache-dir", str(ROOT / ".mypy_cache" / "mutants"), module],
        "use_git_change_detection": False,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in mutmut.items()]
    return "\n".join([(ROOT / "pyproject.toml").read_text(), "[tool.mutmut]", *lines, ""])


def _mutmut(folder: Path, *arguments: str) -> str:
    programs = Path(sys.executable).parent
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        [programs / "mutmut", *arguments],
        cwd=folder,
        env=os.environ | _ENVIRONMENT | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_LONGEST_S,
    )
    if ended.returncode:
        # Remove the lines with a spinner of Braille characters.
        shown = "\n".join(line for line in ended.stdout.splitlines() if not "\u2800" <= line[:1] <= "\u28ff")
        raise SystemExit(f"mutmut {' '.join(arguments)} failed:\n{shown[-5000:]}")
    return ended.stdout


def _statuses(results: str) -> Iterator[tuple[str, str]]:
    for line in results.splitlines():
        mutant, _, status = line.strip().rpartition(": ")
        if "__mutmut_" in mutant:
            yield mutant, status


def _change(mutant: str, shown: str) -> Mutant:
    """Return the change in a diff of mutmut, with its lines joined."""
    lines = [line for line in shown.splitlines() if not line.startswith(("---", "+++", "@@", "#"))]
    before, after = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in ("-", "+"))
    return Mutant(_where(mutant), before, after)


def _where(mutant: str) -> str:
    """Return the dotted name of the function; mutmut marks classes with ǁ and functions with x_."""
    name = mutant.rpartition("__mutmut_")[0]
    return re.sub(r"\.xǁ(.*)ǁ", r".\1.", name).replace(".x_", ".")


def _dotted(module: str) -> str:
    return module.removesuffix(".py").replace("/", ".") + "."


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
