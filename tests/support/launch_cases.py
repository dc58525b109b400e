"""Small scripts that must not be able to tell whether they run under `gradwatch run` (promise P38).

Each Case is a command, the files it needs and perhaps its stdin; `{python}` stands for the interpreter.
`TRAIN` is three real optimizer steps, so that a watch is live when the script does what it does.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import warm

# Not by PYTHONPATH: the script must find gradwatch through the launcher alone, and a bare run not at all.
ROOT = str(Path(__file__).resolve().parents[2])
CODE = f"import sys; sys.path[0] = {ROOT!r}; import gradwatch.cli as c; sys.exit(c.main())"
GRADWATCH = (sys.executable, "-c", CODE)

TRAIN = """
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
"""
CLOSURE = """
lbfgs = torch.optim.LBFGS(model.parameters())
def closure():
    lbfgs.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return loss
print(lbfgs.step(closure).item())
"""
BARE_TENSORS = """
import torch
weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=.1)
for _ in range(3):
    optimizer.zero_grad()
    weight.square().sum().backward()
    optimizer.step()
print(weight)
"""
SPAWN = """
import multiprocessing, sys
def f(x):
    return x, sys.argv, sys.path
if __name__ == "__main__":
    print(multiprocessing.get_context("spawn").Pool(1).map(f, [1, 2]))
"""
LOADER = """
import torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    exec(TRAIN)
    for batch in DataLoader(list(range(8)), num_workers=2, multiprocessing_context="METHOD"):
        print(batch)
"""
PICKLE = """
import atexit, pickle
class A: pass
print(pickle.dumps(A()))
atexit.register(lambda: print(pickle.loads(pickle.dumps(A())).__class__))
"""
LOOK = """
import sys, signal, logging, threading, warnings
print(sys.excepthook is sys.__excepthook__, [signal.getsignal(each) for each in (2, 15, 10)])
print([each[:3] for each in warnings.filters], logging.root.handlers, threading.active_count())
"""
MODULES = """
import sys
print(sorted(name for name in sys.modules if not name.startswith(("gradwatch", "sitecustomize"))))
"""
SAVE = """
import copy, io
buffer = io.BytesIO()
torch.save(copy.deepcopy(model), buffer)
print(b"gradwatch" in buffer.getvalue(), type(model[0]))
"""
# A sitecustomize is run by the launcher's own Python too; what it prints must come from the script's only.
ONLY_FOR_X = "import sys\nif sys.orig_argv[1:2] == ['x.py']:\n    "
USER_SITE = {"PYTHONPATH": "{cwd}/site"}


@dataclass(frozen=True)
class Case:
    """A command to compare bare and watched; `soak` = not in every commit's gate."""

    name: str
    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    soak: bool = True


def script(name: str, *lines: str, argv: tuple[str, ...] = (), stdin: str = "", soak: bool = True) -> Case:
    """A Case of one file, `x.py`, run by `python x.py ARGV…`."""
    return Case(name, ("{python}", "x.py", *argv), {"x.py": "\n".join(lines)}, stdin, soak=soak)


def site(name: str, line: str, *lines: str, soak: bool = True) -> Case:
    """A Case whose sitecustomize runs `line` for the script only, and the script `lines`."""
    files = {"site/sitecustomize.py": f"{ONLY_FOR_X}{line}\nMINE = 1\n", "x.py": "\n".join(lines)}
    return Case(name, ("{python}", "x.py"), files, environ=USER_SITE, soak=soak)


SHOW = "import sys\nprint(sys.argv, sys.path, __name__)"

ENTRIES = (
    script(
        "argv",
        SHOW,
        "import os\nprint(os.getcwd(), __file__, __spec__, sys.flags)",
        argv=("--lr", "3e-4", "--", "-x", "", "ü"),
        soak=False,
    ),
    Case("stdin", ("{python}", "-", "a"), stdin=SHOW, soak=False),
    Case("stdin-no-dash", ("{python}",), stdin=SHOW + "\nraise ValueError(1)"),
    Case(
        "module",
        ("{python}", "-m", "pkg.mod", "a", "-b"),
        {"pkg/__init__.py": "", "pkg/mod.py": SHOW + "\nprint(__spec__.name)"},
        soak=False,
    ),
    Case("package", ("{python}", "-m", "pkg"), {"pkg/__main__.py": SHOW + "\nprint(__package__)"}),
    Case("code", ("{python}", "-c", SHOW + "\n1/0", "a", "b"), soak=False),
    Case("other-folder", ("{python}", "deep/x.py"), {"deep/x.py": "import y", "deep/y.py": SHOW}),
    Case("folder", ("{python}", "app"), {"app/__main__.py": SHOW}),
    Case(
        "flags",
        ("{python}", "-OO", "-W", "error", "-X", "utf8=0", "-u", "x.py"),
        {"x.py": "import sys, warnings\nprint(sys.flags)\nwarnings.warn('no')"},
    ),
    Case("shell", ("sh", "-c", '"{python}" x.py one; echo "status $?"'), {"x.py": "raise SystemExit(9)"}),
    Case("not-python", ("sh", "-c", "echo hello; exit 4")),
    Case("missing-script", ("{python}", "no-such.py")),
    Case("missing-module", ("{python}", "-m", "no_such_module")),
)

EXITS = (
    script("exit-code", "import sys\nprint('out')\nsys.exit(3)"),
    script("exit-message", "import sys\nsys.exit('a message')", soak=False),
    script("exit-odd", "import sys\nsys.exit(1 << 40)"),
    script("exception", "def f():\n    raise ValueError('no')\n\nf()\n", soak=False),
    script("exception-chain", "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('x') from e\n"),
    script("exception-own-hook", "import sys\nsys.excepthook = lambda *a: print('mine', a[0])\n1 / 0\n"),
    script("recursion", "def f():\n    f()\n\nf()\n"),
    script("syntax-error", "x = = 1\n"),
    script("os-exit", "import os\nprint('gone', flush=True)\nos._exit(7)", soak=False),
    script("sigterm", "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", soak=False),
    script("sigkill", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"),
    script("sigint", "import os, time\nos.kill(os.getpid(), 2)\ntime.sleep(5)", soak=False),
    script(
        "sigint-caught",
        "import os\ntry:\n    os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt:\n    print(1)",
    ),
    script("abort", "import os\nos.abort()"),
    script("atexit", "import atexit\natexit.register(print, 'bye')\natexit.register(print, 'first')"),
    script("atexit-raises", "import atexit\natexit.register(int, 'x')"),
    script("thread", "import threading, time", "threading.Timer(.1, print, ('late',)).start()"),
    script("closed-stderr", "import sys\nsys.stderr.close()\nprint('still here')"),
    script("closed-stdout", "import os\nos.close(1)\n"),
)

SURROUNDINGS = (
    script("modules", MODULES),
    script("settings", LOOK),
    script("input", "print(input() + input())", stdin="one\ntwo\n"),
    Case(
        "shadowing",
        ("{python}", "x.py"),
        {
            "x.py": "import random, dataclasses\nprint(random.MINE, dataclasses.MINE)",
            "random.py": "MINE = 1",
            "dataclasses.py": "MINE = 2",
        },
        soak=False,
    ),
    site(
        "sitecustomize",
        "print('user sitecustomize')",
        "import sitecustomize\nprint(sitecustomize.__file__, sitecustomize.MINE)",
        soak=False,
    ),
    site("sitecustomize-raises", "1 / 0", "print('on')"),
    site("sitecustomize-import-error", "import no_such", "print('on')"),
)

PROCESSES = (
    script("pickle-main", PICKLE),
    script("spawn", SPAWN, argv=("a",), soak=False),
    script("fork", "import os, sys\npid = os.fork()\nif pid == 0: sys.exit(4)\nprint(os.waitpid(pid, 0)[1])"),
    script(
        "subprocess",
        "import subprocess, sys",
        "child = [sys.executable, '-c', 'import sys; print(sys.path); 1/0']",
        "print(subprocess.run(child, capture_output=True))",
    ),
)

TRAININGS = (
    script(
        "train", TRAIN, "print(type(torch.__spec__.loader), vars(torch.__loader__).keys(), torch.rand(2))"
    ),
    script("train-exit", TRAIN, "import sys; sys.exit(5)"),
    script("train-exception", TRAIN, "def f():\n    raise ValueError('user error')\nf()\n", soak=False),
    script("train-sigterm", TRAIN, "import os; print(end='', flush=True); os.kill(os.getpid(), 15)"),
    script("train-sigint", TRAIN, "import os, time; os.kill(os.getpid(), 2); time.sleep(5)"),
    script("train-os-exit", TRAIN, "import os; print(end='', flush=True); os._exit(3)"),
    Case("train-stdin", ("{python}", "-"), stdin=TRAIN),
    script("train-save", TRAIN, SAVE),
    script(
        "train-fork",
        TRAIN,
        "import os, sys\nprint(end='', flush=True)\npid = os.fork()",
        "if pid == 0: sys.exit(6)",
        "print(os.waitpid(pid, 0)[1])",
    ),
    script("train-frozen-gc", TRAIN.replace("for _", "import gc; gc.freeze()\nfor _")),
    script("train-bare-tensors", BARE_TENSORS),
    script("train-closure", TRAIN, CLOSURE),
    script(
        "train-spawn",
        f"import torch.multiprocessing as mp, sys\nTRAIN = {TRAIN!r}",
        "def f(rank):\n    exec(TRAIN, {})\n    sys.stdout.flush()",
        "if __name__ == '__main__':\n    mp.spawn(f, nprocs=1)",
    ),
    script("dataloader-fork", f"TRAIN = {TRAIN!r}", LOADER.replace("METHOD", "fork")),
    script("dataloader-spawn", f"TRAIN = {TRAIN!r}", LOADER.replace("METHOD", "spawn")),
    script("dataloader-forkserver", f"TRAIN = {TRAIN!r}", LOADER.replace("METHOD", "forkserver")),
)

CASES = (*ENTRIES, *EXITS, *SURROUNDINGS, *PROCESSES, *TRAININGS)


def bare_and_watched(
    text: str, folder: Path
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """A script that succeeds, run bare and under `gradwatch run`; what it prints itself is the same."""
    (folder / "train.py").write_text(text)
    bare, watched = (
        warm.run([*how, sys.executable, "train.py"], folder, check=True)
        for how in ((), (*GRADWATCH, "run", "--listen", "127.0.0.1:0", "--"))
    )
    assert watched.stdout == bare.stdout
    return bare, watched
