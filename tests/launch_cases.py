"""Small scripts that must not be able to tell whether they run under `gradwatch run` (promise P38).

Each Case is a command, the files it needs and perhaps its stdin; `{python}` stands for the interpreter. `TRAIN` is
three real optimizer steps, so that a watch is live when the script does what it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
print("loss", float(loss))
"""

# A sitecustomize is run by the launcher's own Python too; what it prints must come from the script's only.
ONLY_FOR_X = "import sys\nif sys.orig_argv[1:2] == ['x.py']:\n"


@dataclass(frozen=True)
class Case:
    """A command to compare bare and watched; `soak` = not in every commit's gate."""

    name: str
    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    soak: bool = True


def script(name: str, body: str, *argv: str, soak: bool = True, stdin: str = "") -> Case:
    """A Case of one file, `x.py`, run by `python x.py ARGV…`."""
    return Case(name, ("{python}", "x.py", *argv), {"x.py": body}, stdin, soak=soak)


CASES = (
    # -- how a script is entered ------------------------------------------------------------------------
    script(
        "argv",
        "import sys, os\nprint(sys.argv, sys.path, os.getcwd(), __file__, __name__, __spec__, sys.flags)",
        "--lr", "3e-4", "--", "-x", "", "ü",
        soak=False,
    ),  # fmt: skip
    Case("stdin", ("{python}", "-", "a"), stdin="import sys; print(sys.argv, sys.path[0], __name__)", soak=False),
    Case("stdin-no-dash", ("{python}",), stdin="import sys; print(sys.argv, sys.path[0])\nraise ValueError(1)"),
    Case(
        "module",
        ("{python}", "-m", "pkg.mod", "a", "-b"),
        {"pkg/__init__.py": "", "pkg/mod.py": "import sys\nprint(sys.argv, sys.path, __name__, __spec__.name)"},
        soak=False,
    ),
    Case("package", ("{python}", "-m", "pkg"), {"pkg/__main__.py": "import sys\nprint(sys.argv, __package__)"}),
    Case("code", ("{python}", "-c", "import sys; print(sys.argv, sys.path[0])\n1/0", "a", "b"), soak=False),
    Case("other-folder", ("{python}", "deep/x.py"), {"deep/x.py": "import y", "deep/y.py": "print(__file__)"}),
    Case("folder", ("{python}", "app"), {"app/__main__.py": "import sys; print(sys.argv, sys.path[0])"}),
    Case("flags", ("{python}", "-OO", "-W", "error", "-X", "utf8=0", "-u", "x.py"),
         {"x.py": "import sys, warnings\nprint(sys.flags)\nwarnings.warn('no')"}),  # fmt: skip
    Case("shell", ("sh", "-c", '"{python}" x.py one; echo "status $?"'), {"x.py": "raise SystemExit(9)"}),
    Case("not-python", ("sh", "-c", "echo hello; exit 4")),
    Case("missing-script", ("{python}", "no-such.py")),
    Case("missing-module", ("{python}", "-m", "no_such_module")),
    # -- how it leaves ----------------------------------------------------------------------------------
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
    script("sigint", "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)", soak=False),
    script("sigint-caught", "import os, signal\ntry:\n    os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt:\n    print('ok')"),
    script("abort", "import os\nos.abort()"),
    script("atexit", "import atexit\natexit.register(print, 'bye')\natexit.register(print, 'first')"),
    script("atexit-raises", "import atexit\natexit.register(int, 'x')"),
    script("thread", "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print('t'))).start()"),
    script("closed-stderr", "import sys\nsys.stderr.close()\nprint('still here')"),
    script("closed-stdout", "import sys, os\nos.close(1)\n"),
    # -- what it may see of its interpreter -------------------------------------------------------------
    script("modules", "import sys\nprint(sorted(m for m in sys.modules if not m.startswith(('gradwatch', 'sitecustomize'))))"),
    script("settings", "import sys, signal, logging, warnings, threading\n"
           "print(sys.excepthook is sys.__excepthook__, signal.getsignal(2), signal.getsignal(15), warnings.filters,"
           " logging.root.handlers, threading.active_count())"),  # fmt: skip
    script("input", "print(input() + input())", stdin="one\ntwo\n"),
    Case("shadowing", ("{python}", "x.py"),
         {"x.py": "import random, dataclasses\nprint(random.MINE, dataclasses.MINE)",
          "random.py": "MINE = 1", "dataclasses.py": "MINE = 2"}),  # fmt: skip
    Case("sitecustomize", ("{python}", "x.py"),
         {"x.py": "import sitecustomize\nprint(sitecustomize.__file__, sitecustomize.MINE)",
          "site/sitecustomize.py": ONLY_FOR_X + "    print('user sitecustomize')\nMINE = 1"},
         environ={"PYTHONPATH": "{cwd}/site"}, soak=False),  # fmt: skip
    Case("sitecustomize-raises", ("{python}", "x.py"),
         {"x.py": "print('on')", "site/sitecustomize.py": ONLY_FOR_X + "    1 / 0"}, environ={"PYTHONPATH": "{cwd}/site"}),  # fmt: skip
    Case("sitecustomize-import-error", ("{python}", "x.py"),
         {"x.py": "print('on')", "site/sitecustomize.py": ONLY_FOR_X + "    import no_such"},
         environ={"PYTHONPATH": "{cwd}/site"}),  # fmt: skip
    # -- processes of its own ---------------------------------------------------------------------------
    script("pickle-main", "import pickle\nclass A: pass\nprint(pickle.dumps(A()))\n"
           "import atexit; atexit.register(lambda: print(pickle.loads(pickle.dumps(A())).__class__))"),  # fmt: skip
    script("spawn", "import multiprocessing as mp, sys\ndef f(x): return x, sys.argv, sys.path\n"
           "if __name__ == '__main__':\n    print(mp.get_context('spawn').Pool(1).map(f, [1, 2]))", "a", soak=False),  # fmt: skip
    script("fork", "import os, sys\npid = os.fork()\nif pid == 0: sys.exit(4)\nprint(os.waitpid(pid, 0)[1])"),
    script("subprocess", "import subprocess, sys\n"
           "print(subprocess.run([sys.executable, '-c', 'import sys; print(sys.path); 1/0'], capture_output=True))"),  # fmt: skip
    # -- with a live watch ------------------------------------------------------------------------------
    script("train", TRAIN + "print(type(torch.__spec__.loader), vars(torch.__loader__).keys(), torch.rand(2))"),
    script("train-exit", TRAIN + "import sys; sys.exit(5)"),
    script("train-exception", TRAIN + "def f():\n    raise ValueError('user error')\nf()\n", soak=False),
    script("train-sigterm", TRAIN + "import os; print(end='', flush=True); os.kill(os.getpid(), 15)"),
    script("train-sigint", TRAIN + "import os, time; os.kill(os.getpid(), 2); time.sleep(5)"),
    script("train-os-exit", TRAIN + "import os; print(end='', flush=True); os._exit(3)"),
    Case("train-stdin", ("{python}", "-"), stdin=TRAIN),
    script("train-save", TRAIN + "import io, hashlib, copy\nb = io.BytesIO(); torch.save(copy.deepcopy(model), b)\n"
           "print(b'gradwatch' in b.getvalue(), type(model[0]))"),  # fmt: skip
    script("train-fork", TRAIN + "import os, sys\nprint(end='', flush=True)\npid = os.fork()\n"
           "if pid == 0:\n    sys.exit(6)\nprint(os.waitpid(pid, 0)[1])"),  # fmt: skip
    script("train-frozen-gc", TRAIN.replace("for _", "import gc; gc.freeze()\nfor _")),
    script("train-bare-tensors", "import torch\nw = torch.ones(3, requires_grad=True)\nopt = torch.optim.SGD([w], lr=.1)\n"
           "for _ in range(3): opt.zero_grad(); w.square().sum().backward(); opt.step()\nprint(w)"),  # fmt: skip
    script("train-closure", TRAIN + "o = torch.optim.LBFGS(model.parameters())\ndef c():\n    o.zero_grad()\n"
           "    l = model(torch.ones(2, 4)).square().mean()\n    l.backward()\n    return l\nprint(o.step(c))"),  # fmt: skip
    script("train-spawn", "import torch.multiprocessing as mp, sys\ndef f(rank):\n    exec(TRAIN); sys.stdout.flush()\n"
           f"TRAIN = {TRAIN!r}\nif __name__ == '__main__':\n    mp.spawn(f, nprocs=1)"),  # fmt: skip
    *(
        script(f"dataloader-{method}", "import torch\nfrom torch.utils.data import DataLoader\n"
               "if __name__ == '__main__':\n    " + TRAIN.replace("\n", "\n    ") + "\n    for x in DataLoader("
               f"list(range(8)), num_workers=2, multiprocessing_context='{method}'): print(x)")  # fmt: skip
        for method in ("fork", "spawn", "forkserver")
    ),
)  # fmt: skip
