"""pytorch/examples reinforcement_learning/actor_critic.py: two heads, losses stacked, clip; two shared optimizers."""

import torch
import torch.nn.functional as F
from digest import report
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(3, 16)
        self.action_head = nn.Linear(16, 2)
        self.value_head = nn.Linear(16, 1)

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


model = Policy()
actor = torch.optim.Adam([*model.affine1.parameters(), *model.action_head.parameters()], lr=3e-3)
critic = torch.optim.RMSprop(model.value_head.parameters(), lr=3e-3)
steps = 0
for episode in range(10):
    saved, rewards = [], []
    state = torch.randn(3)
    for _ in range(6):
        probs, value = model(state)
        m = Categorical(probs)
        action = m.sample()
        saved.append((m.log_prob(action), value))
        rewards.append(float(action.item() == int(state.sum() > 0)))
        state = torch.randn(3)
    R, policy_losses, value_losses = 0.0, [], []
    for (log_prob, value), r in zip(reversed(saved), reversed(rewards)):
        R = r + 0.9 * R
        policy_losses.append(-log_prob * (R - value.item()))
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
    actor.zero_grad()
    critic.zero_grad()
    torch.stack(policy_losses).sum().backward(retain_graph=True)
    torch.stack(value_losses).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    actor.step()
    critic.step()
    steps += 2
    print(episode, sum(rewards))
report(steps, model)
