"""`gradwatch run [options] -- COMMAND…`: check the rules, then become the command, watched."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from gradwatch.cli.terminal import complain, paint
from gradwatch.errors import AttachError, GradwatchError, RuleFileError

if TYPE_CHECKING:
    from gradwatch.rules.rule_set import SinkSpec

DESCRIPTION = """Run a command with gradwatch watching every PyTorch training in it.

Nothing in the script changes: its models and optimizers are found before the first backward. argv, cwd,
exit status, signals and tracebacks are those of the command itself. Optimizers that the script itself gives to
gradwatch.watch are watched by that call alone.
GRADWATCH=0 turns everything off."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch run` to argparse."""
    parser = commands.add_parser(
        "run",
        help="watch an unmodified script",
        description=DESCRIPTION,
        usage="gradwatch run [options] [--] COMMAND [ARG ...]",
    )
    parser.add_argument(
        "--rules", metavar="FILE", help="rule file, or a shipped pack by name (default: default)"
    )
    parser.add_argument("--listen", metavar="HOST:PORT", type=listen_address, help="where to serve /metrics")
    parser.add_argument("--dir", metavar="DIR", help="where to write the journal (default: ./gradwatch-runs)")
    parser.add_argument(
        "--file-sd", metavar="DIR", help="put every process on this list of Prometheus targets (file_sd)"
    )
    parser.add_argument("--run-id", metavar="ID", type=run_id, help="name of the run (default: made up)")
    parser.add_argument(
        "--on-config-error",
        choices=("exit", "continue"),
        default="exit",
        help="a bad rule file, folder or address: exit 2 before the script starts (default), or run it unwatched",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="let internal errors of gradwatch stop the script (for CI)",
    )
    parser.add_argument(
        "--strict-rules",
        action="store_true",
        help="exit 2 before the first step where a rule or group matches nothing of the model, or where an action, a "
        "place of 'clip:' or a tap that the rules ask for is not available for it or its ranks (default: each of "
        "these is switched off by itself with a warning, and everything else stays active)",
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="no account on stderr when the script ends (it is in the journal: gradwatch audit)",
    )
    parser.add_argument(
        "--reload",
        action="store_true",
        help="take up a rule file that changes meanwhile, between two steps, on all ranks after the same one; what is "
        "wrong with it leaves the old rules in force, with a line and a metric",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="show gradwatch top meanwhile: on this terminal if both streams of the script are redirected, else in a "
        "pane of tmux; where there is neither, say what to type in another terminal",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Check the configuration, then become the command; returns only where it was not started.

    Raises GradwatchError without a command, and for a wrong option; RuleFileError for a wrong rule file.
    """
    command = command_of(arguments, "run")
    if os.environ.get("GRADWATCH") == "0":
        exec_command(tuple(command), os.environ)
    rules = arguments.rules or os.environ.get("GRADWATCH_RULES") or "default"
    try:
        root = check(rules, arguments)
    except (RuleFileError, AttachError) as error:
        complain(str(error))
        if arguments.on_config_error == "exit":
            return 2
        complain("gradwatch: refused; running unwatched, as --on-config-error=continue asks")
        exec_command(tuple(command), os.environ)
    from gradwatch.launch.script_environment import prepare
    from gradwatch.session.settings import ROOT

    launch = prepare(command, {**settings(arguments), ROOT: root}, os.environ)
    if launch.note:
        complain(paint(f"gradwatch: {launch.note}", "yellow", sys.stderr))
    if arguments.reload and not os.path.isfile(anchored(rules)):
        note = (
            f"--reload has no file to look at: {rules!r} is a shipped pack; name a file of yours with --rules"
        )
        complain(paint(f"gradwatch: {note}", "yellow", sys.stderr))
    if arguments.live:
        from gradwatch.cli.top.beside_script import show

        show(root)
    return exec_command(launch.argv, launch.env)


def command_of(arguments: argparse.Namespace, name: str) -> list[str]:
    """The words behind the options of `gradwatch NAME`, less the `--` before them. Raises GradwatchError for none."""
    words: list[str] = arguments.command
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise GradwatchError(f"nothing to run; write: gradwatch {name} -- python train.py")
    return command


def check(source: str, arguments: argparse.Namespace) -> str:
    """Refuse what would leave the command unwatched, or unlike what was asked; the absolute folder of all runs.

    Raises:
        RuleFileError: with everything wrong in the rule file, and what of it cannot be had here.
        AttachError: for a run folder that cannot be made, and an address that is none.
    """
    from gradwatch.session.settings import DEFAULT_SINKS, Settings, check_directory

    given = Settings.resolve(source, env={**os.environ, **settings(arguments)})
    sinks = sinks_of(source, given.run_id or "")
    kinds = DEFAULT_SINKS if sinks is None else [spec.kind for spec in sinks]
    if given.run_dir is not None or "journal" in kinds:
        check_directory(given.run_root(sinks), writable=given.run_dir is not None)
    if given.listen is not None and "prometheus" in kinds:
        from gradwatch.endpoint.address import parse_listen

        try:
            parse_listen(given.listen)
        except ValueError as error:
            raise AttachError(str(error)) from None
    return given.run_root(sinks)


def sinks_of(source: str, run: str) -> Sequence[SinkSpec] | None:
    """The sinks of a rule file, None where it lists none. Raises `RuleFileError` with everything wrong in it."""
    from gradwatch.rules.packs import pack_path

    # Packs are right, and leave sinks to the defaults (tests/rules/test_packs.py): to read one takes 0.2 s, and the
    # script's own process reads it anyway.
    if pack_path(source) is not None:
        return None
    from gradwatch.cli.preflight import load

    return load(source, run).sinks


def settings(arguments: argparse.Namespace) -> dict[str, str]:
    """The `GRADWATCH_*` variables that the options stand for; paths made absolute, for scripts that chdir."""
    given: dict[str, str] = {}
    rules = arguments.rules or os.environ.get("GRADWATCH_RULES")
    if rules:
        given["GRADWATCH_RULES"] = anchored(rules)
    directory = arguments.dir or os.environ.get("GRADWATCH_DIR")
    if directory:
        given["GRADWATCH_DIR"] = os.path.abspath(directory)
    targets = arguments.file_sd or os.environ.get("GRADWATCH_FILE_SD")
    if targets:
        given["GRADWATCH_FILE_SD"] = os.path.abspath(targets)
    if arguments.listen:
        given["GRADWATCH_LISTEN"] = arguments.listen
    if arguments.run_id:
        given["GRADWATCH_RUN_ID"] = arguments.run_id
    if arguments.strict:
        given["GRADWATCH_STRICT"] = "1"
    if arguments.strict_rules:
        given["GRADWATCH_STRICT_RULES"] = "1"
    if arguments.reload:
        given["GRADWATCH_RELOAD"] = "1"
    if arguments.quiet:
        given["GRADWATCH_QUIET"] = "1"
    return given


def anchored(rules: str) -> str:
    """The name of a shipped pack as it is, any other file by its absolute path."""
    from gradwatch.rules.packs import pack_names

    return rules if rules in pack_names() else os.path.abspath(os.path.expanduser(rules))


def exec_command(argv: tuple[str, ...], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command; exit 127 where there is none such, 126 where it cannot run."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by whoever called: `2>&-`
            stream.flush()
    try:
        os.execvpe(argv[0], argv, env)
    except FileNotFoundError:
        complain(f"gradwatch: no such command: {argv[0]}")
        raise SystemExit(127) from None
    except OSError as error:
        hint = f"; write: gradwatch run -- python {argv[0]}" if argv[0].endswith(".py") else ""
        complain(f"gradwatch: cannot run {argv[0]}: {error.strerror}{hint}")
        raise SystemExit(126) from None


def listen_address(text: str) -> str:
    """`HOST:PORT`, as argparse's `type`."""
    from gradwatch.endpoint.address import parse_listen

    try:
        parse_listen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def run_id(text: str) -> str:
    """A name that is safe as a folder, as argparse's `type`."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: use letters, digits, '.', '_', '-'; it names a folder")
    return text
