"""`gradwatch init`: a rule file to begin with, with groups by the names of a model's parameters."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gradwatch.cli.report import save
from gradwatch.cli.run_argument import add_directory, default_directory, newest
from gradwatch.cli.terminal import paint
from gradwatch.errors import GradwatchError
from gradwatch.runtime.printable import one_line, plural, printable

if TYPE_CHECKING:
    from gradwatch.rules.proposed_groups import ProposedGroup

DEFAULT_FILE = "my.gradwatch.yaml"
STDOUT = "-"
DESCRIPTION = f"""Write a rule file to begin with: it extends a shipped pack, has groups by your parameters' names,
and examples in comments, each of which works as it stands.

The names are those of --model, of --run, or of the newest run of --dir; without any the file has no groups. FILE is
{DEFAULT_FILE} by default, - for stdout. A file that is there is left alone, unless --force is given."""


class Named(NamedTuple):
    """Names of parameters, and whose they are."""

    source: str
    names: Sequence[str]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch init` to argparse."""
    parser = commands.add_parser(
        "init",
        help="a rule file to begin with, with groups by the names of your parameters",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "file", nargs="?", default=DEFAULT_FILE, metavar="FILE", help=f"default: {DEFAULT_FILE}"
    )
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="function that returns the model")
    parser.add_argument("--run", metavar="RUN", help="folder of a run, or a journal file")
    parser.add_argument(
        "--extends", metavar="PACK", help="shipped pack (default: by the names, else default)"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE, if it is a regular file")
    add_directory(parser)
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Write the file. Raises GradwatchError where it is there already, or an option names nothing."""
    from gradwatch.rules.files import load_rules, parse_rules
    from gradwatch.rules.proposed_groups import proposed
    from gradwatch.rules.starter_file import starter_text

    path = None if arguments.file == STDOUT else Path(arguments.file)
    if path is not None:
        check_free(path, arguments.force)
    named = names_of(arguments)
    groups = proposed(named.names)
    pack = arguments.extends or pack_for([group.name for group in groups])
    base = load_rules(checked_pack(pack))
    file = str(path or DEFAULT_FILE)
    text = starter_text(one_line(file, 200), named.source, named.names, groups, pack, base)
    parse_rules(text, file)  # what is written is right
    if path is None:
        sys.stdout.write(text)
        return 0
    save(path, text, option="")
    shown = one_line(str(path), 4096)
    whose = groups_in_words(named, groups, {group.name for group in base.groups})
    print(f"{paint(shown, 'bold')}: extends {pack}, {whose}")
    print(f"next: gradwatch rules check {shown} && gradwatch run --rules {shown} -- python train.py")
    return 0


def groups_in_words(named: Named, groups: Sequence[ProposedGroup], in_pack: Collection[str]) -> str:
    """A phrase that says whose parameters the groups are by; where none was made, why."""
    from gradwatch.rules.proposed_groups import why_none

    if not named.source:
        return "no groups: there is no run that has names of parameters (--run or --model names one)"
    if not named.names:
        return f"no groups: no parameter of {named.source} is trained"
    of = f"{plural(len(named.names), 'parameter')} of {named.source}"
    if not groups:
        return f"no groups by the names of {of}: {why_none(named.names)}"
    if all(group.name in in_pack for group in groups):
        return f"no groups by {of} but those that the pack has: {', '.join(group.name for group in groups)}"
    return f"groups by {of}"


def check_free(path: Path, force: bool) -> None:
    """Raise GradwatchError where the file is there already, unless `force` may replace it."""
    from gradwatch.runtime.atomic_files import not_replaceable

    if reason := not_replaceable(path):
        raise GradwatchError(f"cannot write {path}: {reason}; name another file")
    if os.path.lexists(path) and not force:
        raise GradwatchError(f"{path} is there already; name another file, or replace it with --force")


def checked_pack(name: str) -> str:
    """The name of a shipped pack. Raises GradwatchError for any other."""
    from gradwatch.rules.packs import pack_names, pack_path
    from gradwatch.runtime.spelling import did_you_mean

    if pack_path(name) is None:
        raise GradwatchError(
            f"--extends {name!r}: no such pack{did_you_mean(name, pack_names())}; there are: {', '.join(pack_names())}"
        )
    return name


def pack_for(groups: Sequence[str]) -> str:
    """The pack that the parts of a model ask for."""
    return "moe" if "experts" in groups else "finetune" if "adapters" in groups else "default"


def names_of(arguments: argparse.Namespace) -> Named:
    """Names of the parameters that the options, or the newest run, give; none where there is no run."""
    if arguments.model:
        from gradwatch.capture.parameter_names import named_parameters
        from gradwatch.cli.rules.check_cost import model_of

        named = named_parameters([("", model_of(arguments.model))])  # as a watch calls them, without wrappers
        trained = [name for name, param in named if param.requires_grad]
        return Named(one_line(arguments.model, 200), [printable(name) for name in trained])
    if arguments.run:
        return of_run(Path(arguments.run))
    try:
        return of_run(newest(Path(arguments.dir or default_directory())))
    except GradwatchError:
        if arguments.dir:
            raise
        return Named("", ())


def of_run(run: Path) -> Named:
    """Names of the parameters that a run has recorded. Raises GradwatchError where it has none."""
    from gradwatch.journal import SitesEntry
    from gradwatch.journal.rank_journals import rank_journals

    found: dict[str, None] = {}
    for entry in rank_journals(run).own[-1].entries():
        if isinstance(entry, SitesEntry):
            kinds = zip(entry.sites.names, entry.sites.kinds, strict=True)
            found.update(dict.fromkeys(name for name, kind in kinds if kind == "param"))
    if not found:
        raise GradwatchError(
            f"{run} has recorded no parameters; name another run, or --model MODULE:FUNCTION"
        )
    return Named(f"run {printable(run.name)}", [printable(name) for name in found])
