"""Write the resolved form of every shipped pack beside it: `python -m tests.rules.write_resolved_packs`."""

from __future__ import annotations

import json
from pathlib import Path

from gradwatch.rules.files import canonical, load_rules
from gradwatch.rules.packs import SUFFIX, pack_directory, pack_names
from gradwatch.rules.resolved_packs import DEFAULT, RESOLVED, text_digest


def resolved_text(name: str) -> str:
    """The text of the file for a pack: its rules, where each of them stands, and the texts that say so."""
    ruleset = load_rules(name)
    origins = {
        key: place if place == DEFAULT else Path(place).name.replace(SUFFIX, "")
        for key, place in ruleset.origins.items()
    }
    packs = {name, *(place.partition(":")[0] for place in origins.values() if place != DEFAULT)}
    document = {
        "texts": {each: text_digest(each) for each in sorted(packs)},
        "digest": ruleset.digest,
        "rules": canonical(ruleset),
        "origins": origins,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"


if __name__ == "__main__":
    for pack in pack_names():
        (pack_directory() / (pack + RESOLVED)).write_text(resolved_text(pack), encoding="utf-8")
