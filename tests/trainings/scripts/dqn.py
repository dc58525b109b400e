"""PyTorch's DQN tutorial: a replay memory, a target network soft-updated after each step, clip by value."""

import random
from collections import deque, namedtuple

import torch
from digest import report
from torch import nn

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
random.seed(0)
torch.manual_seed(0)


def net():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))


policy_net, target_net = net(), net()
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
memory, steps, TAU = deque([], maxlen=100), 0, 0.05


def optimize_model():
    batch = Transition(*zip(*random.sample(memory, 8)))
    state, action, reward = (torch.cat(each) for each in (batch.state, batch.action, batch.reward))
    q = policy_net(state).gather(1, action)
    with torch.no_grad():
        target = reward + 0.9 * target_net(torch.cat(batch.next_state)).max(1).values
    loss = nn.SmoothL1Loss()(q, target.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    return loss.item()


state = torch.randn(1, 4)
for t in range(25):
    with torch.no_grad():
        greedy = policy_net(state).max(1).indices.view(1, 1)
    action = greedy if random.random() > 0.3 else torch.tensor([[random.randrange(2)]])
    next_state = torch.randn(1, 4)
    memory.append(Transition(state, action, next_state, torch.tensor([float(action.item())])))
    state = next_state
    if len(memory) >= 8:
        print(t, optimize_model())
        steps += 1
        target, policy = target_net.state_dict(), policy_net.state_dict()
        for key in policy:
            target[key] = policy[key] * TAU + target[key] * (1 - TAU)
        target_net.load_state_dict(target)
report(steps, policy_net, target_net)
