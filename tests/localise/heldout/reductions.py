"""Held-out cases: reductions, normalisations, linear algebra and losses inside the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.localise.heldout.case import T, Watch, batches, case, fit, zero_row


@case(module="pool", op="div true_divide")
def masked_mean_of_nothing(watch: Watch) -> None:
    class MaskedMean(nn.Module):
        def forward(self, h: Tensor, mask: Tensor) -> Tensor:
            total = (h * mask[..., None]).sum(1)
            return total / mask.sum(1, keepdim=True)  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 4, batch_first=True)
            self.pool = MaskedMean()
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h, _ = self.rnn(x)
            return self.head(self.pool(h, (x[..., 0] != 0).float()))

    fit(watch, Net(), batches(zero_row, shape=(8, 5, 3)))


@case(module="stats", op="std")
def std_of_one_sample(watch: Watch) -> None:
    class Stats(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            spread = h.std(dim=0)  # FAULT
            return torch.cat([h.mean(0), spread])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)
            self.stats = Stats()

        def forward(self, x: Tensor) -> Tensor:
            return self.stats(self.fc(x))

    fit(watch, Net(), ((step, x[:1] if step == T else x) for step, x in batches()))


@case(module="", op="var")
def variance_over_one_frame(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x)
            energy = torch.var(h, dim=-1)  # FAULT
            return energy.log1p()

    frames = ((step, x[..., :1] if step == T else x) for step, x in batches(shape=(4, 3, 7)))
    fit(watch, Net(), frames)


@case(module="norm", op="div true_divide")
def layer_norm_by_hand_without_eps(watch: Watch) -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            centred = x - x.mean(-1, keepdim=True)
            return centred / x.std(-1, keepdim=True)  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4, bias=False)
            self.norm = Norm()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.fc(x))

    fit(watch, Net(), batches(zero_row))


@case(module="norm", op="layer_norm native_layer_norm")
def layer_norm_with_eps_zero(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4, bias=False)
            self.norm = nn.LayerNorm(4, eps=0.0)
            self.out = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            h = self.norm(h)  # FAULT
            return self.out(h)

    fit(watch, Net(), batches(zero_row))


@case(module="norm", op="rsqrt")
def batch_norm_by_hand_of_a_constant_batch(watch: Watch) -> None:
    class Norm(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            centred = h - h[:1]
            return centred * centred.square().mean(0).rsqrt()  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)
            self.norm = Norm()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.fc(x)).tanh()

    def spoil(x: Tensor) -> None:
        x[:] = 0.0

    fit(watch, Net(), batches(spoil))


@case(module="2", op="group_norm native_group_norm")
def group_norm_in_a_sequential(watch: Watch) -> None:
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x = x[:, None, None, :]
            return super().forward(x).flatten(1)  # FAULT

    net = Net(nn.Conv2d(1, 4, 1, bias=False), nn.Identity(), nn.GroupNorm(2, 4, eps=0.0), nn.ReLU())
    fit(watch, net, batches(zero_row))


@case(module="attn", op="softmax _softmax")
def softmax_fully_masked(watch: Watch) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)

        def forward(self, x: Tensor, pad: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(1, 2) / 2.0
            scores = scores.masked_fill(pad[:, None, :], float("-inf"))
            weights = functional.softmax(scores, dim=-1)  # FAULT
            return weights @ v

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attn(x, x[..., 0] == 0))

    fit(watch, Net(), batches(zero_row, shape=(4, 5, 4)))


@case(module="attn", op="softmax _softmax")
def multihead_attention_all_padding(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            pad = x[..., 0] == 0
            h, _ = self.attn(x, x, x, key_padding_mask=pad)  # FAULT
            return self.head(h)

    fit(watch, Net(), batches(zero_row, shape=(4, 5, 4)))


@case(module="partition", op="log")
def log_sum_exp_by_hand(watch: Watch) -> None:
    class Partition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.beta = nn.Parameter(torch.tensor(1.0))

        def forward(self, energy: Tensor, dead: Tensor) -> Tensor:
            weights = (energy.masked_fill(dead, float("-inf")) * self.beta).exp()
            z = weights.sum(-1)
            return z.log().clamp(min=-50.0)  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 5)
            self.partition = Partition()

        def forward(self, x: Tensor) -> Tensor:
            dead = (x == 0).all(-1, keepdim=True).expand(-1, 5)
            return self.partition(self.fc(x), dead)

    fit(watch, Net(), batches(zero_row))


@case(module="gauss", op="logdet slogdet linalg_slogdet _linalg_slogdet log")
def logdet_of_a_singular_matrix(watch: Watch) -> None:
    class Gaussian(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            gram = h.t() @ h
            return torch.logdet(gram)  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3, bias=False)
            self.gauss = Gaussian()

        def forward(self, x: Tensor) -> Tensor:
            return self.gauss(self.fc(x))

    def spoil(x: Tensor) -> None:
        x[:] = 0.0

    fit(watch, Net(), batches(spoil))


@case(module="pca", op="linalg_eigh _linalg_eigh")
def eigenvectors_of_equal_eigenvalues(watch: Watch) -> None:
    class Pca(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            h = x[:, :3] * self.scale
            cov = h.t() @ h + torch.eye(3)
            values, vectors = torch.linalg.eigh(cov)  # FAULT
            return vectors.abs() * values

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pca = Pca()

        def forward(self, x: Tensor) -> Tensor:
            return self.pca(x)

    def spoil(x: Tensor) -> None:
        x[:] = 0.0

    fit(watch, Net(), batches(spoil))


@case(module="match", op="cosine_similarity div true_divide")
def cosine_similarity_of_zeros(watch: Watch) -> None:
    class Match(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return functional.cosine_similarity(a, b, dim=-1, eps=0.0)  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(6, 4, bias=False), nn.Linear(6, 4)
            self.match = Match()

        def forward(self, x: Tensor) -> Tensor:
            return self.match(self.left(x), self.right(x))

    fit(watch, Net(), batches(zero_row))


@case(module="experts.1", op="mean")
def mean_over_no_tokens(watch: Watch) -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            h = self.fc(tokens)
            return h.mean(dim=0)  # FAULT

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Expert() for _ in range(3))
            self.out = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            route = (x[:, 0] > 0).long() * torch.tensor(1)
            route[0] = 2
            return self.out(torch.stack([expert(x[route == i]) for i, expert in enumerate(self.experts)]))

    def spoil(x: Tensor) -> None:
        x[:, 0] = -1.0

    fit(watch, Mixture(), batches(spoil))


@case(module="", op="cross_entropy cross_entropy_loss nll_loss nll_loss_forward nll_loss_nd")
def every_target_of_weight_zero(watch: Watch) -> None:
    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)
            self.register_buffer("weights", torch.ones(10))
            self.weights[9] = 0.0  # the padding class counts for nothing

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.embed(tokens))
            targets = labels.flatten()
            return functional.cross_entropy(logits.flatten(0, 1), targets, weight=self.weights)  # FAULT

    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer)
    for step, x in batches():
        tokens = (x.abs() * 3).long().clamp(max=9)
        labels = torch.full_like(tokens, 9) if step == T else tokens
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@case(module="conv", op="div true_divide")
def isolated_node_of_a_graph(watch: Watch) -> None:
    class GraphConv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
            messages = self.fc(x)[source]
            total = torch.zeros(len(x), 4).index_add(0, target, messages)
            degree = torch.bincount(target, minlength=len(x))
            return total / degree.unsqueeze(-1)  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = GraphConv(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            alone = (x == 0).all(-1)
            source = torch.arange(len(x))
            target = torch.where(alone, (source + 1) % len(x), source)
            return self.out(self.conv(x, source, target))

    fit(watch, Net(), batches(zero_row))


@case(module="", op="ctc_loss _ctc_loss")
def ctc_target_longer_than_the_input(watch: Watch) -> None:
    class Recogniser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 5)

        def forward(self, frames: Tensor, length: int) -> Tensor:
            log_probs = self.fc(frames).log_softmax(-1)
            targets = torch.tensor([[1, 2, 3], [2, 3, 4]])
            lengths = torch.full((2,), length)
            return functional.ctc_loss(log_probs, targets, lengths, torch.tensor([3, 3]))  # FAULT

    model = Recogniser()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for step, frames in batches(shape=(8, 2, 6)):
        loss = model(frames, 2 if step == T else 8)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
