"""Reinforcement learning, on a pole to balance and on a corridor to walk. N environments, T steps of each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Adam, RMSprop

from tests.benchmarks.detection.models import mlp
from tests.benchmarks.detection.training import Batch, Training, single


class Poles:
    """N carts that balance a pole each, as in Gym's CartPole; a fallen one is set up anew."""

    def __init__(self, count: int, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.state = self._fresh(count)

    def _fresh(self, count: int) -> Tensor:
        return 0.1 * torch.rand(count, 4, generator=self.random) - 0.05

    def act(self, right: Tensor) -> tuple[Tensor, Tensor]:
        """Push every cart to the right or left: rewards [N], and which fell."""
        place, speed, angle, turn = self.state.unbind(1)
        force = torch.where(right == 1, 10.0, -10.0)
        pull = (force + 0.05 * turn**2 * angle.sin()) / 1.1
        fall = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        push = pull - 0.05 * fall * angle.cos() / 1.1
        steps = torch.stack([speed, push, turn, fall], 1)
        self.state = torch.stack([place, speed, angle, turn], 1) + 0.02 * steps
        fell = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21)
        self.state = torch.where(fell[:, None], self._fresh(len(fell)), self.state)
        return torch.ones(len(fell)), fell


def _returns(rewards: Tensor, over: Tensor, last: Tensor, discount: float = 0.98) -> Tensor:
    """Discounted returns [T, N] with the value of the last states."""
    found = []
    for reward, end in zip(rewards.flip(0), over.flip(0), strict=True):
        last = reward + discount * last * (~end)
        found.append(last)
    return torch.stack(found[::-1])


def dqn(seed: int) -> Training:
    """Deep Q-learning with a replay memory and a target network that is copied every 100 steps."""
    model, target = mlp(4, 48, 48, 2), mlp(4, 48, 48, 2)
    target.load_state_dict(model.state_dict())
    poles, memory = Poles(4, seed), list[Batch]()
    random = poles.random

    def batch(step: int) -> Batch:
        for _ in range(1 if memory else 32):
            before, explore = poles.state, max(0.05, 1 - step / 400)
            with torch.no_grad():
                greedy = model(before).argmax(1)
            free = torch.rand(4, generator=random) < explore
            action = torch.where(free, torch.randint(2, (4,), generator=random), greedy)
            reward, fell = poles.act(action)
            memory.extend(zip(before, action, reward, poles.state, fell, strict=True))
        del memory[:-2000]
        rows = torch.randint(len(memory), (32,), generator=random).tolist()
        return tuple(torch.stack(parts) for parts in zip(*(memory[row] for row in rows), strict=True))

    def loss(batch: Batch) -> Tensor:
        before, action, reward, after, fell = batch
        with torch.no_grad():
            wanted = reward + 0.98 * target(after).max(1).values * (~fell)
        return functional.smooth_l1_loss(model(before).gather(1, action[:, None]).squeeze(1), wanted)

    def after(step: int) -> None:
        if step % 100 == 0:
            target.load_state_dict(model.state_dict())

    training = single(model, Adam(model.parameters(), lr=1e-3), loss, batch)
    training.after = after
    return training


def a2c(seed: int) -> Training:
    """Advantage actor-critic: eight environments, eight steps of each a batch, RMSprop."""
    model, poles = mlp(4, 48, 48, 3, activation=torch.nn.Tanh), Poles(8, seed)

    def batch(step: int) -> Batch:
        states, actions, rewards, over = [], [], [], []
        with torch.no_grad():
            for _ in range(8):
                states.append(poles.state)
                chances = model(poles.state)[:, :2].softmax(1)
                actions.append(torch.multinomial(chances, 1, generator=poles.random).squeeze(1))
                reward, fell = poles.act(actions[-1])
                rewards.append(reward)
                over.append(fell)
            returns = _returns(torch.stack(rewards), torch.stack(over), model(poles.state)[:, 2] * 10)
        return torch.cat(states), torch.cat(actions), returns.flatten() / 10

    def loss(batch: Batch) -> Tensor:
        states, actions, returns = batch
        out = model(states)
        value, chances = out[:, 2], out[:, :2].log_softmax(1)
        gain = (chances.gather(1, actions[:, None]).squeeze(1) * (returns - value.detach())).mean()
        entropy = -(chances.exp() * chances).sum(1).mean()
        return -gain + 0.5 * functional.mse_loss(value, returns) - 0.01 * entropy

    training = single(model, RMSprop(model.parameters(), lr=1e-3, alpha=0.99, eps=1e-5), loss, batch)
    training.max_norm = 0.5
    return training


def ppo(seed: int) -> Training:
    """Proximal policy optimisation: one rollout serves eight steps, so the same states come back."""
    model, poles = mlp(4, 48, 48, 3, activation=torch.nn.Tanh), Poles(8, seed)
    rollout: list[Batch] = []

    def collect() -> None:
        states, actions, chances, rewards, over = [], [], [], [], []
        with torch.no_grad():
            for _ in range(16):
                states.append(poles.state)
                logits = model(poles.state)[:, :2].log_softmax(1)
                actions.append(torch.multinomial(logits.exp(), 1, generator=poles.random))
                chances.append(logits.gather(1, actions[-1]).squeeze(1))
                reward, fell = poles.act(actions[-1].squeeze(1))
                rewards.append(reward)
                over.append(fell)
            returns = _returns(torch.stack(rewards), torch.stack(over), model(poles.state)[:, 2] * 10)
        parts = torch.cat(states), torch.cat(actions), torch.cat(chances), returns.flatten() / 10
        rollout[:] = [parts]

    def batch(step: int) -> Batch:
        if step % 8 == 0:
            collect()
        rows = torch.randperm(128, generator=poles.random)[:64]
        return tuple(part[rows] for part in rollout[0])

    def loss(batch: Batch) -> Tensor:
        states, actions, before, returns = batch
        out = model(states)
        value, logits = out[:, 2], out[:, :2].log_softmax(1)
        gain = returns - value.detach()
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        ratio = (logits.gather(1, actions).squeeze(1) - before).exp()
        clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return -clipped + 0.5 * functional.mse_loss(value, returns)

    training = single(model, Adam(model.parameters(), lr=1e-3), loss, batch)
    training.max_norm = 0.5
    return training


def reinforce_sparse(seed: int) -> Training:
    """REINFORCE on a corridor of eight places with a reward at its end alone: many batches have no gradient at all."""
    model, random = mlp(8, 32, 2), torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        place, reached = torch.zeros(8, dtype=torch.long), torch.zeros(8)
        places, actions = [], []
        with torch.no_grad():
            for _ in range(14):
                chances = model(functional.one_hot(place, 8).float()).softmax(1)
                action = torch.multinomial(chances, 1, generator=random).squeeze(1)
                places.append(place)
                actions.append(action)
                place = (place + 2 * action - 1).clamp(0, 7)
                reached = torch.maximum(reached, (place == 7).float())
        return torch.stack(places), torch.stack(actions), reached

    def loss(batch: Batch) -> Tensor:
        places, actions, reached = batch
        logits = model(functional.one_hot(places, 8).float()).log_softmax(2)
        taken = logits.gather(2, actions[..., None]).squeeze(2).sum(0)
        return -(taken * reached).mean()

    return single(model, Adam(model.parameters(), lr=3e-3), loss, batch)
