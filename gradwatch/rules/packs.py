"""Rule files that are shipped, known by name. Nothing is imported to read them."""

from __future__ import annotations

import re
from pathlib import Path

import gradwatch

SUFFIX = ".gradwatch.yaml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def pack_directory() -> Path:
    """The folder of the shipped packs: inside the wheel, or `rules/` of a checkout."""
    package = Path(gradwatch.__file__).parent
    inside = package / "_rules"
    return inside if inside.is_dir() else package.parent / "rules"


def pack_names() -> list[str]:
    """The shipped packs, sorted."""
    return sorted(path.name.removesuffix(SUFFIX) for path in pack_directory().glob("*" + SUFFIX))


def pack_path(name: str) -> Path | None:
    """The file of a shipped pack; None where `name` is none."""
    path = pack_directory() / (name + SUFFIX)
    return path if _NAME.fullmatch(name) and path.is_file() else None
