"""`streamiter checkpoints` lists, shows, verifies and prunes checkpoints."""

import contextlib
import json
import subprocess
from datetime import datetime

import pytest
from checkpoints.snapshots import header, parts, save, save_and_commit
from cli.program import on_terminal, streamiter
from typer.testing import CliRunner

from streamiter.cli.app import app
from streamiter.engine.storage.snapshot import CheckpointId
from streamiter.engine.storage.store import store_at

RUN = "4f1a"


async def stored(folder, *, flow="clicks", commits=(1, 2, 3), more=(), **in_header):
    """Store checkpoints of a run that has ended, and return their files by number.

    The checkpoints ``more`` are not committed; ``in_header`` is for their headers.
    """
    store = store_at(folder / "kept")
    await store.claim(flow, RUN)
    await save_and_commit(store, *commits, run=RUN, flow=flow)
    for number in more:
        await save(store, number, RUN, flow=flow, **in_header)
    await store.close()
    return {number: folder / "kept" / flow / f"{number:010d}-{RUN}.checkpoint" for number in (*commits, *more)}


def checkpoints(*arguments, cwd):
    """Run the command in this process, which saves a second; a few tests below run the program."""
    with contextlib.chdir(cwd):
        ran = CliRunner().invoke(app, ["checkpoints", *arguments], prog_name="streamiter")
    return subprocess.CompletedProcess(arguments, ran.exit_code, ran.stdout, ran.stderr)


async def test_checkpoints_are_a_line_each(tmp_path):
    """Users could not see from which checkpoints a flow can resume, and from which one it will."""
    files = await stored(tmp_path, more=[4])
    store = store_at(tmp_path / "kept")
    await store.claim("views", "b")
    await store.save(header(12, "b", flow="views", job_ended=True), parts())
    await store.commit("views", CheckpointId(12, "b"))
    await store.close()
    ran = streamiter("checkpoints", "list", "kept", cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    rows = [line.split("\t") for line in ran.stdout.splitlines()]
    assert [[*row[:3], row[5]] for row in rows] == [
        ["clicks", "1", RUN, ""],
        ["clicks", "2", RUN, ""],
        ["clicks", "3", RUN, "committed"],
        ["clicks", "4", RUN, "perhaps committed"],
        ["views", "12", "b", "committed, ended"],
    ]
    taken_at = datetime.fromisoformat(rows[0][3])
    assert taken_at.tzinfo is not None
    assert taken_at.timestamp() == 1_700_000_000
    assert int(rows[0][4]) == files[1].stat().st_size
    only = checkpoints("list", "kept", "--flow", "views", cwd=tmp_path).stdout
    assert only == ran.stdout.splitlines(keepends=True)[-1]
    code, printed = on_terminal("checkpoints", "list", "kept", cwd=tmp_path, width=100)
    assert code == 0
    assert "committed, ended" in printed


async def test_json_is_a_document_each(tmp_path):
    """A script could not check whether the last checkpoint was recent."""
    files = await stored(tmp_path, commits=[7])
    [line] = checkpoints("list", "kept", "--json", cwd=tmp_path).stdout.splitlines()
    assert json.loads(line) == {
        "flow": "clicks",
        "checkpoint": 7,
        "run": RUN,
        "created_at_ms": 1_700_000_000_007,
        "size_bytes": files[7].stat().st_size,
        "committed": True,
        "ended": False,
        "readable": True,
    }


async def test_a_damaged_checkpoint_is_in_the_list(tmp_path):
    """A damaged checkpoint was missing in the list, and users searched for it."""
    files = await stored(tmp_path)
    files[2].write_bytes(b"")
    rows = [line.split("\t") for line in checkpoints("list", "kept", cwd=tmp_path).stdout.splitlines()]
    assert [[row[1], *row[3:]] for row in rows if row[1] == "2"] == [["2", "", "0", "unreadable"]]


async def test_a_damaged_record_is_an_error_and_the_list_is_shown(tmp_path):
    """The message about a damaged record said to choose a checkpoint, and the list was not shown."""
    await stored(tmp_path)
    (tmp_path / "kept" / "clicks" / "record.json").write_text("{}")
    ran = checkpoints("list", "kept", cwd=tmp_path)
    assert len(ran.stdout.splitlines()) == 3
    assert ran.stderr.startswith("error: kept/clicks/record.json: expected the runs and the last commit")
    assert checkpoints("verify", "kept", cwd=tmp_path).returncode == 1
    assert checkpoints("prune", "kept", cwd=tmp_path).returncode == 1


async def test_the_content_of_a_checkpoint_is_shown(tmp_path):
    """Users could not see the steps of a checkpoint, nor which step made it large."""
    await stored(tmp_path)
    ran = checkpoints("show", "kept", cwd=tmp_path)
    fields = dict(line.split("\t") for line in ran.stdout.splitlines())
    assert (fields["flow"], fields["checkpoint"], fields["state"]) == ("clicks", "3", "committed")
    assert fields["step read"] == "TopicSource, parallelism 2, a source"
    assert fields["step größe"] == "Count, parallelism 1"
    assert fields["part read/0"] == "21 bytes"
    assert fields["commits in"] == 'kafka://"x"'
    document = json.loads(checkpoints("show", "kept", "--checkpoint", "2", "--json", cwd=tmp_path).stdout)
    assert document["checkpoint"] == 2
    described = {"definition": {}, "keeps": "its state"}
    assert document["steps"]["read"] == {"parallelism": 2, "operator": "TopicSource", "is_source": True, **described}
    assert list(document["parts"]) == ["read/0", "read/1", "größe/0"]
    code, printed = on_terminal("checkpoints", "show", "kept", cwd=tmp_path, width=100)
    assert code == 0
    assert "TopicSource, parallelism 2" in printed


async def test_of_two_checkpoints_with_one_number_the_committed_one_is_shown(tmp_path):
    """Of two checkpoints with one number, the one of a replaced run was shown."""
    await stored(tmp_path, commits=[1], more=[2])
    store = store_at(tmp_path / "kept")
    await store.claim("clicks", "0")
    await save_and_commit(store, 2, run="0")
    await store.close()
    assert "\nrun\t0\n" in checkpoints("show", "kept", "--checkpoint", "2", cwd=tmp_path).stdout


async def test_verifying_names_the_damaged_part(tmp_path):
    """One bit of a weight was flipped, and a script that copies backups did not notice it."""
    files = await stored(tmp_path)
    ran = checkpoints("verify", "kept", cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "".join(f"ok\tclicks\t{number}\t{RUN}\n" for number in (1, 2, 3))
    files[2].write_bytes(files[2].read_bytes().replace(b"counts", b"countz"))
    ran = streamiter("checkpoints", "verify", "kept", cwd=tmp_path)
    assert ran.returncode == 1
    assert ran.stdout == f"ok\tclicks\t1\t{RUN}\nok\tclicks\t3\t{RUN}\n"
    assert ran.stderr.startswith(f"error: kept/clicks/{files[2].name}, part 'größe/0': the checkpoint is damaged")
    assert "(`streamiter checkpoints list kept` shows them)" in ran.stderr
    assert checkpoints("verify", "kept", "--checkpoint", "1", cwd=tmp_path).returncode == 0
    problems = [
        json.loads(line)["problem"]
        for line in checkpoints("verify", "kept", "--json", cwd=tmp_path).stdout.splitlines()
    ]
    assert [problem is None for problem in problems] == [True, False, True]


async def test_verifying_reports_a_missing_committed_checkpoint(tmp_path):
    """The committed checkpoint was missing, all others were verified, and the flow could not resume."""
    files = await stored(tmp_path)
    files[3].unlink()
    ran = checkpoints("verify", "kept", cwd=tmp_path)
    assert ran.returncode == 1
    assert f"{files[3].name}: expected the committed checkpoint, given no such file" in ran.stderr


async def test_pruning_keeps_the_committed_one_and_those_before_it(tmp_path):
    """Pruning removed a checkpoint that was newer than the committed one, which a running job may commit."""
    await stored(tmp_path, commits=[1, 2, 3, 4, 5], more=[6], notes={})
    assert checkpoints("list", "kept", cwd=tmp_path).stdout.endswith("\tnot committed\n")
    ran = checkpoints("prune", "kept", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, f"removed\tclicks\t1\t{RUN}\nremoved\tclicks\t2\t{RUN}\n")
    ran = checkpoints("prune", "kept", "--keep", "2", "--json", cwd=tmp_path)
    assert json.loads(ran.stdout) == {"flow": "clicks", "checkpoint": 3, "run": RUN}
    ran = checkpoints("prune", "kept", "--keep", "2", cwd=tmp_path)
    assert (ran.stdout, ran.stderr) == ("", "flow 'clicks': there is nothing to remove\n")
    ran = checkpoints("prune", "kept", "--keep", "2", "--orphans", cwd=tmp_path)
    assert ran.stdout == f"removed\tclicks\t6\t{RUN}\n"
    assert len(checkpoints("list", "kept", cwd=tmp_path).stdout.splitlines()) == 2


async def test_pruning_during_a_run_keeps_the_snapshot_that_the_job_may_commit(tmp_path):
    """A snapshot was removed between its saving and its commit, which ended the job, or the flow for ever."""
    store = store_at(tmp_path / "kept")
    await store.claim("clicks", RUN)
    await save_and_commit(store, 1, 2, run=RUN)
    saved = await save(store, 3, RUN, notes={})
    assert checkpoints("prune", "kept", "--keep", "1", cwd=tmp_path).stdout == f"removed\tclicks\t1\t{RUN}\n"
    ran = checkpoints("prune", "kept", "--orphans", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "given one that is alive and may be about to commit them; stop it first" in ran.stderr
    await store.commit("clicks", saved)
    await store.close()


async def test_a_checkpoint_that_may_be_committed_in_a_topic_is_no_orphan(tmp_path):
    """After `kill -9` the checkpoint to resume from was removed, and outputs were written twice from the one before."""
    files = await stored(tmp_path, commits=[1], more=[2])
    ran = checkpoints("prune", "kept", "--orphans", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"expected no checkpoint that may be committed, given 2 of run {RUN}" in ran.stderr
    assert files[2].exists()


async def test_nothing_is_pruned_while_the_committed_checkpoint_is_unknown(tmp_path):
    """The commit record was missing, and the only good checkpoint was removed as an old one."""
    await stored(tmp_path)
    (tmp_path / "kept" / "clicks" / "record.json").unlink()
    ran = checkpoints("prune", "kept", "--keep", "1", "--orphans", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "")
    assert ran.stderr == "flow 'clicks': it is not known what is committed, so no checkpoint is removed\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list", "nosuch"], "'STORE': expected a folder or a URL, given nosuch: none of that name"),
        (["list", "file"], "'STORE': expected a folder or a URL, given file: a file"),
        (["list", "kept", "--flow", "click"], "'--flow': expected one of 'clicks', 'views', given 'click'"),
        (["show", "kept"], "'--flow': expected one of 'clicks', 'views', given none"),
        (["prune", "kept"], "'--flow': expected one of 'clicks', 'views', given none"),
        (["prune", "kept", "--keep", "0"], "'--keep'"),
        (["show", "kept", "--flow", "views", "--checkpoint", "9"], "'--checkpoint': expected one of 1, given 9"),
        (["verify", "kept", "--checkpoint", "9"], "'--checkpoint': expected one of 1, 2, 3, given 9"),
        (["show", "empty"], "'STORE': expected checkpoints in empty, given none"),
        (["list", "empty", "--flow", "clicks"], "'--flow': expected a store with checkpoints, given 'clicks'"),
    ],
)
async def test_wrong_arguments_are_usage_errors(tmp_path, arguments, said):
    """A typing error had the exit code of damaged checkpoints, not the exit code 2."""
    await stored(tmp_path)
    await stored(tmp_path, flow="views", commits=[1])
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    ran = checkpoints(*arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_empty_directory_has_no_checkpoints(tmp_path):
    """An empty directory was an error, although it only has no checkpoints yet."""
    for command in ("list", "verify"):
        ran = checkpoints(command, ".", cwd=tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "no checkpoints in .\n")
    assert list(tmp_path.iterdir()) == []
