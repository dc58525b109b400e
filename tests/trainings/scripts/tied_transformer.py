"""nanoGPT's way: a small decoder with tied embeddings, decay groups, cosine by hand, eval between steps."""

import math

import torch
import torch.nn.functional as F
from digest import report
from torch import nn

torch.manual_seed(1337)
V, T, D = 32, 8, 16


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(V, D),
                "wpe": nn.Embedding(T, D),
                "h": nn.ModuleList(
                    nn.TransformerEncoderLayer(D, 2, 32, 0.0, batch_first=True, norm_first=True)
                    for _ in range(2)
                ),
                "ln_f": nn.LayerNorm(D),
            }
        )
        self.lm_head = nn.Linear(D, V, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        for block in self.transformer.h:
            x = block(x, src_mask=mask)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, V), targets.view(-1))
        return logits, loss


model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
data = torch.randint(0, V, (400,))
for it in range(10):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * it / 10))
    if it % 4 == 0:
        model.eval()
        with torch.no_grad():
            print("eval", it, model(data[None, :T], data[None, 1 : T + 1])[1].item())
        model.train()
    for _ in range(2):
        ix = torch.randint(len(data) - T - 1, (4,))
        x = torch.stack([data[i : i + T] for i in ix])
        y = torch.stack([data[i + 1 : i + T + 1] for i in ix])
        _, loss = model(x, y)
        (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(it, loss.item())
report(10, model)
