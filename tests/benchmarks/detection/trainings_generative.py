"""Trainings that make data: adversarial, variational, diffusion, flows."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, AdamW, RMSprop

from tests.benchmarks.detection.data import draw_digits
from tests.benchmarks.detection.models import mlp
from tests.benchmarks.detection.training import Batch, Phase, Training, single


def _ring(random: torch.Generator, rows: int) -> Tensor:
    """Points around eight centres on a circle."""
    angle = torch.randint(8, (rows,), generator=random) * (math.pi / 4)
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(rows, 2, generator=random)


def gan_ring(seed: int) -> Training:
    """A GAN as in the DCGAN example: two optimizers, Adam with a first beta of 0.5."""
    generator, discriminator = mlp(8, 48, 48, 2), mlp(2, 48, 48, 1, activation=nn.Tanh)
    model = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    random = torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        return _ring(random, 64), torch.randn(64, 8, generator=random)

    def of_discriminator(batch: Batch) -> Tensor:
        real, fake = discriminator(batch[0]), discriminator(generator(batch[1]).detach())
        return functional.softplus(-real).mean() + functional.softplus(fake).mean()

    def of_generator(batch: Batch) -> Tensor:
        return functional.softplus(-discriminator(generator(batch[1]))).mean()

    phases = [
        Phase(Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)), of_discriminator),
        Phase(Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999)), of_generator),
    ]
    return Training(model, phases, batch)


def wgan(seed: int) -> Training:
    """A Wasserstein GAN on digits with a gradient penalty, which backward goes through twice."""
    generator, critic = mlp(8, 64, 64), mlp(64, 64, 64, 1, activation=nn.SiLU)
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    random = torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        images, _ = draw_digits(random, 32)
        noise, mix = torch.randn(32, 8, generator=random), torch.rand(32, 1, generator=random)
        return images.flatten(1), noise, mix

    def of_critic(batch: Batch) -> Tensor:
        real, noise, mix = batch
        fake = generator(noise).detach()
        between = (mix * real + (1 - mix) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        out: Tensor = critic(fake).mean() - critic(real).mean() + 10 * penalty
        return out

    def of_generator(batch: Batch) -> Tensor:
        out: Tensor = -critic(generator(batch[1])).mean()
        return out

    phases = [
        Phase(Adam(critic.parameters(), lr=5e-4, betas=(0.0, 0.9)), of_critic),
        Phase(Adam(generator.parameters(), lr=5e-4, betas=(0.0, 0.9)), of_generator),
    ]
    return Training(model, phases, batch)


def vae_summed(seed: int) -> Training:
    """The VAE example of PyTorch: binary cross-entropy and KL summed over the batch, so norms are in the thousands."""
    model = nn.ModuleDict({"encoder": mlp(64, 64, 16), "decoder": mlp(8, 64, 64)})
    random = torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        images, _ = draw_digits(random, 128)
        return (images.flatten(1).sigmoid(), torch.randn(128, 8, generator=random))

    def loss(batch: Batch) -> Tensor:
        images, noise = batch
        mean, log_variance = model["encoder"](images).chunk(2, 1)
        made = model["decoder"](mean + (log_variance / 2).exp() * noise)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        return functional.binary_cross_entropy_with_logits(made, images, reduction="sum") + divergence

    return single(model, Adam(model.parameters(), lr=1e-3), loss, batch)


def autoencoder_summed(seed: int) -> Training:
    """A denoising autoencoder with convolutions, its squared error summed over the batch."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 2, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 2, stride=2),
    )
    random = torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        images, _ = draw_digits(random, 64)
        return images + 0.5 * torch.randn(images.shape, generator=random), images

    def loss(batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1], reduction="sum")

    return single(model, RMSprop(model.parameters(), lr=1e-3), loss, batch)


def diffusion(seed: int) -> Training:
    """A denoising diffusion model of 50 steps, which has to predict the noise."""
    model = mlp(64 + 16, 128, 128, 64, activation=nn.SiLU)
    random = torch.Generator().manual_seed(seed)
    kept = torch.cumprod(1 - torch.linspace(1e-3, 0.1, 50), 0)
    waves = torch.exp(torch.linspace(0, -4, 8))

    def batch(step: int) -> Batch:
        images, _ = draw_digits(random, 64)
        times = torch.randint(50, (64,), generator=random)
        return images.flatten(1), times, torch.randn(64, 64, generator=random)

    def loss(batch: Batch) -> Tensor:
        images, times, noise = batch
        angles = times[:, None] * waves
        share = kept[times][:, None]
        noisy = share.sqrt() * images + (1 - share).sqrt() * noise
        return functional.mse_loss(model(torch.cat([noisy, angles.sin(), angles.cos()], 1)), noise)

    return single(model, AdamW(model.parameters(), lr=1e-3), loss, batch)


def flow(seed: int) -> Training:
    """A normalising flow of four affine couplings on the ring."""
    layers = nn.ModuleList(mlp(1, 32, 32, 2, activation=nn.Tanh) for _ in range(4))
    random = torch.Generator().manual_seed(seed)

    def loss(batch: Batch) -> Tensor:
        (x,) = batch
        total = torch.zeros(len(x))
        for layer in layers:
            kept, moved = x[:, :1], x[:, 1:]
            scale, shift = layer(kept).chunk(2, 1)
            scale = 2 * torch.tanh(scale)
            x = torch.cat([moved * scale.exp() + shift, kept], 1)
            total = total + scale.squeeze(1)
        return (0.5 * (x**2).sum(1) - total).mean()

    training = single(
        layers, Adam(layers.parameters(), lr=1e-3), loss, lambda step: (_ring(random, 128) / 2,)
    )
    training.max_norm = 5.0
    return training
