"""Turn this interpreter into the one that runs a given script, as `python SCRIPT ARGS…` would have done."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from types import CodeType


def run_script(words: Sequence[str]) -> None:
    """Run `SCRIPT ARGS…`, `-m MODULE ARGS…`, `-c CODE ARGS…` or (no words, or `-`) stdin as `__main__`.

    The script runs in the real `__main__` module, so that its classes pickle and multiprocessing finds it. Whatever it
    raises passes through. Its annotations are evaluated, although those of this file are not (`dont_inherit`).
    """
    # Safe path (-I, -P): Python put no folder of gradwatch's first, and puts none of the script's either.
    replace_first = not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated
    if words and words[0] == "-m":
        _first_on_path(os.getcwd(), replace_first)
        sys.argv = [words[1], *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if words and words[0] == "-c":
        _first_on_path("", replace_first)
        sys.argv = ["-c", *words[2:]]
        _run_main(compile(words[1], "<string>", "exec", dont_inherit=True), None)
    elif not words or words[0] == "-":
        _first_on_path("", replace_first)
        sys.argv = list(words) or [""]
        _run_main(compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True), None)
    else:
        _first_on_path(os.path.dirname(os.path.realpath(words[0])), replace_first)
        sys.argv = list(words)
        with open(words[0], "rb") as source:
            _run_main(compile(source.read(), words[0], "exec", dont_inherit=True), words[0])


def _first_on_path(folder: str, replace: bool) -> None:
    if replace:
        sys.path[0] = folder


def _run_main(code: CodeType, path: str | None) -> None:
    namespace = sys.modules["__main__"].__dict__
    kept: dict[str, object] = {
        name: namespace[name] for name in ("__builtins__", "__loader__") if name in namespace
    }
    namespace.clear()
    namespace.update(kept, __name__="__main__", __doc__=None, __package__=None, __spec__=None)
    if path is not None:
        namespace.update(__file__=path, __cached__=None)
    exec(code, namespace)
