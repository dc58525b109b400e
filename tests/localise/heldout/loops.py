"""Held-out cases: loops that are not one forward, one backward, one step; and loss functions outside of the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.localise.heldout.case import LOSS, STEPS, T, Watch, batches, case, zero_row


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(self.drop(x))
        length = h.square().sum(-1, keepdim=True)
        return h * length.pow(-0.5)  # FAULT


class Mlp(nn.Module):
    def __init__(self, out: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@case(module="", op="pow", where=Embedder)
def triplets_through_one_root(watch: Watch) -> None:
    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters())
    watch(model, optimizer)
    for step, x in batches():
        positive = x + 0.1
        negative = -x
        if step == T:
            zero_row(positive)
        a, p, n = model(x), model(positive), model(negative)
        loss = functional.triplet_margin_loss(a, p, n)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@case(module="spread", op="sqrt")
def discriminator_of_a_gan(watch: Watch) -> None:
    class Spread(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            variance = (h - h[:1]).square().mean(0)
            spread = variance.sqrt().mean()  # FAULT
            return torch.cat([h, spread.expand(len(h), 1)], 1)

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.spread, self.out = nn.Linear(6, 4), Spread(), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.spread(self.fc(x)))

    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6))

        def forward(self, z: Tensor) -> Tensor:
            return self.net(z)

    critic, generator = Critic(), Generator()
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=1e-3)
    watch([critic, generator], [critic_optimizer, generator_optimizer])
    for step, real in batches():
        z = torch.zeros(8, 2) if step == T else torch.randn(8, 2)  # mode collapse: every sample alike
        fake = generator(z)
        critic_optimizer.zero_grad()
        loss = functional.softplus(critic(fake.detach())).mean() + functional.softplus(-critic(real)).mean()
        loss.backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        functional.softplus(-critic(torch.randn(8, 6) + generator(torch.randn(8, 2)))).mean().backward()
        generator_optimizer.step()


@case(module="", op="pow", where=Embedder)
def third_of_four_micro_batches(watch: Watch) -> None:
    model = Embedder()
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer)
    for step, x in batches(shape=(32, 6)):
        for micro, part in enumerate(x.chunk(4)):
            if step == T and micro == 2:
                zero_row(part)
            (model(part).sum() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(module="", op="pow", where=Embedder)
def evaluation_between_forward_and_backward(watch: Watch) -> None:
    model = Embedder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    held_out = torch.randn(4, 6)
    for _, x in batches(zero_row):
        loss = model(x).sum()
        model.eval()
        with torch.no_grad():
            model(held_out)
        model.train()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@case(module="", op="pow", where=Embedder)
def evaluation_between_backward_and_step(watch: Watch) -> None:
    model = Embedder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    held_out = torch.randn(4, 6)
    for _, x in batches(zero_row):
        optimizer.zero_grad()
        model(x).sum().backward()
        model.eval()
        with torch.no_grad():
            model(held_out)
        model.train()
        optimizer.step()


@case(module="", op="pow", where=Embedder)
def two_backwards_of_two_losses(watch: Watch) -> None:
    model = Embedder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for _, x in batches(zero_row):
        optimizer.zero_grad()
        out = model(x)
        out.sum().backward(retain_graph=True)
        out.square().mean().backward()
        optimizer.step()


@case(module="", op="pow", where=Embedder)
def autocast_around_the_model(watch: Watch) -> None:
    model = Embedder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for _, x in batches(zero_row):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().sum().backward()
        optimizer.step()


@case(module="", op="pow", where=Embedder)
def submodules_called_by_the_loop(watch: Watch) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(6, 6, bias=False)
            self.decoder = nn.Linear(6, 1)

    pair, embed = Pair(), Embedder()
    optimizer = torch.optim.SGD([*pair.parameters(), *embed.parameters()], lr=1e-3)
    watch([pair, embed], optimizer)
    for _, x in batches(zero_row):
        optimizer.zero_grad()
        h = pair.encoder(x)
        out = embed(h).sum(-1)
        (out + pair.decoder(h).sum(-1)).sum().backward()
        optimizer.step()


@case(module="", op="pow", where=Embedder)
def gradient_clipped_by_the_loop(watch: Watch) -> None:
    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    watch(model, optimizer)
    for _, x in batches(zero_row):
        optimizer.zero_grad()
        functional.smooth_l1_loss(model(x), x[:, :4]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@case(module=(LOSS, "BinaryFocal", "criterion"), op="pow")
def loss_module_outside(watch: Watch) -> None:
    class BinaryFocal(nn.Module):
        def forward(self, logits: Tensor, y: Tensor) -> Tensor:
            p = torch.sigmoid(logits)
            hard = (1 - p).pow(0.5)  # FAULT
            return (hard * functional.binary_cross_entropy_with_logits(logits, y, reduction="none")).mean()

    model, criterion = Mlp(), BinaryFocal()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for step, x in batches():
        if step == T:
            with torch.no_grad():
                model.head.bias += 1000
        optimizer.zero_grad()
        criterion(model(x), torch.ones(8, 1)).backward()
        optimizer.step()


@case(
    module=(LOSS, "CrossEntropyLoss", "criterion"),
    op="cross_entropy cross_entropy_loss nll_loss nll_loss_forward nll_loss_nd",
)
def cross_entropy_outside_with_no_target(watch: Watch) -> None:
    model, criterion = Mlp(3), nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 1.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for step, x in batches():
        y = torch.zeros(8, dtype=torch.long) if step == T else torch.arange(8) % 3
        optimizer.zero_grad()
        loss = criterion(model(x), y)  # FAULT
        loss.backward()
        optimizer.step()


@case(module=LOSS, op="log")
def cross_entropy_by_hand_of_saturated_sigmoids(watch: Watch) -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for step, x in batches():
        if step == T:
            with torch.no_grad():
                model.head.bias += 1000
        y = (x[:, :1] > 0).float()
        p = torch.sigmoid(model(x))
        loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # FAULT
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@case(module=LOSS, op="sqrt")
def root_mean_square_of_a_perfect_fit(watch: Watch) -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for step, x in batches():
        out = model(x)
        y = out.detach() if step == T else x[:, :1]
        mse = (out - y).square().mean()
        loss = torch.sqrt(mse)  # FAULT
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@case(module=LOSS, op="div true_divide")
def loss_over_no_valid_element(watch: Watch) -> None:
    def masked_mse(out: Tensor, y: Tensor, valid: Tensor) -> Tensor:
        error = (out - y).square() * valid
        return error.sum() / valid.sum()  # FAULT

    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for step, x in batches():
        valid = torch.full((8, 1), float(step != T))
        optimizer.zero_grad()
        masked_mse(model(x), x[:, :1], valid).backward()
        optimizer.step()


@case(module=LOSS, op="div true_divide")
def loss_in_a_closure(watch: Watch) -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gw = watch(model, optimizer)
    for step, x in batches():

        def closure(step: int = step, x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            error = (model(x) - x[:, :1]).square().sum()
            loss = error / (0.0 if step == T else 8.0)  # FAULT
            loss.backward()
            return loss

        gw.step(closure)


@case(module="", op="pow", where=Embedder)
def model_in_a_closure(watch: Watch) -> None:
    model = Embedder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gw = watch(model, optimizer)
    for _, x in batches(zero_row):

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        gw.step(closure)


@case(module="", symptom="healthy")
def masks_of_minus_infinity_that_are_right(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
            scores = self.fc(x)[:, None, :].expand(-1, 6, -1).masked_fill(causal, float("-inf"))
            return scores.softmax(-1).log_softmax(-1).amax(-1)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for _, x in batches(steps=STEPS):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
