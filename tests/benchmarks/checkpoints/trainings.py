"""Small trainings that converge in a few hundred steps; each batch is drawn from its step's own seed.

B batch rows, T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import cross_entropy, mse_loss, smooth_l1_loss
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

Rng: TypeAlias = torch.Generator
Losses: TypeAlias = Callable[[nn.Module, Rng], Tensor]
Batch: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Training:
    """`score(model, rng)` is what a checkpoint is worth, smaller is better; by default the loss.

    A training has one optimizer per entry of `losses`: the parts of the model that it moves, and of what loss.
    """

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[list[nn.Parameter]], Optimizer]
    losses: Mapping[str, Losses]
    score: Losses
    steps: int = 300

    def built(self, seed: int) -> tuple[nn.Module, list[Optimizer]]:
        """The model as initialised, and its optimizers."""
        torch.manual_seed(seed)
        model = self.model()
        return model, self.optimizers(model)

    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        """New ones for these weights."""
        return [self.optimizer(list(model.get_submodule(part).parameters())) for part in self.losses]

    def scored(self, model: nn.Module) -> float:
        """The same held-out batches for every checkpoint."""
        model.eval()
        with torch.no_grad():
            found = [float(self.score(model, rng(-1 - k))) for k in range(4)]
        model.train()
        return sum(found) / len(found)


def rng(step: int) -> Rng:
    """The randomness of one step."""
    return torch.Generator().manual_seed(step + 1_000_003)


def _one(
    name: str,
    model: Callable[[], nn.Module],
    optimizer: Callable[[list[nn.Parameter]], Optimizer],
    draw: Callable[[Rng], Batch],
    loss: Callable[[Tensor, Tensor], Tensor] = mse_loss,
) -> Training:
    def losses(model: nn.Module, chance: Rng) -> Tensor:
        inputs, targets = draw(chance)
        return loss(model(inputs), targets)

    return Training(name, model, optimizer, {"": losses}, losses)


# -- data ------------------------------------------------------------------------------------------------


def _waves(chance: Rng) -> Batch:
    inputs = torch.randn(64, 16, generator=chance)
    return inputs, (inputs[:, :8].sin() * inputs[:, 8:]).sum(1, keepdim=True) / 2


def _prices(chance: Rng) -> Batch:
    """Targets that are not normalised: their mean is 100."""
    inputs, targets = _waves(chance)
    return inputs, 100 + 10 * targets


def _images(chance: Rng) -> Batch:
    """Stripes of one of four directions and their noise."""
    kinds = torch.randint(0, 4, (48,), generator=chance)
    rows, columns = torch.meshgrid(torch.arange(10.0), torch.arange(10.0), indexing="ij")
    planes = torch.stack([rows, columns, rows + columns, rows - columns]).sin()
    return (planes[kinds] + torch.randn(48, 10, 10, generator=chance))[:, None], kinds


def _tokens(chance: Rng) -> Batch:
    """Sequences in which each token follows from the two before it."""
    found = [torch.randint(0, 16, (24,), generator=chance) for _ in range(2)]
    for _ in range(15):
        found.append((found[-1] + 3 * found[-2] + 1) % 16)
    ids = torch.stack(found, 1)
    return ids[:, :-1], ids[:, 1:]


def _series(chance: Rng) -> Batch:
    inputs = torch.randn(32, 16, 4, generator=chance)
    return inputs, inputs[:, :, 0].cumsum(1)[:, -1:] / 4 + inputs[:, -4, 1:2]


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits[:, 4:].flatten(0, 1), targets[:, 4:].flatten())


# -- models ----------------------------------------------------------------------------------------------


def _mlp(width: int = 64, depth: int = 3) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(16, width), nn.ReLU()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 16, 3, stride=2), nn.BatchNorm2d(16),
        nn.ReLU(), nn.Flatten(), nn.Linear(144, 4),
    )  # fmt: skip


class Transformer(nn.Module):
    """Two layers, causal, learned positions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, width), nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 16)
        self.register_buffer("mask", torch.full((16, 16), float("-inf")).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.layers(self.tokens(ids) + self.positions, self.mask)
        logits: Tensor = self.head(hidden)
        return logits


class Recurrent(nn.Module):
    """A relu RNN or an LSTM with a head on its last state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cells = (
            nn.RNN(4, 48, nonlinearity="relu", batch_first=True)
            if kind == "rnn"
            else nn.LSTM(4, 48, batch_first=True)
        )
        self.head = nn.Linear(48, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(self.cells(inputs)[0][:, -1])
        return found


class Vae(nn.Module):
    """Its loss is summed over pixels and rows, as in the paper's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 16))
        self.out = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 100))

    def loss(self, chance: Rng) -> Tensor:
        pixels = _images(chance)[0].flatten(1)
        mean, log_variance = self.into(pixels).chunk(2, 1)
        noise = torch.randn(mean.shape, generator=chance)
        again = self.out(mean + noise * (log_variance / 2).exp())
        distance = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return (again - pixels).square().sum() + distance


def _vae_loss(model: nn.Module, chance: Rng) -> Tensor:
    assert isinstance(model, Vae)
    return model.loss(chance)


class Gan(nn.Module):
    """A ring of eight points in the plane; worth: how far generated points lie from the nearest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
        self.d = nn.Sequential(
            nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1)
        )

    @staticmethod
    def ring() -> Tensor:
        """The eight points."""
        angles = torch.arange(8) * (torch.pi / 4)
        return 2 * torch.stack([angles.cos(), angles.sin()], 1)

    def made(self, chance: Rng) -> Tensor:
        """Generated points."""
        points: Tensor = self.g(torch.randn(64, 4, generator=chance))
        return points


def _d_loss(model: nn.Module, chance: Rng) -> Tensor:
    assert isinstance(model, Gan)
    kinds = torch.randint(0, 8, (64,), generator=chance)
    real = Gan.ring()[kinds] + 0.05 * torch.randn(64, 2, generator=chance)
    true, false = model.d(real), model.d(model.made(chance).detach())
    return bce(true, torch.ones_like(true)) + bce(false, torch.zeros_like(false))


def _g_loss(model: nn.Module, chance: Rng) -> Tensor:
    assert isinstance(model, Gan)
    false = model.d(model.made(chance))
    return bce(false, torch.ones_like(false))


def _g_score(model: nn.Module, chance: Rng) -> Tensor:
    """Mean distance from each point made to the ring and from the ring to the points made."""
    assert isinstance(model, Gan)
    distances = torch.cdist(model.made(chance), Gan.ring())
    return distances.min(1).values.mean() + distances.min(0).values.mean()


class Policy(nn.Module):
    """Eight contexts, eight actions: REINFORCE with rewards of very different size, no baseline."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, contexts: Tensor) -> Tensor:
        logits: Tensor = self.net(contexts)
        return logits


def _reinforce(model: nn.Module, chance: Rng) -> Tensor:
    contexts = torch.randint(0, 8, (16,), generator=chance)
    logits = model(torch.eye(8)[contexts])
    chosen = torch.multinomial(logits.softmax(1).detach(), 1, generator=chance)[:, 0]
    rare = torch.rand(16, generator=chance) < 0.002
    reward = (chosen == (contexts * 3) % 8).float() * torch.where(rare, 1_000.0, 1.0)
    return -(logits.log_softmax(1)[torch.arange(16), chosen] * reward).mean()


def _missed(model: nn.Module, chance: Rng) -> Tensor:
    contexts = torch.arange(8)
    return 1 - model(torch.eye(8)).softmax(1)[contexts, (contexts * 3) % 8].mean()


class Lora(nn.Module):
    """A frozen layer and an adapter whose second factor starts at zero."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(16, rank) / 4), nn.Parameter(torch.zeros(rank, 64))

    def forward(self, inputs: Tensor) -> Tensor:
        into, relu, out = self.frozen
        found: Tensor = out(relu(into(inputs) + inputs @ self.a @ self.b))
        return found


class Embedded(nn.Module):
    """Rows of which few are touched by a batch; starts tiny, as in word2vec."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(400, 16), nn.Embedding(400, 16)
        nn.init.uniform_(self.left.weight, -1 / 32, 1 / 32)
        nn.init.zeros_(self.right.weight)

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.left(pairs[:, 0]) * self.right(pairs[:, 1])).sum(1)


def _pairs(chance: Rng) -> Batch:
    left = (torch.rand(512, generator=chance).square() * 400).long()
    near = torch.rand(512, generator=chance) < 0.5
    right = torch.where(near, (left + 1) % 400, torch.randint(0, 400, (512,), generator=chance))
    return torch.stack([left, right], 1), near.float()


def _tiny_init() -> nn.Module:
    model = _mlp(48, 4)
    for param in model.parameters():
        param.data.mul_(0.1 if param.ndim > 1 else 0.0)
    return model


def _residual() -> nn.Module:
    """The last layer of every branch starts at zero."""

    class Branch(nn.Sequential):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs + super().forward(inputs)

    branches = [Branch(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4)]
    for branch in branches:
        nn.init.zeros_(branch[2].weight)
        nn.init.zeros_(branch[2].bias)
    return nn.Sequential(nn.Linear(16, 32), *branches, nn.LayerNorm(32), nn.Linear(32, 1))


MLP = _one("mlp-sgd", _mlp, lambda p: SGD(p, 0.05, momentum=0.9), _waves)
MLP_ADAM = _one("mlp-adam", _mlp, lambda p: Adam(p, 3e-3), _waves)
CNN = _one(
    "cnn-bn-sgd", _cnn, lambda p: SGD(p, 0.05, momentum=0.9, weight_decay=5e-4), _images, cross_entropy
)
CNN_ADAM = _one("cnn-bn-adam", _cnn, lambda p: Adam(p, 2e-3), _images, cross_entropy)
TRANSFORMER = _one("transformer-adam", Transformer, lambda p: Adam(p, 3e-3), _tokens, _token_loss)
TRANSFORMER_W = _one(
    "transformer-adamw", Transformer, lambda p: AdamW(p, 2e-3, weight_decay=0.1), _tokens, _token_loss
)
RNN = _one("rnn-sgd", lambda: Recurrent("rnn"), lambda p: SGD(p, 0.01), _series)
LSTM = _one("lstm-rmsprop", lambda: Recurrent("lstm"), lambda p: RMSprop(p, 3e-3), _series)
VAE = Training("vae-adam", Vae, lambda p: Adam(p, 2e-3), {"": _vae_loss}, _vae_loss)
VAE_SGD = Training("vae-sgd", Vae, lambda p: SGD(p, 1e-5, momentum=0.9), {"": _vae_loss}, _vae_loss)
GAN = Training(
    "gan", Gan, lambda p: Adam(p, 1e-3, betas=(0.5, 0.999)), {"d": _d_loss, "g": _g_loss}, _g_score, 600
)
REINFORCE = Training("reinforce", Policy, lambda p: Adam(p, 1e-2), {"": _reinforce}, _missed)
LORA = _one("lora", Lora, lambda p: Adam(p, 1e-2), _waves)
LORA_SGD = _one("lora-sgd", lambda: Lora(4), lambda p: SGD(p, 0.1, momentum=0.9), _waves)
EMBEDDINGS = _one("embeddings", Embedded, lambda p: Adam(p, 2e-2), _pairs, bce)
EMBEDDINGS_SGD = _one("embeddings-sgd", Embedded, lambda p: SGD(p, 20.0), _pairs, bce)
TINY = _one("tiny-init", _tiny_init, lambda p: Adam(p, 5e-3), _waves)
TINY_SGD = _one("tiny-init-sgd", _tiny_init, lambda p: SGD(p, 0.1, momentum=0.9), _waves)
RESIDUAL = _one("zero-residual", _residual, lambda p: AdamW(p, 3e-3), _waves)
PRICES = _one("mlp-prices", _mlp, lambda p: Adam(p, 1e-2), _prices, smooth_l1_loss)
PRICES_SGD = _one("mlp-prices-sgd", _mlp, lambda p: SGD(p, 0.02), _prices, smooth_l1_loss)
DECAYED = _one("mlp-decay", _mlp, lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.02), _waves)
