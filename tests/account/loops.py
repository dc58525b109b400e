"""Training loops that escape hooks in different ways, each a script that prints how many steps it really took.

`after` is run once the loop is over; every script ends with `real N`, N the times it moved the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

BEGIN = """
import copy, os, sys, threading
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
def loss_of(model=model):
    return model(torch.randn(5, 4)).square().mean()
def sgd(model=model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr)
real = 0
"""
PLAIN = """
for _ in range(8):
    opt.zero_grad()
    loss_of().backward()
    STEP
    real += 1
"""
DEFAULT_STEP = "opt.step()"


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop: `code` between BEGIN and the line that prints `real`; `how` it is started: a file, -c, or stdin.

    `seen` whether every step can be watched, so that nothing may be called missing but `provisional` steps, which are
    judged for NaN and Inf alone; `soak` not in every commit's gate.
    """

    name: str
    code: str
    seen: bool = False
    provisional: int = 0
    how: str = "file"
    soak: bool = True

    @property
    def script(self) -> str:
        """The whole of it."""
        return f"{BEGIN}{self.code}\nprint('real', real, flush=True)\n"


def plain(step: str, opt: str = "opt = sgd()") -> str:
    """The usual loop with another way of stepping."""
    return opt + PLAIN.replace("STEP", step)


NO_INIT = """
class Mine(torch.optim.Optimizer):
    def __init__(self, params):
        self.param_groups = [{"params": list(params), "lr": 0.05}]
    def zero_grad(self):
        for p in self.param_groups[0]["params"]: p.grad = None
    def step(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]: p -= 0.05 * p.grad
opt = Mine(model.parameters())
"""
FUNC = """
from torch.func import functional_call, grad
params = {n: p.detach() for n, p in model.named_parameters()}
x = torch.randn(5, 4)
for _ in range(8):
    g = grad(lambda p: functional_call(model, p, (x,)).square().mean())(params)
    params = {n: params[n] - 0.05 * g[n] for n in params}
    real += 1
"""
WITHOUT_OPTIMIZER = """
for _ in range(8):
    for p in model.parameters(): p.grad = None
    loss_of().backward()
    with torch.no_grad():
        for p in model.parameters(): UPDATE
    real += 1
"""
FUNCTIONAL_CALL = """
params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
for _ in range(8):
    torch.func.functional_call(model, params, (torch.randn(5, 4),)).square().mean().backward()
    params = {n: (p - 0.05 * p.grad).detach().requires_grad_() for n, p in params.items()}
    real += 1
"""
THREADS = """
def work():
    global real
    mine = copy.deepcopy(model)
    opt = sgd(mine)
    for _ in range(4):
        opt.zero_grad(); loss_of(mine).backward(); opt.step()
        with lock: real += 1
lock = threading.Lock()
threads = [threading.Thread(target=work) for _ in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
"""
FORKED = """
opt = sgd()
child = os.fork()
if child == 0:
    for _ in range(8):
        opt.zero_grad(); loss_of().backward(); opt.step()
    sys.exit(0)
os.waitpid(child, 0)
real = 8
"""
SPAWNED = """
import torch.multiprocessing as mp
def work(rank):
    opt = sgd()
    for _ in range(8):
        opt.zero_grad(); loss_of().backward(); opt.step()
if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
    real = 8
else:
    sys.stdout = open(os.devnull, "w")
"""
IN_BACKWARD = """
opts = {p: torch.optim.SGD([p], 0.05) for p in model.parameters()}
def stepped(p):
    opts[p].step(); opts[p].zero_grad()
for p in model.parameters(): p.register_post_accumulate_grad_hook(stepped)
for _ in range(8):
    loss_of().backward()
    real += len(opts)
"""
SCALER = """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 4)
opt = sgd()
for i in range(8):
    opt.zero_grad()
    scaler.scale(loss_of() * (float("inf") if i < 3 else 1.0)).backward()
    scaler.step(opt); scaler.update()
    real += i >= 3
"""
LAZY = """
opt = None
for _ in range(8):
    loss = loss_of()
    if opt is None: opt = sgd()
    opt.zero_grad(); loss.backward(); opt.step()
    real += 1
"""
REPLACED = """
for _ in range(4):
    opt = sgd()
    for _ in range(2):
        opt.zero_grad(); loss_of().backward(); opt.step()
        real += 1
"""
COMPILED = """
opt = sgd()
step = torch.compile(opt.step, backend="eager")
for _ in range(8):
    opt.zero_grad(); loss_of().backward(); step()
    real += 1
"""
LBFGS = """
opt = torch.optim.LBFGS(model.parameters(), max_iter=4)
def closure():
    opt.zero_grad(); loss = loss_of(); loss.backward(); return loss
for _ in range(4):
    opt.step(closure); real += 1
"""
CLOSURES = """
class Sam(torch.optim.SGD):
    def step(self, closure):
        closure(); closure()
        return super().step()
opt = Sam(model.parameters(), 0.05)
def closure():
    opt.zero_grad(); loss = loss_of(); loss.backward(); return loss
for _ in range(8):
    opt.step(closure); real += 1
"""
SUPER = """
class Twice(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)
opt = Twice(model.parameters(), 0.05)
"""
WRAPPED = """
class Ahead(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {}); self.inner = inner
    def step(self, closure=None):
        return self.inner.step(closure)
opt = Ahead(sgd())
"""
HALF_HIDDEN = """
opt = sgd()
for i in range(8):
    opt.zero_grad(); loss_of().backward()
    opt.step() if i % 2 else type(opt).step.__wrapped__(opt)
    real += 1
"""
LATE = """
opt = sgd()
opt.step.__wrapped__
for i in range(8):
    if i == 4: opt = torch.optim.Adam(model.parameters(), 1e-3)
    opt.zero_grad(); loss_of().backward(); opt.step()
    real += 1
"""
PARAM_GRAD_NONE = "for p in model.parameters(): p.grad = None"
REPLACED_PARAMETERS = """
for _ in range(8):
    loss_of().backward()
    for module in model:
        for name, p in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(p.detach() - 0.05 * p.grad))
    real += 1
"""
NEW_MODEL = """
for _ in range(8):
    loss_of(model).backward()
    new = copy.deepcopy(model)
    for p, q in zip(new.parameters(), model.parameters()): p.data, p.grad = q.data - 0.05 * q.grad, None
    model = new
    real += 1
"""
GENERATORS = """
def steps(mine, opt):
    while True:
        opt.zero_grad(); loss_of(mine).backward()
        yield 0
        opt.step()
        yield 1
models = [copy.deepcopy(model) for _ in range(3)]
trainings = [steps(each, sgd(each)) for each in models]
for _ in range(9):
    for each in trainings: real += next(each)
for each in trainings: each.close()
"""
ASYNCIO = """
import asyncio
async def train(mine, opt):
    global real
    for _ in range(4):
        opt.zero_grad(); loss = loss_of(mine); await asyncio.sleep(0); loss.backward(); await asyncio.sleep(0)
        opt.step(); real += 1; await asyncio.sleep(0)
models = [copy.deepcopy(model) for _ in range(3)]
async def together(): await asyncio.gather(*(train(each, sgd(each)) for each in models))
asyncio.run(together())
"""
STEPPER = """
import queue
opt, asked, taken = sgd(), queue.Queue(), queue.Queue()
def work():
    while asked.get():
        opt.step(); opt.zero_grad(); taken.put(1)
thread = threading.Thread(target=work); thread.start()
for _ in range(8):
    loss_of().backward(); asked.put(1); real += taken.get()
asked.put(0); thread.join()
"""
GROUPS = """
opt = torch.optim.SGD(model[0].parameters(), 0.05)
for i in range(12):
    if i == 3: opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
    if i == 6: opt.param_groups[0]["params"] = opt.param_groups[0]["params"][:1]
    if i == 9: opt.param_groups[1]["params"] = []
    model.zero_grad(); loss_of().backward(); opt.step()
    real += 1
"""
COPIED = """
import pickle
opt = torch.optim.Adam(model.parameters(), 0.01)
for i in range(9):
    if i == 3: model, opt = copy.deepcopy((model, opt))
    if i == 6: model, opt = pickle.loads(pickle.dumps((model, opt)))
    opt.zero_grad(); loss_of(model).backward(); opt.step()
    real += 1
"""
SET_GRADIENTS = """
opt = sgd()
for _ in range(8):
    for p, grad in zip(model.parameters(), torch.autograd.grad(loss_of(), list(model.parameters()))): p.grad = grad
    opt.step()
    real += 1
"""

LOOPS = (
    Loop("the usual one", plain(DEFAULT_STEP), seen=True, soak=False),
    Loop("step called on the class", plain("type(opt).step(opt)"), seen=True),
    Loop("step without torch's wrapper", plain("type(opt).step.__wrapped__(opt)"), soak=False),
    Loop("every second step without it", HALF_HIDDEN, soak=False),
    Loop("optimizer without super().__init__", NO_INIT + PLAIN.replace("STEP", DEFAULT_STEP)),
    Loop("optimizer that calls super().step", SUPER + PLAIN.replace("STEP", DEFAULT_STEP), seen=True),
    Loop("optimizer that wraps another", WRAPPED + PLAIN.replace("STEP", DEFAULT_STEP)),
    Loop("torch.func", FUNC, soak=False),
    Loop("SGD by hand", WITHOUT_OPTIMIZER.replace("UPDATE", "p -= 0.05 * p.grad"), soak=False),
    Loop(
        "SGD by hand on .data", WITHOUT_OPTIMIZER.replace("UPDATE", "p.data.add_(p.grad.data, alpha=-0.05)")
    ),
    Loop("functional_call with backward", FUNCTIONAL_CALL),
    Loop(
        "foreach by hand",
        WITHOUT_OPTIMIZER.replace(
            "for p in model.parameters(): UPDATE",
            "ps = list(model.parameters()); torch._foreach_add_(ps, [p.grad for p in ps], alpha=-0.05)",
        ),
    ),
    Loop("gradients set to None", plain(DEFAULT_STEP).replace("opt.zero_grad()", PARAM_GRAD_NONE), seen=True),
    Loop("two threads", THREADS),
    Loop("forked child", FORKED),
    Loop("spawned child", SPAWNED),
    Loop("optimizer inside the backward", IN_BACKWARD),
    Loop("GradScaler that rejects", SCALER, soak=False),
    Loop("optimizer made after the forward", LAZY, seen=True),
    Loop("a new optimizer every epoch", REPLACED, seen=True),
    Loop("code run by exec", "exec('''" + plain(DEFAULT_STEP) + "''')", seen=True),
    Loop("python -c", plain(DEFAULT_STEP), seen=True, how="-c"),
    Loop("a script on stdin", plain(DEFAULT_STEP), seen=True, how="stdin"),
    Loop("compiled step", COMPILED),
    Loop("LBFGS", LBFGS, seen=True),
    Loop("closures evaluated twice", CLOSURES),
    Loop("another optimizer half-way", LATE, seen=True),
    Loop("parameters replaced by hand", REPLACED_PARAMETERS),
    Loop("a new model each step", NEW_MODEL),
    Loop("generators that take turns", GENERATORS, seen=True),
    Loop("coroutines that take turns", ASYNCIO, seen=True),
    Loop("backward and step in two threads", STEPPER, seen=True),
    Loop("param groups edited", GROUPS, seen=True),
    Loop("copied and unpickled with its optimizer", COPIED, seen=True, provisional=2),
    Loop("gradients set from autograd.grad", SET_GRADIENTS, seen=True, provisional=2),
)
