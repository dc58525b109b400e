"""Code of the user's that an option names, as MODULE:FUNCTION: run only because it was named."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gradwatch.errors import GradwatchError


@contextmanager
def from_here() -> Iterator[None]:
    """The working directory is searched first for modules, as by `python -m`."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def call(option: str, reference: str) -> Any:
    """Call the named function. An error of its own is a GradwatchError with its place in the user's code."""
    with from_here():
        function = load(option, reference)
        try:
            return function()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[1:]  # without this one
            place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
            raise GradwatchError(f"{option} {reference}: {type(error).__name__}: {error}{place}") from error


def load(option: str, reference: str, form: str = "MODULE:FUNCTION") -> Callable[..., Any]:
    """Load `module:function`. Raises GradwatchError that names the option and the problem."""
    module, colon, name = reference.partition(":")
    if not colon or not module or not name:
        raise GradwatchError(f"{option} {reference!r} is not {form}, e.g. train:build")
    if module.endswith(".py") or os.sep in module:
        path = os.path.normpath(module.removesuffix(".py"))
        folder, stem = os.path.split(path)
        elsewhere = os.path.isabs(path) or path.startswith(os.pardir)
        dotted = stem if elsewhere else path.replace(os.sep, ".")
        instead = f"{dotted}:{name}{f', in the folder {folder}' if elsewhere else ''}"
        raise GradwatchError(f"{option} {reference!r}: name the module, not its file: {instead}")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise GradwatchError(f"{option} {reference}: {error}") from None
    if not callable(found):
        raise GradwatchError(f"{option} {reference}: {name} is not a function but a {type(found).__name__}")
    return found  # type: ignore[no-any-return]
