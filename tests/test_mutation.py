"""`make mutate` reports the changes that no test notices, and reads the list of explained ones."""

from __future__ import annotations

import re
import tomllib

from support.mutation import LIST, ROOT, Mutant, report

SPLIT = Mutant("streamiter.values.records.take", "return a", "return b")
JOIN = Mutant("streamiter.values.records.join", "x = 1", "x = 2")


def test_a_survivor_that_is_not_explained_fails_the_command() -> None:
    """The command always succeeded, so the list of changes that no test notices only grew."""
    lines, is_good = report([SPLIT, JOIN], {JOIN: "the same for all callers"})
    assert not is_good
    assert lines == [
        "\nstreamiter.values.records.join\n    - x = 1\n    + x = 2\n    = the same for all callers",
        "\nNOT NOTICED: write a test, or list it in mutants.toml with the reason:\n"
        "streamiter.values.records.take\n    - return a\n    + return b",
        "\n2 survivors: 1 not explained; 0 listed ones are gone",
    ]


def test_an_explanation_of_a_noticed_change_is_reported_and_fails_nothing() -> None:
    """A line was changed, and the explanation of its old change stayed in the list."""
    lines, is_good = report([], {JOIN: "the same for all callers"})
    assert is_good
    assert lines[0].startswith("\nlisted in mutants.toml, but noticed or no longer made; take it out:\n")
    assert lines[-1].endswith("0 survivors: 0 not explained; 1 listed ones are gone")


def test_the_list_names_existing_modules_and_tests() -> None:
    """A module was moved, and was not mutated any more, without an error."""
    listed = tomllib.loads(LIST.read_text())
    modules = [core["module"] for core in listed["core"]]
    tests = {test.split("::")[0] for core in listed["core"] for test in core["tests"]}
    assert [module for module in modules if not (ROOT / module).is_file()] == []
    assert [test for test in sorted(tests) if not (ROOT / "tests" / test).exists()] == []
    named = [(core["module"], name) for core in listed["core"] for name in core.get("names", ["*"])]
    assert len(set(named)) == len(named)
    assert [
        (module, name)
        for module, name in named
        if name != "*" and not re.search(rf"^(async def|def|class) {name}\b", (ROOT / module).read_text(), re.M)
    ] == []
    cores = tuple(module.removesuffix(".py").replace("/", ".") + "." for module in modules)
    assert [each["where"] for each in listed["survivor"] if not each["where"].startswith(cores)] == []
    assert all(each["why"] for each in listed["survivor"])
