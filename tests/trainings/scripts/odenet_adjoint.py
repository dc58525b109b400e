"""A neural ODE trained `--adjoint` as torchdiffeq does: a Module made per forward, the gradient by an adjoint solve."""

import torch
from digest import report
from torch import nn


class OdeintAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, func, y0, dt, *params):
        ctx.func, ctx.dt = func, dt
        with torch.no_grad():
            ys = [y0]
            for _ in range(4):
                ys.append(ys[-1] + dt * func(ys[-1]))
        ctx.save_for_backward(*ys, *params)
        return ys[-1]

    @staticmethod
    def backward(ctx, grad):
        ys, params = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        grads = [torch.zeros_like(p) for p in params]
        for y in reversed(ys[:-1]):
            with torch.enable_grad():
                y = y.detach().requires_grad_(True)
                f = ctx.func(y)
            vjp = torch.autograd.grad(f, (y, *params), grad * ctx.dt, allow_unused=True)
            grad = grad + vjp[0]
            grads = [g if v is None else g + v for g, v in zip(grads, vjp[1:])]
        return (None, grad, None, *grads)


class PerturbFunc(nn.Module):
    def __init__(self, base_func):
        super().__init__()
        self.base_func = base_func

    def forward(self, y):
        return self.base_func(y)


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, y):
        return self.net(y**3)


torch.manual_seed(0)
func = ODEFunc()
optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-3)
for itr in range(15):
    optimizer.zero_grad()
    y0 = torch.randn(8, 2)
    wrapped = PerturbFunc(func)
    pred = OdeintAdjoint.apply(wrapped, y0, 0.1, *wrapped.parameters())
    loss = (pred - y0 * 0.5).abs().mean()
    loss.backward()
    optimizer.step()
    if itr % 5 == 0:
        print(f"Iter {itr:04d} | Total Loss {loss.item():.6f}")
report(15, func)
