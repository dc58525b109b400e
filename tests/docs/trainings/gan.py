"""A GAN with two optimizers. Its second block is faded out, where it was meant to be faded in."""

import torch
from torch import nn


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.coarse, self.fine = nn.Linear(4, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 2)

    def forward(self, noise, alpha):
        hidden = torch.relu(self.coarse(noise))
        return self.out(hidden + alpha * torch.relu(self.fine(hidden)))


torch.manual_seed(0)
generator = Generator()
discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
criterion, ones, zeros = nn.BCEWithLogitsLoss(), torch.ones(64, 1), torch.zeros(64, 1)
for step in range(260):
    alpha = max(1 - step / 150, 1e-9)
    fake = generator(torch.randn(64, 4), alpha)
    loss_d = criterion(discriminator(torch.randn(64, 2)), ones) + criterion(
        discriminator(fake.detach()), zeros
    )
    optimizer_d.zero_grad()
    loss_d.backward()
    optimizer_d.step()
    loss_g = criterion(discriminator(fake), ones)
    optimizer_g.zero_grad()
    loss_g.backward()
    optimizer_g.step()
    if step % 50 == 0:
        print(f"step {step} discriminator {loss_d.item():.3f} generator {loss_g.item():.3f}")
