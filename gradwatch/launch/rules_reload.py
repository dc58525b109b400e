"""`gradwatch run --reload`: a rule file that changes while the script trains is taken up between two steps.

The file, and those that it extends, are looked at once a second at most. A changed one is read by a thread: what is
refused leaves the old rules in force, and is said; what is right goes to the agent, which begins a new watch by it.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from gradwatch.errors import GradwatchError
from gradwatch.runtime import stderr

if TYPE_CHECKING:
    from gradwatch.rules.rule_set import RuleSet
    from gradwatch.session.session import Session

LOOK_SECONDS = 1.0
SEVERAL_RANKS = (
    "ranks take up rules together or not at all, so those of a job of several ranks stay as they began"
)

Stamp = tuple[tuple[str, int, int, int], ...]


class RulesReload:
    """Looks at the rule file of a session; `ruleset` are the rules in force, as they were read."""

    def __init__(self, session: Session, source: str) -> None:
        self.session, self._source = session, source
        self.ruleset: RuleSet = session.ruleset
        self._files = _files_of(self.ruleset, source)
        self._known = _stamp(self._files)
        self._due = time.monotonic() + LOOK_SECONDS
        self._reading: threading.Thread | None = None
        self._read: RuleSet | None = None

    def applied(self, session: Session, ruleset: RuleSet) -> None:
        """A new session is in force, by these rules."""
        self.session, self.ruleset = session, ruleset
        self._files = _files_of(ruleset, self._source)

    def new_rules(self) -> RuleSet | None:
        """Rules to be taken up now; None where nothing has changed, or what has is not read yet or is refused."""
        if self._reading is not None:
            if self._reading.is_alive():
                return None
            self._reading = None
            found, self._read = self._read, None
            return found
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + LOOK_SECONDS
        stamp = _stamp(self._files)
        if stamp == self._known:
            return None
        self._known = stamp
        if self.session.run.world_size > 1:
            self.refused(SEVERAL_RANKS)
            return None
        self._reading = threading.Thread(target=self._load, name="gradwatch-reload", daemon=True)
        self._reading.start()
        return None

    def refused(self, why: str) -> None:
        """Say that the old rules stay; the metric says so until other ones are taken up."""
        self.session.health.reloaded(False)
        stderr.say(f"gradwatch: {self._source} has changed and is not taken up, the old rules stay: {why}")

    def _load(self) -> None:
        """Read the file; a change back to what is in force is taken up as such, and ends a refusal."""
        from gradwatch.rules.files import load_rules

        try:
            found = load_rules(self._source, run=self.session.run.run_id)
        except GradwatchError as error:
            self.refused(f"\n{error}")
            return
        except Exception as error:
            self.refused(repr(error))
            return
        if found.digest == self.ruleset.digest:
            self.session.health.reloaded(True)
        else:
            self._read = found


def _files_of(ruleset: RuleSet, source: str) -> tuple[str, ...]:
    """The rule file and those that it extends, shipped packs included."""
    places = {place.rpartition(":")[0] for place in ruleset.origins.values()}
    return (source, *sorted(place for place in places if place and place != source))


def _stamp(files: tuple[str, ...]) -> Stamp:
    """Changes whenever a file does: also one that is replaced, or goes."""
    found = []
    for file in files:
        try:
            status = os.stat(file)
        except OSError:
            found.append((file, 0, 0, 0))
        else:
            found.append((file, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)
