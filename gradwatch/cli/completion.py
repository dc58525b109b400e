"""`gradwatch completion SHELL`: the script with which a shell completes this command."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")
DESCRIPTION = """Print a script that lets a shell complete subcommands, options, rule files and packs.

For this shell (bash, zsh):
  source <(gradwatch completion bash)
For every shell to come:
  gradwatch completion bash > ~/.local/share/bash-completion/completions/gradwatch
  gradwatch completion zsh > ~/.zfunc/_gradwatch        (a folder of $fpath)
  gradwatch completion tcsh > ~/.gradwatch.tcsh         (and `source ~/.gradwatch.tcsh` in ~/.tcshrc)"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch completion` to argparse."""
    parser = commands.add_parser(
        "completion",
        help="print a script for completion in bash, zsh or tcsh",
        description=DESCRIPTION,
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=" | ".join(SHELLS))
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from gradwatch.cli.entry_point import build_parser
    from gradwatch.rules.packs import pack_names

    rules = rule_files(pack_names())
    by_destination = {"rules": rules, "files": rules, "tests": shtab.glob("*.yaml", "*.yml")}
    by_metavar = {"FILE": shtab.FILE, "RUN": shtab.FILE, "COMMAND": shtab.FILE}
    by_metavar |= {"DIR": shtab.DIRECTORY, "BUNDLE": shtab.DIRECTORY}
    parser = build_parser()
    for action in actions(parser):
        completed = by_destination.get(action.dest) or by_metavar.get(str(action.metavar))
        if completed is not None:
            action.complete = completed  # type: ignore[attr-defined]  # where shtab looks for it
    print(shtab.complete(parser, arguments.shell))
    return 0


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every option and argument of the command and its subcommands; a group of subcommands is none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from actions(command)
        else:
            yield action


def rule_files(packs: Sequence[str]) -> Mapping[str, Any]:
    """shtab's completer of what `--rules` takes: YAML files, and in bash and zsh the packs by name."""
    import shtab

    files = shtab.glob("*.yaml", "*.yml")
    names = " ".join(packs)
    bash = f'_gradwatch_rule_files() {{\n  compgen -W "{names}" -- "$1"\n  {files["bash"]} "$1"\n}}\n'
    zsh = (
        "_gradwatch_rule_files() {\n"
        f"  _alternative 'packs:pack:({names})' 'files:rule file:_files -g \"*.(yaml|yml)\"'\n"
        "}\n"
    )
    preamble: Mapping[str, str] = files["preamble"]  # type: ignore[assignment]
    return {
        "bash": "_gradwatch_rule_files",
        "zsh": "_gradwatch_rule_files",
        "tcsh": files["tcsh"],
        "preamble": {"bash": preamble["bash"] + bash, "zsh": zsh},
    }
