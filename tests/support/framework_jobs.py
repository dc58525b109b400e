"""One small training in each framework, as its users write it: accumulation 2, clipping, a partial last window.

Nine batches an epoch make windows of 2, 2, 2, 2 and 1; two epochs make ten optimizer steps. Nothing here
imports gradwatch: run as a script (`python framework_jobs.py FRAMEWORK`) each job is what `gradwatch run`
watches unmodified, and prints the SHA-256 of the weights it ends with. Called from a test, `watched` is where
an integration comes in: a list of callbacks, or what is wrapped around the loop.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

BATCH, BATCHES, EPOCHS, ACCUMULATE = 2, 9, 2, 2
MAX_NORM = 0.25
LR = 0.05
Around = Callable[..., AbstractContextManager[Any]]


class Net(nn.Module):
    """6 → 5 → 1 with a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 5)
        self.out = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        prediction: torch.Tensor = self.out(torch.tanh(self.hidden(x)))
        return prediction


def examples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input [6], target [1]) pairs, in the order they are trained on."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(BATCH * BATCHES, 6, generator=generator)
    targets = 3 * torch.randn(BATCH * BATCHES, 1, generator=generator)
    return list(zip(inputs, targets, strict=True))


def network() -> Net:
    """The network before its first step."""
    torch.manual_seed(0)
    return Net()


def loader() -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    """The examples in batches."""
    return DataLoader(examples(), batch_size=BATCH)  # type: ignore[arg-type]


def squared_error(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean over a batch."""
    loss: torch.Tensor = (model(x) - y).square().mean()
    return loss


def lightning(watched: Any = (), package: str = "lightning.pytorch", **options: Any) -> nn.Module:
    """`Trainer.fit` with automatic optimization; Lightning steps on the last, partial window by itself."""
    from importlib import import_module

    pl = import_module(package)

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return squared_error(self.net, *batch)

        def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return squared_error(self.net, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=LR)

    settings = {"max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": MAX_NORM}
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    checkpoints = {"enable_checkpointing": False}
    trainer = pl.Trainer(
        **{**settings, **quiet, **checkpoints, **options}, accelerator="cpu", callbacks=list(watched)
    )
    module = Module()
    trainer.fit(module, loader(), loader())
    return module.net


def pytorch_lightning(watched: Any = (), **options: Any) -> nn.Module:
    """The same under Lightning's other package name."""
    return lightning(watched, "pytorch_lightning", **options)


def transformers(watched: Any = (), folder: str = "out", resume: Any = None, **options: Any) -> nn.Module:
    """`Trainer.train`; the Trainer divides a window's loss by the number of batches it really has."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": squared_error(self.net, x, y)}

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    settings = {
        "output_dir": folder,
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "max_grad_norm": MAX_NORM,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "weight_decay": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "epoch",
        "remove_unused_columns": False,
    }
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    model = Model()
    rows = [{"x": x, "y": y} for x, y in examples()]
    trainer = InOrder(
        model=model,
        args=TrainingArguments(**{**settings, **quiet, **options}),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=list(watched),
    )
    trainer.train(resume_from_checkpoint=resume)
    return model.net


def accelerate(watched: Around = lambda *prepared: nullcontext()) -> nn.Module:
    """A loop of one's own around `accumulate`, `backward` and `clip_grad_norm_`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    net = network()
    model, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=LR), loader())
    with watched(accelerator, model, optimizer):
        for _ in range(EPOCHS):
            for x, y in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(squared_error(model, x, y))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                    optimizer.step()
                    optimizer.zero_grad()
    return net


def ignite(watched: Around = lambda *parts: nullcontext()) -> nn.Module:
    """An Engine whose step accumulates, clips, and steps on the last batch of an epoch."""
    from ignite.engine import Engine

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step(engine: Engine, batch: Any) -> float:
        model.train()
        place = (engine.state.iteration - 1) % BATCHES + 1
        loss = squared_error(model, *batch)
        (loss / ACCUMULATE).backward()
        if place % ACCUMULATE == 0 or place == BATCHES:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    engine = Engine(step)
    with watched(engine, model, optimizer):
        engine.run(loader(), max_epochs=EPOCHS)
    return model


JOBS: dict[str, Callable[..., nn.Module]] = {
    "lightning": lightning,
    "pytorch_lightning": pytorch_lightning,
    "transformers": transformers,
    "accelerate": accelerate,
    "ignite": ignite,
}


def digest(model: nn.Module) -> str:
    """SHA-256 of all weights."""
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("weights", digest(JOBS[sys.argv[1]]()))
