"""pytorch/examples reinforcement_learning/reinforce.py with a small chain instead of gym: one step an episode."""

from collections import deque

import torch
import torch.nn.functional as F
from digest import report
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(543)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 16)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(16, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.dropout(self.affine1(x)))), dim=1)


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
eps = torch.finfo(torch.float32).eps


def finish_episode():
    running, returns = 0, deque()
    for r in policy.rewards[::-1]:
        running = r + 0.99 * running
        returns.appendleft(running)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    loss = [-log_prob * R for log_prob, R in zip(policy.saved_log_probs, returns)]
    optimizer.zero_grad()
    loss = torch.cat(loss).sum()
    loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]
    return loss.item()


for episode in range(12):
    state, place = torch.zeros(4), 0
    for t in range(5 + episode):
        probs = policy(state.unsqueeze(0))
        m = Categorical(probs)
        action = m.sample()
        policy.saved_log_probs.append(m.log_prob(action))
        place += 1 if action.item() else -1
        policy.rewards.append(float(place > 0))
        state = F.one_hot(torch.tensor(place % 4), 4).float()
    print("Episode", episode, "loss", finish_episode())
report(12, policy)
