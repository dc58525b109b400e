"""Twenty trainings that are ruined and twenty that are healthy, drawn in two halves before anything was measured.

What `healthy` is changed for is looked at on the half `tuning`; what is reported comes of the half `reporting`.
"""

from __future__ import annotations

from tests.benchmarks.checkpoints import faults
from tests.benchmarks.checkpoints import trainings as t
from tests.benchmarks.checkpoints.faults import START, Fault
from tests.benchmarks.checkpoints.trainings import Training

RUINED: dict[str, tuple[tuple[Training, Fault], ...]] = {
    "tuning": (
        (t.MLP, faults.rate(30)),
        (t.CNN, faults.rate(100, START)),
        (t.TRANSFORMER, faults.rate(100)),
        (t.RNN, faults.rate(30, START)),
        (t.GAN, faults.rate(100, part=0)),
        (t.VAE_SGD, faults.rate(30)),
        (t.MLP_ADAM, faults.scaled(1000, "2.")),
        (t.TRANSFORMER_W, faults.ascent()),
        (t.CNN_ADAM, faults.bits_flipped()),
        (t.EMBEDDINGS, faults.rate(300)),
        # Added when the first ten had been looked at.
        (t.VAE, faults.rate(300, START)),
        (t.TINY, faults.rate(300, START)),
        (t.CNN_ADAM, faults.rate(300, START)),
        (t.MLP, faults.ascent()),
        (t.RNN, faults.ascent()),
        (t.TRANSFORMER, faults.shuffled()),
        (t.TRANSFORMER, faults.rate(150, START)),
        # Added later: rates at which weights grow together, and a little at every look.
        (t.MLP, faults.rate(10, START)),
        (t.TINY, faults.rate(30, START)),
        (t.TINY, faults.rate(100, START)),
        (t.EMBEDDINGS, faults.rate(30, START)),
        (t.TRANSFORMER, faults.rate(100, START)),
        (t.LORA, faults.rate(100, START)),
        (t.GAN, faults.rate(300, START)),
    ),
    "reporting": (
        (t.MLP_ADAM, faults.rate(300, START)),
        (t.CNN, faults.rate(300)),
        (t.TRANSFORMER_W, faults.rate(150, START)),
        (t.LSTM, faults.rate(200)),
        (t.GAN, faults.rate(100, part=1)),
        (t.VAE, faults.rate(200)),
        (t.TRANSFORMER, faults.scaled(1000, "layers.1.linear1")),
        (t.LSTM, faults.ascent()),
        (t.MLP, faults.burst(1e4)),
        (t.CNN_ADAM, faults.shuffled()),
    ),
}
HEALTHY: dict[str, tuple[Training, ...]] = {
    "tuning": (
        t.MLP,
        t.CNN,
        t.TRANSFORMER,
        t.RNN,
        t.GAN,
        t.REINFORCE,
        t.LORA,
        t.EMBEDDINGS,
        t.TINY_SGD,
        t.DECAYED,
        t.PRICES,
        t.PRICES_SGD,
    ),
    "reporting": (
        t.MLP_ADAM,
        t.CNN_ADAM,
        t.TRANSFORMER_W,
        t.LSTM,
        t.VAE,
        t.VAE_SGD,
        t.LORA_SGD,
        t.EMBEDDINGS_SGD,
        t.TINY,
        t.RESIDUAL,
    ),
}
