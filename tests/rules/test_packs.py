"""The shipped packs: each is silent on a healthy run of its kind, and speaks where that kind goes wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradwatch
from gradwatch.cli import preflight
from gradwatch.records.record import Record
from gradwatch.rules.files import load_rules
from gradwatch.rules.packs import pack_names
from tests.benchmarks.rescue.trainings import TRAININGS, loss_of
from tests.support.kept import Kept

PROFILES = {"llm-pretrain", "moe", "rl-gan", "finetune"}


@dataclass
class Job:
    """One training loop: `step(k)` takes one step, all optimizers of it."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[int], None]


def gpt(break_at: int | None = None) -> Job:
    """A character GPT with warm-up; broken: one loss a thousandfold."""
    plan = TRAININGS["gpt"]
    torch.manual_seed(0)
    model = plan.model()
    optimizer = plan.optimizer(model)

    def step(k: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate(k)
        optimizer.zero_grad()
        (loss_of(model, plan.batch(0, k)) * (1000 if k == break_at else 1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Job([model], [optimizer], step)


class Mixture(nn.Module):
    """Top-1 routing among a few experts; an expert that is not chosen is not in the graph."""

    def __init__(self, count: int = 6, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.head = nn.Linear(width, 4)
        self.closed = False  # the router has collapsed onto the first expert
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.embed(x))
        scores = self.router(h)
        weights = scores.softmax(-1)
        noisy = (scores + torch.randn(scores.shape)).argmax(-1)  # as in Shazeer et al. 2017
        chosen = torch.zeros_like(noisy) if self.closed else noisy
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero(as_tuple=True)[0]
            if len(rows):
                made = functional.relu(expert(h[rows])) * weights[rows, number, None]
                out = out.index_put((rows,), made)
        # The balancing loss of the Switch Transformer (Fedus et al. 2021): without it experts starve in earnest.
        shares = functional.one_hot(chosen, len(self.experts)).float().mean(0)
        self.balance = len(self.experts) * (shares * weights.mean(0)).sum()
        logits: Tensor = self.head(h + out)
        return logits


def mixture(break_at: int | None = None) -> Job:
    """A mixture of experts; broken: the router collapses."""
    torch.manual_seed(0)
    model = Mixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    chance, centres = torch.Generator().manual_seed(1), torch.randn(4, 16)

    def step(k: int) -> None:
        model.closed = break_at is not None and k >= break_at
        classes = torch.randint(0, 4, (24,), generator=chance)
        inputs = centres[classes] + 1.5 * torch.randn(24, 16, generator=chance)
        optimizer.zero_grad()
        (functional.cross_entropy(model(inputs), classes) + 0.1 * model.balance).backward()
        optimizer.step()

    return Job([model], [optimizer], step)


def _perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def gan(break_at: int | None = None) -> Job:
    """Eight points on a circle, two optimizers in turns; broken: the generator's gradients are not finite."""
    torch.manual_seed(0)
    generator, critic = _perceptron(8, 48, 48, 2), _perceptron(2, 48, 48, 1)
    first = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    second = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
    chance = torch.Generator().manual_seed(1)

    def step(k: int) -> None:
        angle = torch.randint(0, 8, (64,), generator=chance) * (math.pi / 4)
        real = 2 * torch.stack([angle.cos(), angle.sin()], -1) + 0.05 * torch.randn(64, 2, generator=chance)
        fake = generator(torch.randn(64, 8, generator=chance))
        second.zero_grad()
        (functional.softplus(-critic(real)) + functional.softplus(critic(fake.detach()))).mean().backward()  # type: ignore[no-untyped-call]
        second.step()
        first.zero_grad()
        (functional.softplus(-critic(fake)).mean() * (math.nan if k == break_at else 1)).backward()  # type: ignore[no-untyped-call]
        first.step()

    return Job([generator, critic], [first, second], step)


def policy_gradient(break_at: int | None = None) -> Job:
    """REINFORCE on a bandit whose rewards differ by orders of magnitude; broken: one reward is NaN."""
    torch.manual_seed(0)
    model = _perceptron(6, 32, 32, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    chance, payoff = torch.Generator().manual_seed(2), torch.randn(6, 3)

    def step(k: int) -> None:
        states = torch.randint(0, 6, (16,), generator=chance)
        chances = functional.log_softmax(model(functional.one_hot(states, 6).float()), -1)
        actions = torch.multinomial(chances.detach().exp(), 1, generator=chance).squeeze(-1)
        rewards = payoff[states, actions] * torch.randn(16, generator=chance).exp()
        rewards = rewards - rewards.mean() + (math.nan if k == break_at else 0)
        optimizer.zero_grad()
        (-(chances.gather(1, actions[:, None]).squeeze(1) * rewards).mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Job([model], [optimizer], step)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter whose second half starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.lora_B(self.lora_A(x))
        return out


def adapters(break_at: int | None = None) -> Job:
    """A frozen backbone with adapters, one layer tuned whole, a new head; broken: the rate is a hundredfold."""
    torch.manual_seed(0)
    body = _perceptron(64, 64, 64, 64)
    tuned = nn.Linear(64, 64)
    model = nn.Sequential(*(Adapted(one) if isinstance(one, nn.Linear) else one for one in body), tuned)
    model.add_module("head", nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    plan = TRAININGS["mlp"]

    def step(k: int) -> None:
        optimizer.param_groups[0]["lr"] = 3e-4 * (100 if break_at is not None and k >= break_at else 1)
        optimizer.zero_grad()
        loss_of(model, plan.batch(0, k)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Job([model], [optimizer], step)


def images(break_at: int | None = None, fault: str = "NaN") -> Job:
    """A small convolutional net with batch norm and dropout; broken: one image is NaN, or a bias falls to -100."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(8 * 36, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 5)),
    )
    optimizer, centres = torch.optim.Adam(model.parameters(), 1e-3), torch.randn(5, 1, 12, 12)

    def step(k: int) -> None:
        classes = torch.randint(0, 5, (32,))
        batch = centres[classes] + torch.randn(32, 1, 12, 12)
        if k == break_at and fault == "NaN":
            batch[0] = math.nan
        if k == break_at and fault == "bias":
            nn.init.constant_(model[5].bias, -100.0)
        optimizer.zero_grad()
        functional.cross_entropy(model(batch), classes).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Job([model], [optimizer], step)


JOBS: dict[str, tuple[str, Callable[[int | None], Job], str]] = {
    "gpt": ("llm-pretrain", gpt, "total-norm-spike-severe"),
    "mixture": ("moe", mixture, "expert-starved"),
    "gan": ("rl-gan", gan, "non-finite"),
    "policy gradient": ("rl-gan", policy_gradient, "non-finite"),
    "adapters": ("finetune", adapters, "update-too-big"),
    "images": ("activations", images, "running-statistics-broken"),
    "dead images": ("activations", lambda at: images(at, "bias"), "dead-activations"),
}


HEALTHY = 130
"""Steps before a run goes wrong."""


@dataclass
class Ran:
    """What a job was told while it went well, and, in the same run where that can be, while it did not."""

    kind: str
    healthy: list[Record]
    broken: list[Record]


def records_of(pack: str, job: Job, steps: int, path: Path) -> list[Record]:
    """The Records of so many steps."""
    sink = Kept()
    with gradwatch.watch(
        job.models, job.optimizers, rules=pack, sinks=[sink], strict=True, run_dir=path
    ) as gw:
        for k in range(steps):
            job.step(k)
        assert gw.health.errors() == {}
    return sink.records


def test_every_profile_is_shipped() -> None:
    """The packs of the design are there by name, and each is a default pack with changes."""
    assert set(pack_names()) >= PROFILES | {"default", "observe-only", "clip-policies", "activations"}
    for name in PROFILES:
        rules = {rule.id for rule in load_rules(name).rules}
        assert rules >= {rule.id for rule in load_rules("default").rules}


@pytest.mark.parametrize("name", pack_names())
def test_a_pack_is_what_run_takes_it_for(name: str) -> None:
    """`gradwatch run` does not read a pack before it starts the script: nothing in it is refused, no sink is named."""
    assert preflight.load(name).sinks is None


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_rules_of_a_pack_are_optional(name: str) -> None:
    """A pack attaches to any model: whatever it names may be missing there."""
    pack = load_rules(name)
    assert all(rule.optional for rule in pack.rules)
    assert all(group.optional for group in pack.groups)
    model = nn.Linear(2, 2)
    gradwatch.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), rules=pack, sinks=[]).close()


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run of each kind, healthy for so long; where it goes wrong from the start on, another one that does."""
    pack, build, expected = JOBS[request.param]
    # A rate that is too high at step 50 is told within 20 steps.
    early = {
        "expert-starved": (20, 228),
        "update-too-big": (50, 70),
        "running-statistics-broken": (20, 32),
        "dead-activations": (20, 52),
    }.get(expected)
    path = tmp_path_factory.mktemp("runs")
    healthy = records_of(pack, build(None if early else HEALTHY), HEALTHY + (0 if early else 8), path)
    return Ran(
        request.param, healthy, records_of(pack, build(early[0]), early[1], path) if early else healthy
    )


def warnings_of(records: list[Record]) -> set[str]:
    """Rules above info that fired."""
    events = [event for record in records for event in record.verdict.events]
    return {event.rule for event in events if event.kind == "firing" and event.severity != "info"}


def test_a_healthy_run_of_its_kind_raises_no_warning(job: Ran) -> None:
    """Nothing above info fires, and no step is changed but by the cap that a pack announces."""
    records = [record for record in job.healthy if record.snapshot.step < HEALTHY]
    assert warnings_of(records) == set()
    assert not any(record.decision.skip for record in records)
    if load_rules(JOBS[job.kind][0]).clip is None:
        assert all((record.snapshot.coef == 1).all() for record in records)


def test_what_goes_wrong_in_its_kind_is_told(job: Ran) -> None:
    """The rule made for it fires; where it acts, the step is skipped or clipped."""
    expected = JOBS[job.kind][2]
    assert expected in warnings_of(job.broken)
    if expected == "non-finite":
        assert any(record.decision.skip for record in job.broken)
    if expected == "total-norm-spike-severe":
        record = next(one for one in job.broken if one.snapshot.step == HEALTHY)
        assert (record.snapshot.coef < 1e-2).all()
        assert record.snapshot.total_norm_applied <= 1.0 + 1e-5
