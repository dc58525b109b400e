"""Sources of rule files: shipped packs by name, paths, and what they extend. Reading is bounded and
never hangs.
"""

from __future__ import annotations

import os
import stat

from gradwatch.rules.files.pydantic_models import MOST_FILES
from gradwatch.rules.packs import SUFFIX, pack_names, pack_path
from gradwatch.rules.yaml.nodes import Map, Mark, Scalar, Seq, Source
from gradwatch.rules.yaml.parse import decode, parse
from gradwatch.rules.yaml.problems import Problems, quoted
from gradwatch.rules.yaml.size_limits import MAX_BYTES


def locate(reference: str, beside: str) -> str:
    """The path that a pack name or a relative path means; `beside` is the file that mentions it ("" =
    none).
    """
    pack = pack_path(reference)
    if pack is not None:
        return str(pack)
    return os.path.normpath(os.path.join(os.path.dirname(beside), os.path.expanduser(reference)))


def read(path: str, at: Mark, problems: Problems) -> str | None:
    """The text of a regular file, or None and a problem at `at`; at most a byte more than allowed is read."""
    try:
        # Not blocking: a FIFO without a writer would hang here for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = "not found" if isinstance(error, FileNotFoundError) else _reason(error)
        problems.add(at, "GW001", f"cannot read {quoted(path)}: {reason}", _packs_hint(path, problems))
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            problems.add(at, "GW001", f"cannot read {quoted(path)}: not a regular file")
            return None
        content = _content(descriptor)
    except OSError as error:
        problems.add(at, "GW001", f"cannot read {quoted(path)}: {_reason(error)}")
        return None
    finally:
        os.close(descriptor)
    return decode(content, path, problems)


def _content(descriptor: int) -> bytes:
    """Everything, or just more than is allowed (the decoder then says so)."""
    content = b""
    while len(content) <= MAX_BYTES + 4 and (piece := os.read(descriptor, MAX_BYTES)):
        content += piece
    return content


def _reason(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else "not a path"


def _packs_hint(path: str, problems: Problems) -> str:
    names = pack_names()
    word = os.path.basename(path).removesuffix(SUFFIX)
    return f"shipped packs: {', '.join(names)}{problems.meant(word, names)}" if names else ""


class Collector:
    """Reads a file and everything it extends; `files` ends up in the order in which later wins.

    `named` are the paths of what is extended, whether it could be read or not.
    """

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.files: list[Map] = []
        self.named: list[str] = []
        self._seen: set[str] = set()

    def add(self, text: str, path: str, chain: tuple[str, ...] = ()) -> None:
        """Take in `text`, after what it extends. A file that is extended twice counts once, at its first
        mention.
        """
        self.problems.file(path)
        here = os.path.realpath(path) if "\0" not in path else path
        self._seen.add(here)
        document = parse(text, path, self.problems)
        if document is None:
            return
        extends = document.get("extends")
        if isinstance(extends, Seq):
            for item in extends.items[:MOST_FILES]:
                if isinstance(item, Scalar) and isinstance(item.value, str) and item.value:
                    self._extend(item, path, (*chain, here))
        self.files.append(document)

    def _extend(self, item: Scalar, beside: str, chain: tuple[str, ...]) -> None:
        path = locate(item.text, beside)
        self.named.append(path)
        here = os.path.realpath(path)
        if here in chain:
            round_trip = " → ".join(os.path.basename(each) for each in (*chain[chain.index(here) :], here))
            self.problems.add(
                item.mark, "GW213", f"this file extends itself: {round_trip}", "remove one of the links"
            )
        elif here in self._seen:
            return
        elif len(self._seen) >= MOST_FILES:
            self.problems.add(item.mark, "GW213", f"more than {MOST_FILES} files", "extend fewer files")
        elif (text := read(path, item.mark, self.problems)) is not None:
            self.add(text, path, chain)


def extended_files(path: str) -> tuple[str, ...]:
    """The rule file at `path` and all that it extends, also those that cannot be read, or are not there (yet)."""
    problems = Problems()
    collector = Collector(problems)
    text = read(path, start(path), problems)
    if text is not None:
        collector.add(text, path)
    return tuple(dict.fromkeys((path, *collector.named)))


def start(path: str) -> Mark:
    """The place to blame when a file has no text: its first character."""
    return Mark(Source(path, ""), 1, 1)
