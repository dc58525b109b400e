"""The error of an integration whose framework is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradwatch.errors import MissingDependencyError


@contextmanager
def requires(package: str, extra: str) -> Iterator[None]:
    """Import a framework in here.

    Raises:
        MissingDependencyError: `package` is not installed. Whatever else goes wrong while it is imported (one
            of its own dependencies is missing, say) passes through unchanged.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:
            raise
        raise MissingDependencyError(
            f"{package} is not installed; install it, or gradwatch with it: pip install 'gradwatch[{extra}]'",
            name=error.name,
        ) from error
