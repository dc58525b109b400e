"""`gradwatch run --reload`: a rule file that changes while the script trains is taken up between two steps.

The file, and all that it extends, are looked at once a second at most. A changed one is read by a thread: what is
refused leaves the session as it is, and is said; by what is right a new session takes its place, and goes on with what
it has learned.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gradwatch.errors import GradwatchError
from gradwatch.runtime.interruption import not_ours
from gradwatch.runtime.process_identity import prints
from gradwatch.runtime.standard_streams import stderr

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from gradwatch.rules.rule_set import RuleSet
    from gradwatch.session.session import Session
    from gradwatch.session.succession import Handover

LOOK_SECONDS = 1.0
SEVERAL_RANKS = (
    "ranks take up rules together or not at all, and without a process group they cannot agree on a step"
)

Stamp = tuple[int, int, int]
"""Inode, size and time of the last change of a file; zeros where there is none."""


class RulesReload:
    """Looks at the rule file of a session; `ruleset` are the rules in force, as they were read."""

    def __init__(self, session: Session, source: str) -> None:
        self.session, self._source = session, source
        self.ruleset: RuleSet = session.ruleset
        self._known = _stamps(_files_of(source))
        self._due = time.monotonic() + LOOK_SECONDS
        self._reading: threading.Thread | None = None
        self._read: RuleSet | None = None

    def due(self) -> bool:
        """True if it is time to ask for `new_rules`."""
        return self._reading is not None or time.monotonic() >= self._due

    def new_rules(self, stepped: Optimizer | None = None) -> RuleSet | None:
        """Rules to be taken up now; None where nothing has changed, or what has is not read yet or is refused.

        `stepped` has just taken a step, where that is when it is asked.
        """
        if self._reading is not None:
            if self._reading.is_alive():
                return None
            self._reading = None
            found, self._read = self._read, None
            return found
        if not self.due():
            return None
        self._due = time.monotonic() + LOOK_SECONDS
        if not self._changed():
            return None
        if self.session.run.world_size > 1:
            self.refused(SEVERAL_RANKS)
            return None
        self._reading = threading.Thread(target=self._load, name="gradwatch-reload", daemon=True)
        self._reading.start()
        return None

    def take_up(self, ruleset: RuleSet) -> Session | None:
        """The session by these rules that has taken the place of the other; None where that one stays.

        Raises where neither the new rules nor the old ones can be watched by any more.
        """
        from gradwatch.session.session import Session
        from gradwatch.session.settings import Settings

        settings = Settings.resolve()
        try:
            self.session.check(ruleset, settings)
        except Exception as error:
            if not_ours(error):
                raise
            self.refused(str(error))
            return None
        before = self.session.hand_over()
        if before is None:
            return None

        def successor(rules: RuleSet, before: Handover) -> Session:
            watching = before.watching
            return Session(
                watching.models,
                watching.optimizers,
                rules,
                settings,
                None,
                "launcher",
                loose=watching.loose,
                before=before,
            )

        try:
            self.session = successor(ruleset, before)
        except Exception as error:
            if not_ours(error):
                raise
            self.session = successor(self.ruleset, before)
            self.refused(str(error))
        else:
            self.ruleset = ruleset
            count = len(self.session.ruleset.rules)
            _say(f"gradwatch: {self._source} has changed, and is in force: {count} rules")
        return self.session

    def refused(self, why: str) -> None:
        """Say that the old rules stay; the metric says so until other ones are taken up."""
        self.session.health.reloaded(False)
        _say(f"gradwatch: {self._source} has changed and is not taken up, the old rules stay: {why}")

    def _load(self) -> None:
        """Read the file; a change back to what is in force is taken up as such, and ends a refusal."""
        found = self._loaded()
        if isinstance(found, str):
            self.refused(found)
        elif found.digest == self.ruleset.digest:
            self.session.health.reloaded(True)
        else:
            self._read = found

    def _changed(self) -> bool:
        """True if the files are others than when they were looked at last."""
        stamps = _stamps(self._known)
        changed, self._known = stamps != self._known, stamps
        return changed

    def _loaded(self) -> RuleSet | str:
        """The rules in the file, or why they are refused."""
        from gradwatch.rules.files import load_rules

        try:
            # Before the rules are read: what changes meanwhile is seen at the next look. Also what is refused is
            # mended in one of its files, perhaps in one that the rules in force do not extend.
            self._known = _stamps(_files_of(self._source))
            return load_rules(self._source, run=self.session.run.run_id)
        except GradwatchError as error:
            return f"\n{error}"
        except Exception as error:
            return repr(error)


def _say(line: str) -> None:
    if prints():
        stderr.say(line)


def _files_of(source: str) -> tuple[str, ...]:
    from gradwatch.rules.files import extended_files  # pydantic and ruamel: 0.2 s, which a pack does not need

    return extended_files(source)


def _stamps(files: Iterable[str]) -> dict[str, Stamp]:
    """Changes whenever a file does: also one that is replaced, or goes, or comes."""
    return {file: _stamp(file) for file in files}


def _stamp(file: str) -> Stamp:
    try:
        status = os.stat(file)
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_size, status.st_mtime_ns
