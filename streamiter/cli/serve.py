"""The commands of a service: ``serve`` runs it, or checks or writes its file; ``replay`` predicts its log again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Final

import typer

from streamiter.cli.figures import errors_of_output, print_fields, print_json, say
from streamiter.cli.topics import lasting_topic, with_topic
from streamiter.engine.job.running import run_in_own_loop
from streamiter.errors import ConfigurationError
from streamiter.topics import Topic


def serve(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file of the service.")] = Path("service.toml"),
    check: Annotated[
        bool, typer.Option("--check", help="Check the file, its topics and their newest records; start nothing.")
    ] = False,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Write FILE for this topic, with what its newest records tell.", show_default=False
        ),
    ] = None,
    answers: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --init: the topic of the labels, if they come later, in a topic of their own.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Predict only, with the versions that the service of this file publishes: a replica, of which there "
            "may be any number.",
        ),
    ] = False,
    without_checkpoint: Annotated[
        bool,
        typer.Option(
            "--without-checkpoint",
            help="In this run, start from the last version of the model, and read the input from its start on.",
        ),
    ] = False,
) -> None:
    """Run an online-learning service from a file: it reads a topic, learns, publishes its model, and answers by HTTP.

    Ctrl-C or SIGTERM suspends the service: it commits a last checkpoint, and the next start resumes there. SIGHUP reads
    the file again, and applies what may change while it runs. Exit codes: 0 suspended or finished, 1 failed, 3 stalled
    (with exit_when_stalled = true), 4 another run has taken over, 130 aborted.
    """
    if check and init is not None:
        raise typer.BadParameter("expected one of --check and --init, given both", param_hint="'--init'")
    if answers is not None and init is None:
        raise typer.BadParameter("expected --answers with --init, given it alone", param_hint="'--answers'")
    if follow and (check or init is not None or without_checkpoint):
        raise typer.BadParameter("expected --follow alone, given another option", param_hint="'--follow'")
    if init is not None:
        _init(file, init, answers)
    elif check:
        _check(file)
    elif follow:
        from streamiter.service import ServiceReplica, read_settings

        if code := ServiceReplica(read_settings(file)).run():
            raise typer.Exit(code)
    else:
        from streamiter.service import OnlineLearningService, read_settings

        code = OnlineLearningService(read_settings(file), without_checkpoint=without_checkpoint).run()
        if code:
            raise typer.Exit(code)


def _check(file: Path) -> None:
    from streamiter.service.checks import SettingsCheck
    from streamiter.service.settings.file import read_document

    found = run_in_own_loop(SettingsCheck(*read_document(file)).run())
    print_fields(found.items())
    say(f"{file} is right; start it with: streamiter serve {shlex.quote(str(file))}", err=True)


def _init(file: Path, url: str, answers: str | None) -> None:
    from streamiter.service.checks import creating
    from streamiter.service.settings.file import read_settings
    from streamiter.service.settings.proposal import proposal_of, sample_of_topic
    from streamiter.service.settings.tables import topic_url_of
    from streamiter.values.settings import WrongValue

    if file.exists():
        raise ConfigurationError(
            f"--init: expected a new file, given {str(file)!r}, which exists; name another: streamiter serve "
            "OTHER.toml --init URL"
        )
    for option, given in (("--init", url), ("--answers", answers)):
        try:
            topic_url_of(url if given is None else given)
        except WrongValue as wrong:
            text = f"{option}: expected {wrong.expected}, given {wrong.given}; {wrong.remedy}"
            raise ConfigurationError(text) from None
    source = lasting_topic(url)
    try:
        source.beside("model-updates")
    except ConfigurationError:
        raise ConfigurationError(
            f"--init: expected a topic of events that come, given {url!r}, which is no topic with others beside it; "
            "give that topic, and write these records as its history: input.history in the file"
        ) from None
    sample = run_in_own_loop(sample_of_topic(source))
    if answers is not None:
        sample = sample.with_answers(run_in_own_loop(sample_of_topic(lasting_topic(answers))))
    proposal = proposal_of(
        sample,
        name=_NO_NAME.sub("-", source.name).strip("-._")[:_NAME_CHARACTERS] or "service",
        topic=url,
        updates=with_topic(url, f"{source.name}-model-updates"),
        dead_letters=with_topic(url, f"{source.name}-dead-letters"),
        answers=answers,
    )
    settings = read_settings(proposal.text)  # A proposal is never a file with errors.
    with errors_of_output("--init", file):
        file.write_text(proposal.text, encoding="utf-8")
    say(f"Wrote {file} from {len(sample.records):,} records of {_places(source, answers)}. Read it, and correct it:")
    for note in proposal.notes:
        say(f"- {note}", hanging=2)
    typer.echo("Then create its topics, and check it:")
    typer.echo(f"  {creating(settings.publish.topic, settings.publish.roll_back_s)}")
    typer.echo(f"  {creating(str(settings.input.dead_letter))}")
    typer.echo(f"  streamiter serve --check {shlex.quote(str(file))}")


def _places(source: Topic, answers: str | None) -> str:
    return source.url if answers is None else f"{source.url} and {lasting_topic(answers).url}"


_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_NAME_CHARACTERS: Final = 60


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file of the service.")] = Path("service.toml"),
    version: Annotated[str | None, typer.Option(metavar="VERSION", help="Such as 2.17; otherwise the newest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Predict the rows of a service's log of predictions with a version of its model, and compare with what was served.

    Rows that this very version has served must have the same prediction: the others are mismatches, and exit code 1.
    """
    from streamiter.service import read_settings
    from streamiter.service.replay import replay_of

    found = run_in_own_loop(replay_of(read_settings(file), version))
    figures = {
        "version": found.version,
        "rows": found.rows,
        "mean_difference": found.mean_difference,
        "largest_difference": found.largest_difference if found.rows else None,
        "changed_decisions": found.changed_decisions,
        "served_by_this_version": found.of_same_version,
        "mismatches": found.mismatched,
        "refused_rows": found.refused,
        "rows_of_other_models": found.of_other_models,
        "unreadable_records": found.unreadable,
    }
    if as_json:
        print_json(figures)
    else:
        print_fields((name.replace("_", " "), _shown(figure)) for name, figure in figures.items())
    if found.mismatched:
        raise typer.Exit(1)


def _shown(figure: object) -> str:
    if figure is None:
        return "–"
    return f"{figure:.3g}" if isinstance(figure, float) else f"{figure:,}" if isinstance(figure, int) else str(figure)
