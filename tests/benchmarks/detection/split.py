"""The trainings, and which of them rules may be tuned on.

Fixed before any rule was tuned on these trainings. Each half has some of every subject. A rule, a default or a
threshold is chosen on `tuning` alone; of `reporting` only the final table is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from tests.benchmarks.detection import (
    trainings_generative as generative,
)
from tests.benchmarks.detection import (
    trainings_language as language,
)
from tests.benchmarks.detection import (
    trainings_other as other,
)
from tests.benchmarks.detection import (
    trainings_reinforcement as reinforcement,
)
from tests.benchmarks.detection import (
    trainings_vision as vision,
)
from tests.benchmarks.detection.training import Training

Half = Literal["tuning", "reporting"]
HALVES: tuple[Half, ...] = ("tuning", "reporting")

_TUNING = (
    vision.cnn_adadelta,
    vision.resnet_restarts,
    vision.mixer,
    vision.siamese,
    vision.finetune_head,
    vision.amp_bfloat16,
    language.lstm_words,
    language.gpt_accumulation,
    language.seq2seq_gru,
    language.lora,
    language.masked_words,
    generative.gan_ring,
    generative.vae_summed,
    generative.flow,
    reinforcement.dqn,
    reinforcement.a2c,
    other.gcn,
    other.lbfgs,
    other.recommender,
)
_REPORTING = (
    vision.cnn_cyclic,
    vision.resnet_stepped,
    vision.vit,
    vision.simclr,
    vision.finetune_all,
    vision.amp_scaler,
    language.gpt,
    language.lstm_characters,
    language.seq2seq_transformer,
    language.moe,
    generative.wgan,
    generative.autoencoder_summed,
    generative.diffusion,
    reinforcement.ppo,
    reinforcement.reinforce_sparse,
    other.link_prediction,
    other.pinn,
    other.ddp,
    other.multitask,
    other.tabular,
)
TRAININGS: Mapping[str, Callable[[int], Training]] = {one.__name__: one for one in (*_TUNING, *_REPORTING)}
HALF: Mapping[str, Half] = {
    **{one.__name__: "tuning" for one in _TUNING},
    **{one.__name__: "reporting" for one in _REPORTING},
}


def names_of(half: Half | None) -> list[str]:
    """The trainings of a half; all of them for None."""
    return [name for name in TRAININGS if half is None or HALF[name] == half]
