"""The libraries that only some sinks need: asked for when such a sink is built, and named where they are missing."""

from __future__ import annotations

from importlib.util import find_spec

from gradwatch.errors import MissingDependencyError


def require(module: str, extra: str) -> None:
    """See that `module` can be imported, without importing it: that takes seconds, and may change global state.

    Raises:
        MissingDependencyError: it is not installed; the message names the extra of gradwatch that brings it.
    """
    if not _installed(module):
        name = module.partition(".")[0]
        raise MissingDependencyError(
            f"{module} is not installed; install gradwatch with it: pip install 'gradwatch[{extra}]'",
            name=name,
        )


def _installed(module: str) -> bool:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # a package around it
        return False
    # A folder of that name in the working directory (wandb makes ./wandb) counts as a package without a file.
    return spec is not None and spec.origin is not None
