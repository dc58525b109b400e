"""`gradwatch version`: what is installed, without importing it."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata

LIBRARIES = ("torch", "numpy", "prometheus-client", "pydantic", "structlog", "ruamel.yaml", "rich", "shtab")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch version` to argparse."""
    parser = commands.add_parser("version", help="versions of gradwatch and of its dependencies")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Print the versions."""
    found = versions()
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"gradwatch {found['gradwatch']}")
        print("  ".join(f"{name} {version}" for name, version in found.items() if name != "gradwatch"))
    return 0


def versions() -> dict[str, str]:
    """Version by distribution; "not installed" where it is not (gradwatch itself, in a bare checkout)."""
    found = {"gradwatch": version_of("gradwatch"), "python": platform.python_version()}
    return found | {name: version_of(name) for name in LIBRARIES}


def version_of(distribution: str) -> str:
    """The installed version of one distribution, read from its metadata."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
