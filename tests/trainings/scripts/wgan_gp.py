"""WGAN-GP: a critic stepped three times as often, with a gradient penalty by autograd.grad(create_graph=True)."""

import torch
from digest import report
from torch import autograd, nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
opt_c = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.0, 0.9))
opt_g = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.0, 0.9))


def penalty(real, fake):
    eps = torch.rand(real.size(0), 1)
    mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
    (grads,) = autograd.grad(critic(mixed).sum(), mixed, create_graph=True, retain_graph=True)
    return ((grads.norm(2, dim=1) - 1) ** 2).mean()


steps = 0
for it in range(5):
    for p in critic.parameters():
        p.requires_grad = True
    for _ in range(3):
        real, noise = torch.randn(8, 2) + 3, torch.randn(8, 4)
        with torch.no_grad():
            fake = generator(noise)
        opt_c.zero_grad()
        loss_c = critic(fake).mean() - critic(real).mean() + 10 * penalty(real, fake)
        loss_c.backward()
        opt_c.step()
        steps += 1
    for p in critic.parameters():
        p.requires_grad = False
    opt_g.zero_grad()
    loss_g = -critic(generator(torch.randn(8, 4))).mean()
    loss_g.backward()
    opt_g.step()
    steps += 1
    print(it, loss_c.item(), loss_g.item())
report(steps, critic, generator)
