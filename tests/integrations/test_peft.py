"""Real LoRA adapters (peft on a Hugging Face GPT-2): added later, switched, merged; every norm against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.situations.laws import TOLERANCE, measure
from tests.situations.training import Training, turns

# peft and transformers deprecate names of each other's
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("libraries"),
]

CHANGE = 8


@pytest.fixture(scope="module")
def libraries() -> None:
    """What takes a second to import: not for all who collect this."""
    global CONFIG, GPT2Config, GPT2LMHeadModel, get_peft_model
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    CONFIG = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)


def gpt2(checkpointing: bool = False) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=31, n_positions=12)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def loss_of(model: Any) -> Tensor:
    tokens = torch.randint(0, 31, (2, 8))
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def trainable(model: nn.Module) -> Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.05)


def training_of(model: Any, change: Callable[[Any], Optimizer] | None = None, micros: int = 1) -> Training:
    """Train what is trainable; a change, when the loop is learned, gives a new optimizer."""

    def turn(training: Training, number: int) -> None:
        if change is not None and number == CHANGE:
            training.optimizers = [change(model)]
            training.optimizers[0].zero_grad()
        for _ in range(micros):
            training.loop.backward(loss_of(model))
        training.loop.step(training.optimizers[0])

    return turns(model, turn, trainable(model))


def lora(checkpointing: bool = False) -> Any:
    """A GPT-2 with adapters."""
    return get_peft_model(gpt2(checkpointing), CONFIG)


def adapted(model: Any) -> Optimizer:
    """LoRA layers are put into the watched model, everything else is frozen."""
    return trainable(get_peft_model(model, CONFIG))


def second_adapter(model: Any) -> Optimizer:
    """Another adapter is added and trained from now on; the first is frozen."""
    model.add_adapter("second", CONFIG)
    model.set_adapter("second")
    return trainable(model)


def unloaded(model: Any) -> Optimizer:
    """The adapter is merged into the weights and taken out; the weights are trained again."""
    model.merge_and_unload()
    for param in model.parameters():
        param.requires_grad_(True)
    return trainable(model)


RUNS: dict[str, Callable[[], Training]] = {
    "adapters from the start": lambda: training_of(lora()),
    "adapters added later": lambda: training_of(gpt2(), adapted),
    "a second adapter": lambda: training_of(lora(), second_adapter),
    "merged and unloaded": lambda: training_of(lora(), unloaded),
    "checkpointed": lambda: training_of(lora(True)),
    "accumulated": lambda: training_of(lora(), second_adapter, micros=2),
}


@pytest.mark.parametrize("name", RUNS)
def test_lora_adapters_are_measured_by_name(name: str) -> None:
    """Each adapter matrix under its own name, frozen weights absent, 1e-5 relative at every step; nothing lost."""
    result = measure(RUNS[name])
    assert result.worst == {number: pytest.approx(0, abs=TOLERANCE) for number in result.worst}
    assert result.provisional <= 2
