"""The incidents of a run as one list, for trackers without annotations, or that show few: when, which, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradwatch.sinks.trackers.points import PREFIX, Note, Point

NAME = "gradwatch/incidents"
MOST_ROWS = 200
COLUMNS = ("step", "optimizer", "rule", "severity", "what", "incident", "text")


class IncidentList:
    """The last 200 transitions and causes; a Point that is added again, because it was not sent, adds nothing.

    `unsent` is True where rows have come since `sent()`.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str, Note], None] = {}
        self._dropped = 0
        self.unsent = False

    def add(self, points: Sequence[Point]) -> None:
        """Take the notes of these Points."""
        for point in points:
            optimizer = point.prefix.removeprefix(PREFIX).strip("/").removeprefix("optimizer_") or "0"
            for note in point.notes:
                key = (point.step, optimizer, note)
                self.unsent |= key not in self._rows
                self._rows[key] = None
        while len(self._rows) > MOST_ROWS:
            del self._rows[next(iter(self._rows))]
            self._dropped += 1

    def sent(self) -> None:
        """Note that the tracker has all of it."""
        self.unsent = False

    @property
    def last_step(self) -> int:
        """Step of the newest row."""
        return next(reversed(self._rows))[0]

    def rows(self) -> Iterator[tuple[int, str, str, str, str, str, str]]:
        """One a row, by COLUMNS, oldest first."""
        for step, optimizer, note in self._rows:
            yield step, optimizer, note.rule, note.severity, note.kind, note.incident, note.text

    def markdown(self) -> str:
        """The list as a table, with the command that explains an incident."""
        lines = ["`gradwatch explain INCIDENT` prints the cause of one, with its line and norms.", ""]
        if self._dropped:
            lines += [f"{self._dropped:,} earlier ones are left out.", ""]
        lines += [_row(COLUMNS), _row(["---"] * len(COLUMNS))]
        return "\n".join([*lines, *(_row([str(cell) for cell in row]) for row in self.rows()), ""])


def _row(cells: Sequence[str]) -> str:
    shown = (cell.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;") for cell in cells)
    return f"| {' | '.join(shown)} |"
