"""gradwatch watches the gradients of a PyTorch training job, judges them by YAML rules and acts in the step.

    with gradwatch.watch(model, optimizer, rules="default") as gw:
        ...

Names are loaded when first used, so that `import gradwatch` imports neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradwatch.detectors import register_detector
    from gradwatch.errors import AttachError, GradwatchError, RuleFileError, TrainingStopped
    from gradwatch.localise.held_calls.batch_identity import batch_hash
    from gradwatch.policies import register_policy
    from gradwatch.report.run_reader import load
    from gradwatch.rules.files import load_rules
    from gradwatch.session.watch import Watch
    from gradwatch.session.watch_function import watch
    from gradwatch.sinks import register_sink

__all__ = [
    "AttachError",
    "GradwatchError",
    "RuleFileError",
    "TrainingStopped",
    "Watch",
    "batch_hash",
    "load",
    "load_rules",
    "register_detector",
    "register_policy",
    "register_sink",
    "watch",
]

_HOME = {
    "AttachError": "gradwatch.errors",
    "GradwatchError": "gradwatch.errors",
    "RuleFileError": "gradwatch.errors",
    "TrainingStopped": "gradwatch.errors",
    "Watch": "gradwatch.session.watch",
    "batch_hash": "gradwatch.localise.held_calls.batch_identity",
    "load": "gradwatch.report.run_reader",
    "load_rules": "gradwatch.rules.files",
    "register_detector": "gradwatch.detectors",
    "register_policy": "gradwatch.policies",
    "register_sink": "gradwatch.sinks",
    "watch": "gradwatch.session.watch_function",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'gradwatch' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def _version() -> str:
    """The version of the installed distribution; "0+unknown" where the package runs without having been installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gradwatch")
    except PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
