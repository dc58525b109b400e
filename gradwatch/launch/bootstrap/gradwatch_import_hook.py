"""Waits for `import torch`, then arms gradwatch's agent; until then it costs one comparison per import.

It is loaded in every interpreter, before the script's own folder is on `sys.path`. So it imports only what the
interpreter has loaded already (not even `__future__`): else the standard `random.py` would take the place of a
`random.py` of the script.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# .../gradwatch/launch/bootstrap/gradwatch_import_hook.py -> the folder that holds the package
PACKAGE_PARENT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3))
STARTED = os.getpid()  # the process in which this interpreter began; a forked child has another id


def install() -> None:
    """Arm now if torch is loaded already, else when it is imported; and have the account printed at the very end."""
    _at_the_end()
    if not any(isinstance(finder, PackageFinder) for finder in sys.meta_path):
        sys.meta_path.append(PackageFinder())
    if "torch" in sys.modules:
        arm()
    elif not any(isinstance(finder, TorchFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchFinder())


def arm() -> None:
    """Start the agent; a failure costs the script one line on stderr, and nothing else."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, TorchFinder)]
    try:
        from gradwatch.launch import auto_watch

        auto_watch.arm()
    except Exception as error:
        sys.stderr.write(f"gradwatch: not watching this process: {error!r}\n")


def say() -> None:
    """Print the account of a process that may have trained; of the launched one, with its children, in any case."""
    armed = "gradwatch.launch.exit_summary" in sys.modules
    if not (armed or _launched()):
        return
    known = len(sys.modules)
    path, shadows = sys.path[:], {} if armed else _shadows()
    try:
        if not armed:  # a `dataclasses.py` of the script's is not what is imported here
            for name in shadows:
                del sys.modules[name]
            sys.path.sort(key=lambda entry: not (entry + os.sep).startswith(_library()))
        from gradwatch.launch import exit_summary

        exit_summary.say()
    except Exception as error:
        sys.stderr.write(f"gradwatch: the summary of this process failed: {error!r}\n")
    finally:
        sys.modules.update(shadows)
        sys.path[:] = path
    if len(sys.modules) > known and getattr(sys, "last_type", None) is KeyboardInterrupt:
        _die_of_it_still()


def _library() -> str:
    """The folder of the standard library."""
    return os.path.dirname(os.__file__) + os.sep


def _shadows() -> "dict[str, ModuleType]":
    """Modules of the script's that have the names of some of the standard library."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        named = name != "__main__" and name.partition(".")[0] in sys.stdlib_module_names
        if named and isinstance(file, str) and not os.path.abspath(file).startswith(_library()):
            found[name] = module
    return found


def _launched() -> bool:
    return os.environ.get("GRADWATCH_LAUNCH_PID") == str(os.getpid())


def _die_of_it_still() -> None:
    """Python ends by SIGINT where the last source text it has run ended by Ctrl-C; imports run some (dataclasses)."""
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        return


def _at_the_end() -> None:
    """Exit handlers run in reverse: the first one registered runs when children were joined and journals closed."""
    known = "atexit" in sys.modules
    import atexit  # built in: no file of the script's can have that name

    atexit.register(say)
    if not known:
        del sys.modules["atexit"]
    if _launched():  # it may start trainings and never import torch
        import time  # built in, too

        fields = (os.getpid(), os.environ.get("RANK", ""), os.uname().nodename, time.time())
        os.environ["GRADWATCH_TELLER"] = ":".join(map(str, fields))


class TorchFinder:
    """A meta path finder that leaves finding torch to the others, and notices when torch has been executed."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The spec of torch from the other finders, with a loader that calls `arm` once; None for other modules."""
        if name != "torch" or self._busy:
            return None
        self._busy = True
        try:
            spec = _find_elsewhere(self, name, path, target)
        finally:
            self._busy = False
        if spec is not None:
            _arm_after_exec(spec)
        return spec


class PackageFinder:
    """The last meta path finder: gives the launching gradwatch to a Python in which none is installed."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The spec of the package gradwatch that launched this process; None for any other module."""
        if name != "gradwatch":
            return None
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, [PACKAGE_PARENT])


def _find_elsewhere(
    me: "TorchFinder", name: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> "ModuleSpec | None":
    for finder in sys.meta_path:
        if finder is not me and hasattr(finder, "find_spec"):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
    return None


def _arm_after_exec(spec: "ModuleSpec") -> None:
    loader = spec.loader
    if loader is None or not hasattr(loader, "__dict__"):
        return
    execute = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        # An attribute of this one loader object, gone before torch's code runs: torch sees its own loader.
        loader.__dict__.pop("exec_module", None)
        execute(module)
        arm()

    loader.__dict__["exec_module"] = exec_module
