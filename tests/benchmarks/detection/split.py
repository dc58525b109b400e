"""The trainings, and which of them rules may be tuned on.

Fixed before any rule was tuned on these trainings. Each half has some of every subject. A rule, a default or a
threshold is chosen on `tuning` alone; of `reporting` only the final table is looked at.

`extra` and `extra-held-out` came later, when rules had been tuned on `tuning`, and were divided before any rule was
tried on them: rules may be tuned on `extra` too, and on `extra-held-out` they are only measured.
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
from tests.benchmarks.detection.extra import images, sequences, tables_and_control
from tests.benchmarks.detection.training import Training

Half = Literal["tuning", "reporting"]
Part = Half | Literal["extra", "extra-held-out"]
HALVES: tuple[Half, ...] = ("tuning", "reporting")
PARTS: tuple[Part, ...] = (*HALVES, "extra", "extra-held-out")

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
_EXTRA = (
    sequences.tied_words,
    sequences.adding_problem,
    images.coordinate_network,
    tables_and_control.mixture_density,
    tables_and_control.quantiles,
    tables_and_control.meta_learning,
)
_EXTRA_HELD_OUT = (
    sequences.ctc,
    images.groupnorm_nesterov,
    images.box_regression,
    images.angular_margin,
    tables_and_control.reach,
    tables_and_control.restoration,
)
_OF: Mapping[Part, tuple[Callable[[int], Training], ...]] = {
    "tuning": _TUNING,
    "reporting": _REPORTING,
    "extra": _EXTRA,
    "extra-held-out": _EXTRA_HELD_OUT,
}
TRAININGS: Mapping[str, Callable[[int], Training]] = {
    one.__name__: one for part in _OF.values() for one in part
}
PART: Mapping[str, Part] = {one.__name__: name for name, part in _OF.items() for one in part}


def names_of(part: Part) -> list[str]:
    """The trainings of a part."""
    return [one.__name__ for one in _OF[part]]
