"""`gradwatch rules fmt`: rule files with even indentation; nothing that they say changes."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradwatch.cli.terminal import complain, framed, paint
from gradwatch.errors import GradwatchError, RuleFileError
from gradwatch.runtime.printable import one_line

LONGEST_PATH = 4096
_BLANKS = str.maketrans("", "", " \t")


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch rules fmt` to argparse."""
    fmt = verbs.add_parser(
        "fmt",
        help="even indentation; nothing but spaces changes",
        description="Format rule files in place: two columns a level, four for lists, one space where several stood, "
        "none at the end of a line. Nothing but spaces changes: comments, quotes, order, line breaks and line ends "
        "stay, and so does what the file says: its digest is compared. Exit status: 0 all formatted, 1 with --check "
        "some were not, 2 a file is refused; the others are formatted all the same.",
    )
    fmt.add_argument("files", nargs="+", metavar="FILE", help="rule file")
    fmt.add_argument("--check", action="store_true", help="change nothing; exit 1 where a file would change")
    fmt.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Format each file that is accepted; those that are refused are left alone, with what is wrong."""
    changed = refused = 0
    for name in arguments.files:
        path = Path(name)
        try:
            new = changed_text(path)
            if new is not None and not arguments.check:
                save(path, new)
        except RuleFileError as error:
            refused += 1
            for problem in error.problems:
                complain(f"{framed(problem)}\n")
            continue
        except GradwatchError as error:
            refused += 1
            complain(f"gradwatch: {error}")
            continue
        if new is None:
            continue
        changed += 1
        words = "would be formatted" if arguments.check else "formatted"
        print(f"{paint(words, 'yellow' if arguments.check else 'green')}  {one_line(name, LONGEST_PATH)}")
    return 2 if refused else int(bool(changed and arguments.check))


def changed_text(path: Path) -> str | None:
    """The file as it is formatted; None where it is already. Raises RuleFileError for one that is refused.

    Raises GradwatchError for the name of a pack, and where the text could not be changed without changing what it says.
    """
    from gradwatch.rules.files import load_rules, parse_rules
    from gradwatch.rules.packs import pack_path
    from gradwatch.rules.yaml.formatting import formatted

    if pack_path(str(path)) is not None and not path.exists():
        raise GradwatchError(f"{path} is a pack that ships with gradwatch, not a file to format")
    digest = load_rules(path).digest  # also what bounds the time that reading takes
    text = path.read_bytes().decode("utf-8")
    new = formatted(text)
    if new == text:
        return None
    if new.translate(_BLANKS) != text.translate(_BLANKS) or parse_rules(new, str(path)).digest != digest:
        raise GradwatchError(f"{path} is left alone: formatted, more than spaces would change")
    return new


def save(path: Path, text: str) -> None:
    """Replace the file, with the permissions that it has. Raises GradwatchError if it cannot be written."""
    from gradwatch.runtime.atomic_files import write_named

    try:
        write_named(path, text)
    except OSError as error:
        raise GradwatchError(f"cannot write {path}: {error.strerror}") from None
