"""Errors of every kind, caught by the script, which prints their tracebacks and the warnings there were."""

import re
import sys
import traceback
import warnings
import torch
import torch.nn as nn
from digest import report

torch.manual_seed(0)
n = 0
m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(m.parameters(), 0.01)


def tell(f):
    try:
        f()
    except BaseException:
        print(re.sub("0x[0-9a-f]+", "0x", traceback.format_exc()))


def ok():
    global n
    opt.zero_grad()
    m(torch.randn(8, 4)).square().mean().backward()
    opt.step()
    n += 1


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        raise ValueError("mine")


def twice():
    loss = m(torch.randn(8, 4)).mean()
    loss.backward()
    loss.backward()


def inplace():
    y = m[0](torch.randn(8, 4)).exp()
    z = y.square().sum()
    y.add_(1)
    z.backward()


def in_module_hook():
    m[1].register_forward_hook(lambda *a: 1 / 0)
    m(torch.randn(2, 4))


def in_tensor_hook():
    m[0].weight.register_hook(lambda g: g.nope)
    m(torch.randn(2, 4)).mean().backward()


def anomaly():
    with torch.autograd.detect_anomaly(check_nan=True):
        (m(torch.zeros(2, 4)) * 0).sqrt().sum().backward()


def leave():
    sys.exit("bye")


for f in (
    lambda: m(torch.randn(2, 5)),
    lambda: m(torch.randn(2, 4)).backward(),
    twice,
    inplace,
    lambda: Bad.apply(m(torch.randn(2, 4))).sum().backward(),
    lambda: torch.optim.SGD([], 0.1),
    lambda: torch.optim.SGD(m.parameters(), -1),
    lambda: torch.optim.SGD([m(torch.ones(2, 4))], 0.1),
    lambda: opt.add_param_group({"params": m.parameters()}),
    lambda: nn.utils.clip_grad_norm_(m.parameters(), 1.0, norm_type="x"),
    lambda: opt.load_state_dict({}),
    lambda: m.load_state_dict({}),
    leave,
    lambda: torch.autograd.grad(m(torch.ones(2, 4)).sum(), torch.ones(1, requires_grad=True)),
):
    ok()
    tell(f)
with warnings.catch_warnings(record=True) as w:
    warnings.simplefilter("always")
    tell(anomaly)
    s = torch.optim.lr_scheduler.StepLR(opt, 1)
    s.step()
    ok()
    s.step()
    m.register_full_backward_hook(lambda *a: None)
    m(torch.randn(2, 4)).sum().backward()
    m.register_full_backward_pre_hook(lambda *a: None)
    for x in w:
        print(x.category.__name__, str(x.message)[:3000], x.filename, x.lineno)
tell(in_module_hook)
m[1]._forward_hooks.clear()
tell(in_tensor_hook)
m[0].weight._backward_hooks.clear()
ok()
report(n, m)
