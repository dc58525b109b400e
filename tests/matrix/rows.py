"""The single-process rows: every situation of training that this package has met, each a loop of its own."""

from __future__ import annotations

import copy
import io
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from tests.matrix.measure import STEPS, Loop, Row
from tests.matrix.probe import Expected, data, net, sgd
from tests.odd_models.changes import Adapted
from tests.odd_models.graphs import NoGradient
from tests.support.zoo import Call

Change = Callable[[nn.Module, Optimizer], Optimizer | None]


INDUCTOR = "inductor" if shutil.which("g++") else "aot_eager"


def usual(
    loop: Loop,
    model: nn.Module,
    loss: Callable[[], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    clip: bool = True,
    changes: dict[int, Change] | None = None,
) -> None:
    """One backward, clipping, one step; `changes` happen at the head of a step and may give a new optimizer."""
    optimizer = optimizer or sgd(model)
    probe = loop.watch(model, optimizers=[optimizer])
    loss = loss or (lambda: model(data()).pow(2).sum())
    for number in range(STEPS):
        change = (changes or {}).get(number)
        optimizer = (change(model, optimizer) if change else None) or optimizer
        model.zero_grad()
        optimizer.zero_grad()
        probe.backward(loss())
        probe.step(optimizer, clip)


def changing(*changes: Change) -> Callable[[Loop], None]:
    """The usual loop, changed before steps 8, 9, …: by then the loop is learned and the marks are thinned."""
    return lambda loop: usual(loop, net(), changes=dict(enumerate(changes, start=8)))


def accumulation(set_to_none: bool) -> Callable[[Loop], None]:
    def run(loop: Loop) -> None:
        model = net()
        optimizer = sgd(model)
        probe = loop.watch(model, optimizers=[optimizer])
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            for _ in range(3):
                probe.backward(model(data()).pow(2).sum())
            probe.step(optimizer)

    return run


def tied_and_reused(loop: Loop) -> None:
    model = Call(lambda m, x: m.head(m.body(m.body(m.embed(x)))), embed=nn.Embedding(9, 6), body=net(),
                 head=nn.Linear(6, 9, bias=False))  # fmt: skip
    model.head.weight = model.embed.weight
    usual(loop, model, lambda: model(torch.randint(0, 9, (4,))).pow(2).sum())


def unfreeze(model: nn.Module, optimizer: Optimizer) -> None:
    model[2].requires_grad_(True)  # type: ignore[index, operator]


def frozen(loop: Loop) -> None:
    model = net()
    model[2].requires_grad_(False)
    usual(loop, model, changes={8: unfreeze})


def unused(loop: Loop) -> None:
    model = Call(lambda m, x: m.used(x), used=net(), unused=nn.Linear(6, 6))
    usual(loop, model)


def through_half(model: nn.Module, optimizer: Optimizer) -> None:
    model.half().float()


def data_assigned(model: nn.Module, optimizer: Optimizer) -> None:
    for param in model.parameters():
        param.data = param.data.clone() * 0.9


def assigned(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return sgd(model)


def replaced(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    model[4].weight = nn.Parameter(model[4].weight.detach().clone())  # type: ignore[index, union-attr, operator]
    return sgd(model)


def emptied(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    state = copy.deepcopy(model.state_dict())
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    return sgd(model)


def overwritten(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model.to(torch.bfloat16).to(torch.float32)
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    return sgd(model)


def swapped(model: nn.Module, optimizer: Optimizer) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    optimizer.zero_grad()
    model.to(torch.float64).to(torch.float32)
    torch.__future__.set_swap_module_params_on_conversion(False)


def lora(model: nn.Module, optimizer: Optimizer) -> None:
    model[2] = Adapted(model[2])  # type: ignore[index, operator]
    optimizer.add_param_group({"params": [*model[2].down.parameters(), *model[2].up.parameters()]})  # type: ignore[index, operator]


def lazy(loop: Loop) -> None:
    model = nn.Sequential(nn.LazyLinear(6), *net())
    model(data())
    usual(loop, model)


def lazy_after_attach(loop: Loop) -> None:
    model = nn.Sequential(nn.LazyLinear(6), *net())
    probe = loop.watch(model)
    model(data())
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        probe.backward(model(data()).pow(2).sum())
        probe.step(optimizer)


def gradient_penalty(loop: Loop) -> None:
    model = net()

    def loss() -> Tensor:
        x = data().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.norm() + model(x).sum()

    usual(loop, model, loss)


def retained_twice(loop: Loop) -> None:
    model = net()
    optimizer = sgd(model)
    probe = loop.watch(model, optimizers=[optimizer])
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(data()).pow(2).sum()
        probe.backward(loss, retain_graph=True)
        probe.backward(loss)
        probe.step(optimizer)


def create_graph(loop: Loop) -> None:
    model = net()
    optimizer = sgd(model)
    probe = loop.watch(model, optimizers=[optimizer])
    for _ in range(STEPS):
        optimizer.zero_grad()
        probe.backward(model(data()).pow(3).sum(), create_graph=True)
        probe.step(optimizer)


def closures(make: Callable[..., Optimizer]) -> Callable[[Loop], None]:
    def run(loop: Loop) -> None:
        model = net()
        optimizer = make(model.parameters(), lr=0.01)
        probe = loop.watch(model, optimizers=[optimizer])
        for _ in range(STEPS):
            x, first = data(), [True]

            def closure(x: Tensor = x, first: list[bool] = first) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(x).pow(2).sum()
                probe.backward(loss)
                if first.pop() if first else False:
                    probe.note(optimizer)  # the Snapshot of a step is its first gradient's
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
            probe.discard()

    return run


def checkpointed(reentrant: bool) -> Callable[[Loop], None]:
    def run(loop: Loop) -> None:
        model = net()
        usual(
            loop,
            model,
            lambda: checkpoint(model, data().requires_grad_(), use_reentrant=reentrant).pow(2).sum(),
        )

    return run


def compiled(backend: str) -> Callable[[Loop], None]:
    def run(loop: Loop) -> None:
        model = net(layers=17)
        fast = torch.compile(model, backend=backend, fullgraph=True)
        usual(loop, model, lambda: fast(data()).pow(2).sum())

    return run


def attached_after_compiling(loop: Loop) -> None:
    model = net()
    fast = torch.compile(model, backend="aot_eager")
    fast(data()).sum().backward()
    model.zero_grad()
    usual(loop, model, lambda: fast(data()).pow(2).sum())


def compiled_autograd(clip: bool) -> Callable[[Loop], None]:
    def run(loop: Loop) -> None:
        model = net(layers=2)  # every backward is traced anew: a minute with a large one
        optimizer = sgd(model)
        probe = loop.watch(model, optimizers=[optimizer])
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(data()).pow(2).sum()
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
                probe.backward(loss)
            probe.step(optimizer, clip)

    return run


def compiled_step(loop: Loop) -> None:
    model = net()
    optimizer = sgd(model)
    probe = loop.watch(model, optimizers=[optimizer])
    take = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(STEPS):
        optimizer.zero_grad()
        probe.backward(model(data()).pow(2).sum())
        probe.clip(optimizer)
        probe.note(optimizer)
        take()


def scaled(fused: bool, overflow: int = -1) -> Callable[[Loop], None]:
    """A GradScaler: the scale is not in the norms, and a rejected step is no step."""

    def run(loop: Loop) -> None:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        probe = loop.watch(model, optimizers=[optimizer])
        for number in range(STEPS):
            optimizer.zero_grad()
            loss = model(data()).pow(2).sum() * (float("inf") if number == overflow else 1.0)
            probe.scale = scaler.get_scale() if number else 1024.0
            probe.backward(scaler.scale(loss))
            if number == overflow:
                probe.discard()
            else:
                scaler.unscale_(optimizer)
                probe.clip(optimizer)
                probe.note(optimizer)
            scaler.step(optimizer)
            scaler.update()

    return run


def autocast(loop: Loop) -> None:
    model = net()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(data()).float().pow(2).sum()  # type: ignore[no-any-return]

    usual(loop, model, loss)


def of_dtype(dtype: torch.dtype) -> Callable[[Loop], None]:
    def run(loop: Loop) -> None:
        model = net().to(dtype)
        usual(loop, model, lambda: model(data().to(dtype)).float().pow(2).sum())

    return run


def complex_parameters(loop: Loop) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(5, dtype=torch.complex64)) for _ in range(34)])
    usual(loop, model, lambda: sum((p * data(5)).abs().sum() for p in model))  # type: ignore[arg-type, return-value]


def sparse(loop: Loop) -> None:
    model = Call(lambda m, x: m.body(m.embed(x)), embed=nn.Embedding(9, 6, sparse=True), body=net())
    usual(loop, model, lambda: model(torch.randint(0, 9, (6,))).pow(2).sum(), clip=False)


def returning_none(loop: Loop) -> None:
    model = Call(lambda m, x: NoGradient.apply(m.body(x), m.other.weight), body=net(), other=nn.Linear(6, 6))
    usual(loop, model)


def functional(loop: Loop) -> None:
    model = net()
    usual(
        loop,
        model,
        lambda: functional_call(model, dict(model.named_parameters()), (data(),)).pow(2).sum(),
    )


def transforms_beside(loop: Loop) -> None:
    """torch.func.grad and autograd.grad (batched too) are no backward of this step: nothing of them is counted."""
    model = net()

    def loss() -> Tensor:
        x = data().requires_grad_()
        torch.func.grad(lambda params: functional_call(model, params, (x,)).sum())(
            dict(model.named_parameters())
        )
        rows = torch.eye(6)
        torch.autograd.grad(model(x)[0], list(model.parameters()), rows, is_grads_batched=True)
        return model(x).pow(2).sum()  # type: ignore[no-any-return]

    usual(loop, model, loss)


def two_optimizers(loop: Loop) -> None:
    maker, critic = net(), Call(lambda m, x: m.layer(x), layer=nn.Linear(6, 1))
    of_maker, of_critic = sgd(maker), sgd(critic)
    probe = loop.watch(maker, critic, optimizers=[of_maker, of_critic])
    for _ in range(STEPS):
        of_critic.zero_grad()
        probe.backward(critic(maker(data()).detach()).pow(2).sum())
        probe.step(of_critic)
        of_maker.zero_grad()
        of_critic.zero_grad()
        probe.backward(critic(maker(data())).sum())
        probe.step(of_maker)
        of_critic.zero_grad()
        probe.discard(local=False)  # the critic's tensor hooks hear the generator's backward, too


def in_backward(loop: Loop) -> None:
    model = net()
    probe = loop.watch(model)
    own = {name: sgd([param]) for name, param in model.named_parameters()}
    seen: dict[str, float] = {}

    def at_once(name: str) -> Callable[[Tensor], None]:
        def step(param: Tensor) -> None:
            assert param.grad is not None
            seen[name] = float(param.grad.double().norm())
            own[name].step()
            own[name].zero_grad()

        return step

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(at_once(name))
    for _ in range(STEPS):
        model(data()).pow(2).sum().backward()
        probe.expected.append(Expected(dict(seen), dict(seen), dict(seen)))


def recurrent_and_attention(loop: Loop) -> None:
    model = Call(lambda m, x: m.attend(*[m.rnn(m.body(x))[0]] * 3)[0], body=net(), rnn=nn.LSTM(6, 6, 2),
                 attend=nn.MultiheadAttention(6, 2))  # fmt: skip
    usual(loop, model, lambda: model(data(3, 2, 6)).pow(2).sum())


def in_place(loop: Loop) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        out = m.body(x)
        out += x
        return m.act(out).add(1).mul_(2)  # type: ignore[no-any-return]

    usual(loop, Call(forward, body=net()[:-1], act=nn.ReLU(inplace=True)))


class Structured(nn.Module):
    """Dict outputs, keyword-only inputs, a ModuleList, and `.forward()` called directly."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([net(9), net(9)])

    def forward(self, *, inputs: Tensor) -> dict[str, list[Tensor]]:
        return {"out": [part.forward(inputs) for part in self.parts]}


def structured(loop: Loop) -> None:
    model = Structured()
    usual(loop, model, lambda: sum(model(inputs=data())["out"]).pow(2).sum())  # type: ignore[arg-type, union-attr]


def data_parallel(loop: Loop) -> None:
    model = net()
    around = nn.DataParallel(model)
    usual(loop, model, lambda: around(data()).pow(2).sum())


def raising(loop: Loop) -> None:
    model = net()
    optimizer = sgd(model)
    probe = loop.watch(model, optimizers=[optimizer])
    for number in range(STEPS):
        optimizer.zero_grad()
        if number in (3, 10):
            handle = model[6].weight.register_hook(lambda grad: 1 / 0)  # type: ignore[union-attr, operator]
            try:
                model(data()).sum().backward()
            except ZeroDivisionError:
                handle.remove()
                optimizer.zero_grad()
        probe.backward(model(data()).pow(2).sum())
        probe.step(optimizer)


def copied(model: nn.Module, optimizer: Optimizer) -> None:
    """Copies and pickles train on their own; nothing of them is counted."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        other = sgd(twin)
        twin(data()).sum().backward()
        other.step()


ROWS: tuple[Row, ...] = (
    Row("plain eager, `clip_grad_norm_` before the step", lambda loop: usual(loop, net())),
    Row("no clipping", lambda loop: usual(loop, net(), clip=False)),
    Row("accumulation over 3 micro-batches", accumulation(True)),
    Row("the same with `zero_grad(set_to_none=False)`", accumulation(False)),
    Row("tied and reused parameters", tied_and_reused),
    Row("frozen, then unfrozen", frozen),
    Row("unused parameter", unused),
    Row("`.half().float()`, `param.data = …`", changing(through_half, data_assigned)),
    Row("`load_state_dict(assign=True)`, new optimizer", changing(assigned)),
    Row("parameter replaced, new optimizer", changing(replaced)),
    Row("`to_empty`, new optimizer", changing(emptied)),
    Row("`.to()` that overwrites parameters, new optimizer", changing(overwritten)),
    Row("`.to()` that swaps tensors", changing(swapped)),
    Row("LoRA adapters added, `add_param_group`", changing(lora)),
    Row("lazy modules", lazy),
    Row("lazy modules, watched before their first forward", lazy_after_attach),
    Row("gradient penalty (`autograd.grad(create_graph=True)`)", gradient_penalty),
    Row("`backward(retain_graph=True)`, then again", retained_twice),
    Row("`backward(create_graph=True)`", create_graph),
    Row("`step(closure)`", closures(torch.optim.SGD)),
    Row("LBFGS", closures(torch.optim.LBFGS), note="the first gradient of each step"),
    Row("checkpoint, non-reentrant", checkpointed(False)),
    Row("checkpoint, reentrant", checkpointed(True)),
    Row("torch.compile, aot_eager", compiled("aot_eager")),
    Row("torch.compile, inductor (aot_eager where there is no C++ compiler)", compiled(INDUCTOR)),
    Row("attached after the first compiled call", attached_after_compiling),
    Row(
        "compiled autograd", compiled_autograd(False), (("norm_local", "absent"),),
        "tensor hooks would break its graph",
    ),
    Row(
        "compiled autograd and clipping", compiled_autograd(True),
        (("norm", "provisional"), ("norm_local", "provisional"), ("total_norm", "provisional")),
        "read after clipping, and says so",
    ),
    Row("compiled `optimizer.step`", compiled_step),
    Row("GradScaler, unscaled and clipped", scaled(False)),
    Row("the same, fused", scaled(True)),
    Row("GradScaler, an overflow step", scaled(False, overflow=6), note="the rejected step is a Snapshot that says so"),
    Row("bf16 autocast", autocast),
    Row("bf16 parameters", of_dtype(torch.bfloat16)),
    Row("float64 parameters", of_dtype(torch.float64)),
    Row("complex parameters", complex_parameters),
    Row("sparse embedding", sparse),
    Row("custom Function that returns None", returning_none),
    Row("`functional_call`", functional),
    Row("`torch.func.grad`, `autograd.grad(is_grads_batched=True)` beside it", transforms_beside),
    Row("two optimizers, as in a GAN", two_optimizers),
    Row(
        "optimizers that step inside backward", in_backward,
        note="one Snapshot per backward, observed only; clipping inside the hook is not seen",
    ),
    Row("LSTM, MultiheadAttention", recurrent_and_attention),
    Row("in-place operations on outputs", in_place),
    Row("dict outputs, keywords only, ModuleList, `.forward()` directly", structured),
    Row("DataParallel without a GPU", data_parallel),
    Row("a backward that raises, retried", raising),
    Row("deepcopy and pickle of the watched model", changing(copied)),
)  # fmt: skip
