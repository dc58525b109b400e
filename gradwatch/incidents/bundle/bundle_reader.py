"""Reading of a bundle from anywhere: what is wrong is reported with file and place, and nothing of it is ever run."""

from __future__ import annotations

import json
import os
import stat
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwatch.errors import GradwatchError
from gradwatch.incidents.bundle.incident_json import DOCUMENT, FORMAT, TENSORS, VERSION, Document

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MOST_DOCUMENT = 64 << 20
"""Bytes of an incident.json; ours has a few hundred per parameter."""

MOST_HEADER = 100_000_000
"""Bytes of the header of a safetensors file, as its format says."""


class BundleError(GradwatchError):
    """This is no bundle, or not one that can be read here; says which file and where in it."""


def read_document(folder: Path) -> Document:
    """Read the document of a bundle, every type checked.

    Raises:
        BundleError: `incident.json` is not there, no regular file, too large, no JSON, of another version or not of
            the shape that `gradwatch.incidents.bundle.incident_json` describes.
    """
    path = folder / DOCUMENT
    raw = read_file(path, MOST_DOCUMENT)
    try:
        found = json.loads(raw)
    except json.JSONDecodeError as error:
        raise BundleError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise BundleError(f"{path}: not UTF-8 at byte {error.start}") from None
    except (RecursionError, ValueError) as error:  # nested too deep; an integer of too many digits
        raise BundleError(f"{path}: not JSON that can be read: {type(error).__name__}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise BundleError(f"{path}: not the document of a bundle: no `format: {FORMAT}`")
    if found.get("version") != VERSION:
        said = found.get("version")
        raise BundleError(f"{path}: version {said!r:.40}; this gradwatch reads version {VERSION}")
    return _checked(path, found)


def read_file(path: Path, most: int | None = None) -> bytes:
    """The bytes of one file of a bundle: a regular file, no link, at most `most` bytes. Raises `BundleError`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise BundleError(f"{path}: {said}; a bundle is a folder that holds {DOCUMENT}") from None
    try:
        with open(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BundleError(f"{path}: not a regular file")
            if most is not None and status.st_size > most:
                raise BundleError(f"{path}: {status.st_size:,} bytes, more than the {most:,} that are read")
            return file.read(status.st_size)
    except (OSError, MemoryError) as error:
        raise BundleError(f"{path}: {type(error).__name__}: {error}") from None


def read_tensors(folder: Path) -> dict[str, Any]:
    """The tensors of a bundle by name, on the CPU. Raises `BundleError`; MissingDependencyError without safetensors."""
    return load_tensors(folder / TENSORS)


def load_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file by name; the file is read, not mapped: it may change under our hands."""
    from gradwatch.runtime.optional_dependencies import require

    require("safetensors", "bundle")
    from safetensors import SafetensorError
    from safetensors.torch import load

    raw = read_file(path)
    if len(raw) < 8:
        raise BundleError(
            f"{path}: {len(raw)} bytes; a safetensors file begins with 8 for its header's length"
        )
    header = int.from_bytes(raw[:8], "little")
    if header > min(MOST_HEADER, len(raw) - 8):
        raise BundleError(f"{path}: byte 0: a header of {header:,} bytes in a file of {len(raw):,}")
    try:
        found: dict[str, Any] = load(raw)
    except (
        SafetensorError,
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
        OverflowError,
        MemoryError,
    ) as error:
        raise BundleError(f"{path}: byte 8: not safetensors: {error}") from None
    return found


def _checked(path: Path, found: dict[str, Any]) -> Document:
    from pydantic import ValidationError

    try:
        return _adapter().validate_python(found)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        said = [f"{path}: {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in problems[:5]]
        more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
        raise BundleError("\n".join([*said, *more])) from None
    except RecursionError:
        raise BundleError(f"{path}: nested too deep") from None


@cache
def _adapter() -> TypeAdapter[Document]:
    from pydantic import TypeAdapter

    return TypeAdapter(Document)
