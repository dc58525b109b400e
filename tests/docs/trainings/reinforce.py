"""REINFORCE on a chain of places: one step an episode. In episode 150 the machine runs out of memory, and ends it."""

import os
import signal
import time

import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3)
for episode in range(300):
    place, chances, rewards = 4, [], []
    for _ in range(10):
        choice = Categorical(logits=policy(nn.functional.one_hot(torch.tensor(place), 8).float()))
        action = choice.sample()
        chances.append(choice.log_prob(action))
        place = min(max(place + 2 * int(action) - 1, 0), 7)
        rewards.append(float(place == 7))
    returns = torch.tensor([sum(rewards[n:]) for n in range(10)])
    loss = -(torch.stack(chances) * (returns - returns.mean())).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if episode % 50 == 0:
        print(f"episode {episode} reward {sum(rewards):.0f}", flush=True)
    if episode == 150:
        time.sleep(2.5)  # while it swaps
        os.kill(os.getpid(), signal.SIGKILL)
