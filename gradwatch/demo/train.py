"""Train a small character transformer on the source code of Python's own standard library.

An ordinary PyTorch script: it knows nothing of gradwatch. For demonstrations it can hurt itself on purpose:

    python train.py                                  a healthy run
    python train.py --vanish-at 100 --vanish-for 40  one block's branch is scaled by 1e-9, then restored
    python train.py --nan-batch-at 200               one batch is all padding: its mean loss is 0/0
    python train.py --explode-lr-at 300              the learning rate is multiplied by 1000, for good

Prints one line per step, `step=12 loss=3.21 lr=0.003`, and one per fault, `fault=vanish step=100 …`.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 128  # ASCII; everything else is read as a question mark
PADDING = 0


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a batch."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    batch: int = 16


class Block(nn.Module):
    """Pre-norm transformer block; `gain` scales what the MLP branch adds to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.gain = 1.0
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.mlp(self.norm2(x))
        return x + self.gain * added


class CharTransformer(nn.Module):
    """Next-character model: token and position embeddings, blocks, a linear head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def standard_library(limit: int = 2_000_000) -> Tensor:
    """The first `limit` characters of the standard library, modules in alphabetical order, as int64 codes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes().decode("utf-8", "replace").encode("ascii", "replace")
        if len(text) >= limit:
            break
    codes = torch.frombuffer(text[:limit], dtype=torch.uint8).long()
    return codes.clamp_(max=VOCABULARY - 1)


def draw_batch(text: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    """int64[batch, context + 1]: windows of the text at random places."""
    starts = torch.randint(len(text) - shape.context - 1, (shape.batch, 1), generator=generator)
    return text[starts + torch.arange(shape.context + 1)]


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy per character, over what is not padding (0/0 for a batch of nothing else)."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    logits = model(inputs)
    each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    real = (targets.flatten() != PADDING).float()
    return (each * real).sum() / real.sum()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a character transformer on Python's standard library."
    )
    add = parser.add_argument
    add("--steps", type=int, default=600, metavar="N", help="optimizer steps (default 600)")
    add("--lr", type=float, default=1e-3, help="AdamW learning rate (default 1e-3)")
    add("--seed", type=int, default=0, help="seed of the weights and the batches (default 0)")
    add("--layers", type=int, default=Shape.layers, help=f"blocks (default {Shape.layers})")
    add("--width", type=int, default=Shape.width, help=f"model width (default {Shape.width})")
    add("--threads", type=int, default=1, help="of torch (default 1: the model is small)")
    add("--wait", action="store_true", help="at the end, wait until stdin is closed")
    add = parser.add_argument_group("faults", "each happens once, at the step given (from 0)").add_argument
    add("--vanish-at", type=int, default=-1, metavar="STEP", help="a layer's gradients vanish")
    add("--vanish-for", type=int, default=40, metavar="STEPS", help="… for so long (default 40)")
    add("--vanish-block", type=int, default=1, metavar="I", help="… in this block (default 1)")
    add("--nan-batch-at", type=int, default=-1, metavar="STEP", help="a batch is all padding")
    add("--explode-lr-at", type=int, default=-1, metavar="STEP", help="learning rate × 1000")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    shape = Shape(layers=args.layers, width=args.width)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    text = standard_library()
    model = CharTransformer(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    hurt = model.blocks[args.vanish_block]
    for step in range(args.steps):
        batch = draw_batch(text, shape, generator)
        if step == args.vanish_at:
            hurt.gain = 1e-9
            print(f"fault=vanish step={step} where=blocks.{args.vanish_block}.mlp", flush=True)
        if step == args.vanish_at + args.vanish_for and args.vanish_at >= 0:
            hurt.gain = 1.0
            print(f"fault=restored step={step} where=blocks.{args.vanish_block}.mlp", flush=True)
        if step == args.nan_batch_at:
            batch = torch.full_like(batch, PADDING)
            print(f"fault=nan step={step} where=batch", flush=True)
        if step == args.explode_lr_at:
            optimizer.param_groups[0]["lr"] *= 1000
            print(f"fault=lr step={step} where=optimizer", flush=True)
        loss = mean_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step={step} loss={loss.item():.4f} lr={optimizer.param_groups[0]['lr']:g}", flush=True)
    print("done", flush=True)
    if args.wait:
        sys.stdin.read()


if __name__ == "__main__":
    main()
