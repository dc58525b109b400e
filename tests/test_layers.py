"""The shape of the package: layers never import upwards, the P half needs no torch, host syncs are marked."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(importlib.util.find_spec("gradwatch").submodule_search_locations[0])  # type: ignore[union-attr,index]
# Lower never imports higher; what shares a line may import each other's.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "interruption", "process", "imports", "stderr", "runtime"),
    ("snapshot", "finding", "remedies", "explanation", "health", "codes", "exit_status", "bounds"),
    ("incident", "account"),
    ("checkpoint",),
    ("detectors", "policies", "applied"),
    ("rules",),
    ("rulefile", "engine", "testing", "failing"),
    ("settings", "journal", "sinks"),
    ("audit", "bundle", "incident_page"),
    ("stack",),
    ("serve",),
    ("taps",),
    ("hooks",),
    ("localise",),
    ("course", "rank_rules", "backward_rules", "causes"),
    ("bundles", "publishing", "refusals", "surroundings", "fitting"),
    ("ruletests",),
    ("courses",),
    ("judging",),
    ("loop",),
    ("watching",),
    ("attach",),
    ("launch", "demo", "integrations"),
    ("cli", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
TORCH_FREE = [
    name
    for name in LEVEL
    if name
    not in (
        "taps",
        "hooks",
        "localise",
        "causes",
        "bundles",
        "course",
        "rank_rules",
        "backward_rules",
        "publishing",
        "fitting",
        "surroundings",
        "courses",
        "judging",
        "loop",
        "watching",
        "attach",
        "launch",
        "demo",
        "integrations",
        "cli",
        "__main__",
    )
]
MODULES = sorted(path for path in ROOT.rglob("*.py") if "bootstrap" not in path.parts)


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(tree: ast.AST) -> set[str]:
    """Parts of gradwatch that a module imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    parts = {name.split(".")[1] for name in names if name.startswith("gradwatch.") and name.count(".") >= 1}
    return {part for part in parts if part in LEVEL}


def test_every_module_has_a_layer() -> None:
    """A new part of the package must say where it stands."""
    assert {part_of(path) for path in MODULES} - {"__init__"} <= LEVEL.keys()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_layers_never_import_upwards(path: Path) -> None:
    """No module imports from a higher layer, not even inside a function."""
    part = part_of(path)
    if part == "__init__":
        return
    above = {name for name in imported(ast.parse(path.read_text())) if LEVEL[name] > LEVEL[part]}
    assert not above, f"{path.relative_to(ROOT)} imports {above} from above"


@pytest.mark.parametrize("part", TORCH_FREE)
def test_p_half_imports_without_torch(part: str) -> None:
    """Everything below hooks/ works where torch cannot be imported."""
    code = (
        "import sys, importlib, pkgutil\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch': raise ImportError('torch is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
        f"module = importlib.import_module('gradwatch.{part}')\n"
        "for found in pkgutil.walk_packages(getattr(module, '__path__', []), module.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_gradwatch_imports_neither_torch_nor_numpy() -> None:
    """`import gradwatch` is free."""
    code = "import sys, gradwatch; print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_host_syncs_in_hooks_are_marked() -> None:
    """`.item(`, `.cpu(`, `.tolist(`, `.numpy(` under hooks/ stand only on lines that say why."""
    unmarked = [
        f"{path.name}:{number}"
        for path in (ROOT / "hooks").glob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(call in line for call in (".item(", ".cpu(", ".tolist(", ".numpy(")) and "# sync:" not in line
    ]
    assert unmarked == []


FORBIDDEN = {"pickle", "shelve", "marshal", "dill", "cloudpickle"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_can_run_foreign_data(path: Path) -> None:
    """P34: no pickle, torch.load, eval, exec, yaml.load, shell=True or extractall in the package."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            # `testing` checks that detectors pickle: it loads only what it has just dumped itself.
            found += [name for name in names if name.split(".")[0] in FORBIDDEN and path.name != "testing.py"]
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "exec" and path.name == "become.py":
                continue  # the user's own script, when `python -E` makes the interpreter ignore the bootstrap
            if name in ("eval", "exec", "torch.load", "yaml.load") or name.endswith(".extractall"):
                found.append(name)
            found += [
                "shell=True"
                for keyword in node.keywords
                if keyword.arg == "shell" and getattr(keyword.value, "value", None) is True
            ]
    assert found == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_when_an_object_is_gone(path: Path) -> None:
    """No `__del__`, no `weakref.finalize` and no callback of a weak reference: they run in the midst of any code."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            found.append(node.name)
        if isinstance(node, ast.ImportFrom) and node.module == "weakref":
            found += [one.name for one in node.names if not one.name.startswith("Weak")]
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("weakref.finalize", "gc.callbacks"):
            found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("weakref.", "Weak")):
            found += [ast.unparse(node)] * (len(node.args) + len(node.keywords) > 1)
    assert found == []


def test_no_network_and_no_default_pollution() -> None:
    """P9: importing and closing leaves signal handlers, excepthook, warning filters and log handlers alone."""
    code = """
import logging, signal, sys, tempfile, warnings
import torch
from torch import nn
def state():
    return ([signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)], sys.excepthook,
            list(warnings.filters), list(logging.getLogger().handlers), torch.get_default_dtype(),
            torch.is_grad_enabled(), torch.is_anomaly_enabled())
# Making an optimizer imports torch._dynamo, and that sympy, which adds a warning filter: not ours.
model = nn.Linear(2, 2); optimizer = torch.optim.SGD(model.parameters(), 0.1)
before = state()
import gradwatch
with gradwatch.watch(model, optimizer, run_dir=tempfile.mkdtemp(), listen="127.0.0.1:0"):
    during = state()
    model(torch.ones(1, 2)).sum().backward(); optimizer.step()
assert before == during == state(), (before, during, state())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
