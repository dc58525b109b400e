"""The `gradwatch` command, with a subcommand in each file of COMMANDS.

Exit status: 0 fine, 1 something was found (a bad rule file, a missed fault, a failed check), 2 used or
configured wrongly; `gradwatch run` has the exit status of what it ran. Every command imports what it needs
when it runs, so `--help` and everything about rule files work quickly and without torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from gradwatch.cli.terminal import complain
from gradwatch.errors import GradwatchError, RuleFileError
from gradwatch.runtime.standard_streams import stdout

COMMANDS = (
    *("run", "top", "init", "rules", "report", "backtest", "tune", "audit", "explain", "replay", "serve"),
    *("deploy", "doctor", "selftest", "demo", "docs", "completion", "version"),
)

EPILOG = """examples:
  gradwatch demo                                       see it find three faults, in a minute
  gradwatch run -- python train.py --lr 3e-4           watch a script as it is
  gradwatch run --rules my.gradwatch.yaml -- torchrun --nproc-per-node 8 train.py
  gradwatch init                                       a rule file to begin with
  gradwatch rules check my.gradwatch.yaml
  gradwatch top                                        the last run as it goes on, in this terminal
  gradwatch report                                     what happened in the last run, as a page to open in a browser
  gradwatch backtest --rules my.gradwatch.yaml          what these rules would have said of the last run
  gradwatch tune gradwatch-runs/* --healthy            thresholds for few false alarms, as a rule file
  gradwatch audit                                      what it did in the last run: which rules, how often
  gradwatch explain                                    which lines caused the incidents of the last run
  gradwatch replay gradwatch-runs/RUN/bundles/INCIDENT --script train:build
  gradwatch serve --dir gradwatch-runs                 one address for many runs
  gradwatch deploy export monitoring                   Prometheus, alerts and dashboards
  gradwatch selftest -- python train.py                faults in its own first steps: do the rules find them?
  gradwatch doctor
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    return stdout.status_of(lambda: _carried_out(words), words[:1] == ["run"], complain)


def _carried_out(words: list[str]) -> int:
    try:
        arguments = build_parser(words).parse_args(words)
        handler: Callable[[argparse.Namespace], int] = arguments.handler
        return handler(arguments)
    except SystemExit as leaving:  # argparse: --help is 0, a usage error 2
        return leaving.code if isinstance(leaving.code, int) else 2
    except RuleFileError as error:
        complain(str(error))
        return 2
    except GradwatchError as error:
        complain(f"gradwatch: {error}")
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The whole command line; each command's own file adds its part.

    Where `words` begin with a command, that one alone is imported: all of them take as long as the rest of the start.
    """
    parser = _Parser(
        prog="gradwatch",
        description="Watch the gradients of a PyTorch training job.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        import_module(f"gradwatch.cli.{command}").add_parser(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """One whose text of several lines is printed in these lines; argparse makes paragraphs of a single one."""

    def format_help(self) -> str:
        """The help, as argparse's `--help` prints it."""
        if "\n" in f"{self.description}{self.epilog}":
            self.formatter_class = argparse.RawDescriptionHelpFormatter
        return super().format_help()


class _Version(argparse.Action):
    """argparse's "version", read when it is asked for: to read what is installed takes 20 ms."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from gradwatch.cli.version import version_of

        print(f"gradwatch {version_of('gradwatch')}")
        parser.exit()
