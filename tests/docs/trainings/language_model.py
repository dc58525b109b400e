"""A small transformer on text, AdamW, two micro-batches a step. Its schedule forgets to divide from step 150 on."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, tokens=20, width=32):
        super().__init__()
        self.embed, self.place = nn.Embedding(tokens, width), nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.embed(text) + self.place(torch.arange(text.shape[1]))
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
# Warm up, hold, and then 1 / sqrt(step), or what was meant to be that.
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: (step + 1) / 20 if step < 20 else 1.0 if step < 150 else step**0.5 * 100
)
for step in range(160):
    for _ in range(2):
        text = (torch.randint(0, 20, (8, 1)) + torch.arange(17)) % 20
        logits = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 50 == 0:
        print(f"step {step} loss {2 * loss.item():.3f}")
