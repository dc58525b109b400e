"""The Records of every watch of this process, as they go to its sinks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradwatch.records.record import Record
from gradwatch.session.pipeline.record_publishing import Publishing
from tests.golden.document import line

FOLDER = "GRADWATCH_TESTS_GOLDEN"
"""Names the folder that ranks started by a test write to; unset: nothing is written."""


@contextmanager
def kept() -> Iterator[list[str]]:
    """The lines of all Records that are published within."""
    lines: list[str] = []
    original = Publishing._publish

    def publish(self: Any, record: Record, *more: Any) -> None:
        lines.append(line(record))
        original(self, record, *more)

    Publishing._publish = publish  # type: ignore[method-assign]
    try:
        yield lines
    finally:
        Publishing._publish = original  # type: ignore[method-assign]


def write(folder: Path, name: str, lines: list[str]) -> None:
    """One file a situation; none where nothing was published."""
    if lines:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name.replace('/', '-')}.jsonl").write_text("\n".join(lines) + "\n")
