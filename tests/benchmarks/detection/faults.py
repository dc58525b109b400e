"""All live faults by name, and the recording of one."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from tests.benchmarks.detection import faults_gradients as gradients
from tests.benchmarks.detection import faults_loop as loop
from tests.benchmarks.detection.live import LiveFault
from tests.benchmarks.detection.recording import Key, Recording, record
from tests.benchmarks.detection.split import Part, names_of

LIVE: Mapping[str, type[LiveFault]] = {
    "nan-gradient": gradients.NanInGradient,
    "inf-gradient": gradients.InfInGradient,
    "bit-flip": gradients.BitFlip,
    "layer-x10": gradients.SpikeTen,
    "layer-x30": gradients.SpikeThirty,
    "layer-x100": gradients.SpikeHundred,
    "layer-vanishes": gradients.VanishingLayer,
    "layer-drifts": gradients.DriftingLayer,
    "layer-sign-flipped": gradients.FlippedLayer,
    "layer-zeroed": gradients.ZeroedLayer,
    "altered-x0.1": gradients.AltersLater,
    "altered-x10": gradients.AmplifiesLater,
    "cleared-unseen": gradients.ClearedUnseen,
    "no-zero-grad": gradients.NoZeroGrad,
    "all-zero": gradients.AllZero,
    "frozen": gradients.Frozen,
    "detached": gradients.Detached,
    "unowned": gradients.NotOwned,
    "optimizer-of-copies": gradients.OptimizerOfCopies,
    "dead-units": gradients.DeadUnits,
    "lr-x10": loop.RateTen,
    "lr-x100": loop.RateHundred,
    "lr-0": loop.RateZero,
    "lr-too-high": loop.RateTooHighFromStart,
    "nan-loss": loop.NanLoss,
    "loss-x10": loop.LossSpike,
    "loss-x100": loop.LossSpikeHundred,
    "total-falls": loop.LossFalls,
    "total-vanishes": loop.LossVanishes,
    "total-drifts": loop.LossDrifts,
    "sign-flipped": loop.LossFlipped,
    "never-unscaled": loop.NeverUnscaled,
    "clip-before-backward": loop.ClipBeforeBackward,
    "clip-after-step": loop.ClipAfterStep,
    "clip-always-bites": loop.ClipAlwaysBites,
    "clip-never-bites": loop.ClipNeverBites,
    "clip-of-scaled": loop.ClipOfScaled,
    "nan-batch": loop.NanInBatch,
    "batch-x100": loop.BatchHundred,
    "inputs-0": loop.EmptyInputs,
    "labels-shuffled": loop.LabelsShuffled,
    "same-batch": loop.SameBatch,
    "init-x20": loop.LargeInit,
    "weights-collapse": loop.WeightsCollapse,
    "weights-x10": loop.WeightsOverwritten,
    "moments-corrupted": loop.MomentsCorrupted,
}


def record_fault(key: Key) -> Recording:
    """Train with the fault, as long as it may take to be found. Raises `UnfitError` where there is no place for it."""
    fault = LIVE[key.fault](Random(f"{key}"))
    return record(key, fault.onset + fault.horizon, fault, lambda: fault.culprits)


def live_keys(part: Part, width: int) -> list[Key]:
    """Each fault in so many trainings of a part, chosen by lot, with a seed each; first one of each fault.

    A larger width adds to those of a smaller one.
    """
    chosen = []
    for fault in LIVE:
        names, random = names_of(part), Random(fault)
        random.shuffle(names)
        chosen.append([Key(name, random.randrange(3), fault) for name in names[:width]])
    return [keys[k] for k in range(width) for keys in chosen if k < len(keys)]
