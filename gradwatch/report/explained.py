"""An incident with what is kept of it on disk: the page that `gradwatch explain` and the report show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwatch.incidents import incident_page
from gradwatch.incidents.incident import Incident


@dataclass(frozen=True, slots=True)
class Explained:
    """An incident as on its page; `bundle` is None where none was kept, `obstacle` why it cannot be run again.

    `process` counts those that recorded as its rank.
    """

    incident: Incident
    bundle: Path | None = None
    obstacle: str = ""
    missing: tuple[str, ...] = ()
    process: int = 0

    @property
    def found(self) -> bool:
        """True if a cause is known."""
        return self.incident.finding is not None and self.incident.finding.found


def explained(where: Path, incident: Incident, process: int = 0) -> Explained:
    """The incident with its bundle, if there is one: that of the rank with the cause, else any."""
    from gradwatch.incidents.bundle.bundle_folders import bundles_of
    from gradwatch.incidents.bundle.bundle_reader import BundleError, read_document

    kept = bundles_of(where if where.is_dir() else where.parent, incident.name)
    kept.sort(key=lambda path: f"-rank{incident.rank}" not in path.name)
    if not kept:
        return Explained(incident, process=process)
    try:
        shown = read_document(kept[0])
    except BundleError as error:
        return Explained(incident, kept[0], f"it cannot be read: {error}", process=process)
    return Explained(incident, kept[0], shown.obstacle, tuple(map(str, shown.left_out)), process)


def document(one: Explained) -> dict[str, Any]:
    """The cause with its suggested fix, and everything else that is known, JSON-safe."""
    shown = one.incident.to_dict()
    finding = shown.pop("finding") or {}
    runs = one.bundle is not None and not one.obstacle
    return {
        **finding,
        **shown,
        "incident": one.incident.name,
        "process": one.process,
        "bundle": None if one.bundle is None else str(one.bundle),
        "obstacle": one.obstacle,
        "reproduce": incident_page.reproduce(str(one.bundle)) if runs else None,
        "left_out": list(one.missing),
    }


def page(one: Explained) -> Iterable[str]:
    """The page, line by line."""
    bundle = "" if one.bundle is None else str(one.bundle)
    return incident_page.page(one.incident, bundle, one.obstacle, one.missing)
