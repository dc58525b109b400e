"""One sentence on each key of `detect:` and `clip:`, for `gradwatch rules kinds`, the schema and editors.

Many kinds have the same keys, so a key is described once; a kind that means something else by it has an entry of its
own. Third parties describe the keys of theirs by the field's metadata: `field(metadata={"description": "…"})`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

_KEYS: Mapping[str, str] = {
    "above": "The rule fires where the score exceeds this.",
    "above_zero": "Only values above 0: exact zeros are left to `all_zero`.",
    "alpha": "Share of the past that the moving average keeps at each step.",
    "at_least": "The share of zero elements from which the rule fires, 0 to 1.",
    "below": "The rule fires where the value is less than this.",
    "beta": "Share of the past that the moving average keeps at each step.",
    "clear_above": "Once it fires, it goes on until the value exceeds this; by default `threshold`.",
    "clear_below": "Once it fires, it goes on until the score is below this; by default the bound itself.",
    "clip_value": "The largest absolute value an element keeps.",
    "confirmed": "The factor from which it fires where the loss jumped as far, or weights are ruined.",
    "depths": "Two depths to compare, counted from the input, in the place of the first and last.",
    "differed": "So many batches must have differed before a repetition counts.",
    "ends": "How many weight matrices at each end are taken together.",
    "eps": "Added to a norm before it is divided by.",
    "factor": "It fires as well where the value exceeds so many times the largest of the last `window` samples.",
    "fast": "Half-life of the recent level, in samples.",
    "floor": "The loss scale at which, or below which, it fires.",
    "half_life": "Half-life of the baseline, in samples.",
    "halvings": "So many halvings of the loss scale within `within` steps fire it.",
    "high": "The largest norm that is left alone.",
    "history": "So many of the last norms are kept.",
    "lag": "The last so many samples are not compared with: a slow change is seen against what was before it.",
    "last_layer": "Clip the last layer too, which the paper leaves alone.",
    "layers": "A glob: only parameters with such names.",
    "low": "The smallest norm that is left alone.",
    "max_norm": "The largest norm after clipping.",
    "min_ndim": "Only parameters of at least so many dimensions: 2 leaves out biases and norms.",
    "min_weight_norm": "Parameters with a weight norm up to this are not judged: those that begin at zero.",
    "of": "The column that is judged (`gradwatch rules columns`).",
    "one_in": "One batch in so many is hashed.",
    "percentile": "The percentile of the norms so far to which it clips.",
    "ratio": "The largest norm after clipping, as a multiple of what it is compared with.",
    "settle": "Steps of a new scaler within which halvings are not counted.",
    "slow": "Half-life of the long-term level, in samples.",
    "target": "The norm that a gradient is brought to.",
    "threshold": "The bound, in the unit of the column.",
    "values": "Which count: nan, inf, or both.",
    "warmup": "Samples before it judges, or clips by what it has learned.",
    "window": "Samples that it looks back on.",
    "within": "Steps that it looks at.",
    "z": "Deviations from the usual norm beyond which it clips.",
}
_CLEARS_AT_3 = (
    "Once it fires, it goes on until the score is below this; by default 3, or `above` if that is less."
)
_OF_KIND: Mapping[tuple[str, str], str] = {
    (
        "above_recent_max",
        "above",
    ): "The factor over the largest of the window from which it fires; more than 1.",
    ("baseline", "above"): "Deviations from the usual norm beyond which it clips.",
    (
        "below_recent_min",
        "above",
    ): "The factor below the smallest of the window from which it fires; more than 1.",
    ("block_rms", "threshold"): "The largest root mean square of a gradient's elements after clipping.",
    ("plateau", "better"): "Whether a lower or a higher value is the better one.",
    ("plateau", "by"): "The part of the best mean by which a new one has to be better, to count.",
    (
        "plateau",
        "steps",
    ): "Samples without a new best from which it fires, from the end of the warm-up on: `warmup` + `steps` in all.",
    ("converged", "above"): "The factor below the largest level from which it fires.",
    (
        "depth_ratio",
        "above",
    ): "It fires where the ratio exceeds this: gradients explode on the way to the input.",
    (
        "depth_ratio",
        "below",
    ): "It fires where the ratio is less than this: gradients fade on the way to the input.",
    (
        "drift",
        "above",
    ): "The factor over the highest level before from which it fires; more than 1.",
    ("above_usual", "above"): "The factor over the usual level from which it fires.",
    (
        "below_usual",
        "above",
    ): "The factor below the usual level from which it fires: 100 is a hundredth of it.",
    ("diverged", "above"): "The factor over the first loss from which it fires.",
    ("diverged", "within"): "Losses from the first within which it begins to judge.",
    ("drop", "above"): "The factor by which it fell and the others did not, from which it fires.",
    (
        "exploded",
        "threshold",
    ): "The bound as a multiple of the smallest |loss| so far (1 at least; 10 at most until it has halved).",
    ("fade", "above"): "The factor below the long-term level from which it fires.",
    ("grown", "above"): "The factor by which a gradient grew between backward and step from which it fires.",
    ("jump", "above"): "The factor over the largest so far from which it fires.",
    ("loss_spike", "clear_below"): _CLEARS_AT_3,
    ("loss_spike", "above"): "Deviations above the usual level from which it fires.",
    ("lr_jump", "above"): "The factor over the step before from which it fires.",
    ("never", "within"): "Steps from the first within which a gradient must have arrived.",
    ("rank_outlier", "clear_below"): _CLEARS_AT_3,
    ("rank_outlier", "above"): "Deviations from the other ranks from which it fires.",
    ("rise", "above"): "The factor by which it rose and the others did not, from which it fires.",
    ("same_batch", "within"): "The batch is compared with so many before it.",
    ("spike", "clear_below"): _CLEARS_AT_3,
    ("spike", "above"): "Deviations above the usual level from which it fires.",
    ("stuck", "below"): "The largest update ratio of weights that count as not moving.",
    ("update_ratio", "above"): "The update, as a share of the weight's norm, from which it fires.",
}


def description(kind: str, each: Field[Any]) -> str:
    """The sentence on one key of a kind of detector or clip policy; "" for a third party's without one."""
    own = each.metadata.get("description", "")
    return str(own) or _OF_KIND.get((kind, each.name), "") or _KEYS.get(each.name, "")


def described(cls: type[Any]) -> Mapping[str, str]:
    """The sentences on all keys of a registered class, by key."""
    kind = str(getattr(cls, "kind", "") or getattr(cls, "method", ""))
    return {each.name: description(kind, each) for each in fields(cls)}


NAMES = frozenset(_KEYS) | {name for _, name in _OF_KIND}
"""The keys that have a sentence here: a test holds that each belongs to a kind."""
OF_KINDS = frozenset(_OF_KIND)
