"""The shape of the package: layers never import upwards, the P half needs no torch, host syncs are marked."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import gradwatch
from tests.support import warm

ROOT = Path(importlib.util.find_spec("gradwatch").submodule_search_locations[0])  # type: ignore[union-attr,index]
# Lower never imports higher; what shares a line may import each other's. A room is a folder with all that is below it,
# or one of the files at the root.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("runtime",),
    ("records",),
    ("account", "checkpoint"),
    ("detectors",),
    ("policies", "testing"),
    ("rules",),
    ("engine",),
    ("rule_tests",),
    ("reading",),
    ("taps",),
    ("capture",),
    ("distributed", "actions"),
    ("incidents",),
    ("journal",),
    ("report", "endpoint", "backtest"),
    ("sinks",),
    ("localise",),
    ("session",),
    ("integrations", "inspect"),
    ("launch", "demo", "monitoring"),
    ("serve",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
WITH_TORCH = (
    *("reading", "taps", "capture", "distributed", "actions", "localise", "session"),
    *("integrations", "inspect", "launch", "demo", "cli", "__main__"),
)
TORCH_FREE = [name for name in LEVEL if name not in WITH_TORCH]
AT_ROOT = {"__init__.py", "__main__.py", "errors.py", "testing.py", "py.typed"}
MOST_FILES = 20
# Where private names of torch may stand.
PRIVATE_ROOMS = ("taps/", "reading/", "distributed/process_group.py")
FACTORIES = {
    *("arange", "empty", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "tensor", "zeros"),
}
OWN_SCRIPTS = ("testing.py", "demo/train.py", "cli/doctor/torch_probes.py", "cli/doctor/watching_cost.py")
SOURCES = sorted(ROOT.rglob("*.py"))
MODULES = [path for path in SOURCES if "bootstrap" not in path.parts]
FOLDERS = sorted({path.parent for path in SOURCES})


def place_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def name_of(path: Path) -> str:
    """The dotted name of the module in a file."""
    return ".".join(("gradwatch", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


NAMES = {name_of(path) for path in SOURCES}


@cache
def parsed(path: Path) -> ast.Module:
    """A module's syntax tree: every test looks at all of them."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All that a syntax tree is made of: to walk through those of the whole package takes most of the tests' time."""
    return tuple(ast.walk(tree))


def offenders(found: Callable[[Path], object]) -> dict[str, object]:
    """The modules in which something was found, and what."""
    return {place_of(path): what for path in MODULES if (what := found(path))}


def module_of(name: str) -> str | None:
    """The module that `gradwatch.a.b.Name` is in; a name of `gradwatch` itself is in the module it is loaded from."""
    head, _, attribute = name.partition(".")
    if head != "gradwatch":
        return None
    name = f"{gradwatch._HOME.get(attribute, name)}"
    while name not in NAMES:
        name = name.rpartition(".")[0]
    return name


def imported(tree: ast.Module) -> set[str]:
    """Modules of gradwatch that a module imports anywhere: in functions, for types, or by a string that names one."""
    names: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "gradwatch"
        ):
            names.add(f"gradwatch.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = node.value.partition(":")[0]
            names |= (
                {found} & NAMES if found.count(".") > 1 else set()
            )  # "gradwatch.sinks" is a group of plug-ins
    return {module for name in names if (module := module_of(name)) not in (None, "gradwatch")}  # type: ignore[misc]


def upward(part: str, tree: ast.Module) -> set[str]:
    return {module for module in imported(tree) if LEVEL[module.split(".")[1]] > LEVEL[part]}


def test_the_root_holds_what_is_drawn() -> None:
    """At the root of the package stand four files and the typing marker, and a new room says where it stands."""
    assert {path.name for path in ROOT.iterdir() if path.is_file()} == AT_ROOT
    assert {part_of(path) for path in MODULES} - {"__init__"} == LEVEL.keys()


@pytest.mark.parametrize("folder", FOLDERS, ids=place_of)
def test_no_folder_is_too_large(folder: Path) -> None:
    """A folder can be seen at a glance, and says in its `__init__` what is in it."""
    files = [path.name for path in folder.iterdir() if path.is_file()]
    assert len(files) <= MOST_FILES
    if folder.name != "bootstrap":
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


def test_layers_never_import_upwards() -> None:
    """No module imports from a higher layer, not even inside a function."""
    assert offenders(lambda path: part_of(path) != "__init__" and upward(part_of(path), parsed(path))) == {}


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    from gradwatch.cli import main",
        "if TYPE_CHECKING:\n    from gradwatch import cli",
        "import gradwatch.cli.run as run",
        "import_module('gradwatch.cli.run')",
        "sys.modules.get('gradwatch.cli.run')",
        "from gradwatch import watch",
        "import gradwatch\ngradwatch.watch()",
    ],
)
def test_an_upward_import_is_found(code: str) -> None:
    """Wherever it stands and however it is written."""
    assert upward("engine", ast.parse(code))
    assert not upward("cli", ast.parse(code))


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def begins_with(node: ast.AST) -> str:
    """The name that a chain of attributes, calls and items begins with; "" where it begins otherwise."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def names_of_torch(tree: ast.Module) -> Iterator[str]:
    """Every name of torch that a module imports or reads off a module of torch, from `torch.` on."""
    local: dict[str, str] = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    local |= {alias.asname: alias.name} if alias.asname else {"torch": "torch"}
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            local |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch."):
            yield from [str(node.value)] * (" " not in str(node.value))
    for node in nodes(tree):
        if not isinstance(node, ast.Attribute) or begins_with(node) not in local:
            continue
        first, _, rest = ast.unparse(node).partition(".")
        if first in local:
            yield f"{local[first]}.{rest}"


def private_names(tree: ast.Module) -> set[str]:
    """Those of them that are private, without those that another one begins with."""
    found = {name for name in names_of_torch(tree) if is_private(name)}
    return {name for name in found if not any(each.startswith(f"{name}.") for each in found)}


def test_private_names_of_torch_are_confined() -> None:
    """What torch may change in any release is used where torch is hooked and read, and nowhere else."""
    assert (
        offenders(lambda path: not place_of(path).startswith(PRIVATE_ROOMS) and private_names(parsed(path)))
        == {}
    )


def test_a_private_name_of_torch_is_found() -> None:
    """However it is imported."""
    assert private_names(ast.parse("import torch\ntorch._C._nested()")) == {"torch._C._nested"}
    assert private_names(ast.parse("from torch.x import _y as z")) == {"torch.x._y"}
    assert private_names(ast.parse("import torch.x as y\ny._z")) == {"torch.x._z"}
    assert private_names(ast.parse("sys.modules.get('torch._dynamo')")) == {"torch._dynamo"}
    assert private_names(ast.parse("import torch\ntorch.add, torch.__version__, self._x, '_y'")) == set()


def test_p_half_imports_without_torch() -> None:
    """The rooms that only read and judge numbers work where torch cannot be imported."""
    names = [f"gradwatch.{part}" for part in TORCH_FREE]
    code = f"""
import sys, importlib, pkgutil
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'torch': raise ImportError('torch is blocked')
sys.meta_path.insert(0, Block())
for name in {names}:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, '__path__', []), name + '.'):
        importlib.import_module(found.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_gradwatch_imports_neither_torch_nor_numpy() -> None:
    """`import gradwatch` is free, and so is what says which framework is absent."""
    code = "import sys, gradwatch.integrations; print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("room", ["reading", "taps", "capture", "distributed", "actions", "session"])
def test_host_syncs_are_marked(room: str) -> None:
    """`.item(`, `.cpu(`, `.tolist(`, `.numpy(` in the path of a step stand only on lines that say why."""
    paths = sorted((ROOT / room).rglob("*.py"))
    assert paths
    unmarked = [
        f"{place_of(path)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if any(call in line for call in (".item(", ".cpu(", ".tolist(", ".numpy(")) and "# sync:" not in line
    ]
    assert unmarked == []


FORBIDDEN = {"pickle", "shelve", "marshal", "dill", "cloudpickle"}


def runs_foreign_data(path: Path) -> list[str]:
    """Imports and calls by which data become code."""
    found = []
    for node in nodes(parsed(path)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            # `testing` checks that detectors pickle: it loads only what it has just dumped itself.
            found += [name for name in names if name.split(".")[0] in FORBIDDEN and path.name != "testing.py"]
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "exec" and path.name == "run_script.py":
                continue  # the user's own script, when `python -E` makes the interpreter ignore the bootstrap
            if name in ("eval", "exec", "torch.load", "yaml.load") or name.endswith(".extractall"):
                found.append(name)
            found += [
                "shell=True"
                for keyword in node.keywords
                if keyword.arg == "shell" and getattr(keyword.value, "value", None) is True
            ]
    return found


def test_python_3_10_can_read_every_annotation() -> None:
    """It evaluates those of detectors (pydantic asks), and no `ClassVar` without a type in brackets."""

    def plain(path: Path) -> list[int]:
        nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.AnnAssign)]
        return [node.lineno for node in nodes if ast.unparse(node.annotation).endswith("ClassVar")]

    assert offenders(plain) == {}


def test_nothing_can_run_foreign_data() -> None:
    """P34: no pickle, torch.load, eval, exec, yaml.load, shell=True or extractall in the package."""
    assert offenders(runs_foreign_data) == {}


NOTES_DEATHS = "weakref.ref(one, died.append)"  # of a list: no Python runs, and so no signal handler


def runs_when_an_object_is_gone(path: Path) -> list[str]:
    """Finalizers, and callbacks of weak references."""
    found = []
    for node in nodes(parsed(path)):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            found.append(node.name)
        if isinstance(node, ast.ImportFrom) and node.module == "weakref":
            found += [one.name for one in node.names if not one.name.startswith("Weak")]
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("weakref.finalize", "gc.callbacks"):
            found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("weakref.", "Weak")):
            found += [ast.unparse(node)] * (len(node.args) + len(node.keywords) > 1)
    return [one for one in found if one != NOTES_DEATHS]


def test_nothing_runs_when_an_object_is_gone() -> None:
    """No `__del__`, no `weakref.finalize` and no callback of a weak reference: they run in the midst of any code."""
    assert offenders(runs_when_an_object_is_gone) == {}


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
    warm.run([sys.executable, "-c", code], check=True)


def set_from_elsewhere(tree: ast.Module) -> set[str]:
    """Attributes of a capture, a membership or a window, by the names these go by, that some code assigns to."""
    stored = (
        node for node in nodes(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    owners = {"captured", "built", "membership", "window"}
    return {ast.unparse(node) for node in stored if ast.unparse(node.value).rpartition(".")[2] in owners}


def test_captures_memberships_and_windows_set_their_own_attributes() -> None:
    """What is known of an optimizer, its ranks and its window changes in one file: others call methods that say why."""
    assert offenders(lambda path: set_from_elsewhere(parsed(path))) == {}


def test_an_attribute_set_from_elsewhere_is_found() -> None:
    """Also in a tuple, and where it is added to."""
    code = "captured.step += 1\nctx.membership.late, x = True, 1\nbuilt.a: int = 0\none.window.b = 2"
    found = set_from_elsewhere(ast.parse(code + "\nself.captured = 1\ncaptured.f()"))
    assert found == {"captured.step", "ctx.membership.late", "built.a", "one.window.b"}


# A sink knows Records; of many optimizers that step inside one backward there is one context; the name of a meeting of
# ranks is used up though the optimizer whose number it has is gone.
KEYED_BY_INDEX = {
    *("session/actions/snapshot_action.py", "session/boundary/step_in_backward.py", "distributed/ranks.py"),
}
LOOK_UPS = {"get", "pop", "setdefault"}
OF_ONE_OPTIMIZER = ("capture/", "distributed/", "actions/", "session/")


def keyed_by_optimizer(tree: ast.Module) -> set[str]:
    """Look-ups by an optimizer's `id`, or by the index of its capture, in something that is kept in an attribute."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.Subscript):
            owner, key = node.value, ast.unparse(node.slice)
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOK_UPS
        ):
            owner, key = node.func.value, "".join(map(ast.unparse, node.args[:1]))
        else:
            continue
        if isinstance(owner, ast.Attribute) and key.endswith(
            ("id(optimizer)", "captured.index", "id(captured)")
        ):
            found.add(f"{ast.unparse(owner)}: {key}")
    return found


def test_what_is_known_of_one_optimizer_lies_in_its_context() -> None:
    """Below the sinks one container is keyed by optimizer: that of the contexts."""

    def look_ups(path: Path) -> set[str]:
        place = place_of(path)
        judged = place.startswith(OF_ONE_OPTIMIZER) and place not in KEYED_BY_INDEX
        return keyed_by_optimizer(parsed(path)) if judged else set()

    assert offenders(look_ups) == {"session/optimizer_context.py": {"self._by_index: captured.index"}}


def test_a_container_keyed_by_optimizer_is_found() -> None:
    """However it is asked, or written to."""
    code = "self._a[id(optimizer)] = 1\nself._b.get(captured.index)\nself._c.pop(id(one.captured), None)"
    assert len(keyed_by_optimizer(ast.parse(code))) == 2


def test_every_tensor_of_ours_says_where_it_lies() -> None:
    """The user's `torch.set_default_device` would move it elsewhere; the processes of our own scripts have none."""
    ours = (path for path in MODULES if path.relative_to(ROOT).as_posix() not in OWN_SCRIPTS)
    assert list(filter(None, (_without_device(path) for path in ours))) == []


def _without_device(path: Path) -> str:
    """The lines of a file with a factory of torch that gives no device."""
    lines = [
        str(call.lineno)
        for call in nodes(parsed(path))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in FACTORIES
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and not any(keyword.arg in (None, "device") for keyword in call.keywords)
    ]
    return f"{path.relative_to(ROOT)}:{','.join(lines)}" if lines else ""
