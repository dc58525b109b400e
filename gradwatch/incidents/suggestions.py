"""Suggested fixes: the usual cause of a NaN of one operation, and the line that fixes it.

A table, not code: the first entry whose conditions a Finding meets is the one reported. Every entry is
tried on the real operation in `tests/incidents/test_suggestions.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradwatch.records.finding import Finding, Operand

HALF = ("float16",)
RUNNING_VARIANCE = 4
"""Place among the tensors that `batch_norm` reads of the running variance, where it has weight and bias as well."""
LOGS = ("log", "log2", "log10", "log1p")
PRODUCTS = ("matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "conv", "linear", "einsum")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A cause (`why`) and the code to write instead (`fix`).

    Conditions, all of which must hold: `ops` the operation ("" = any); `phases`; `zero`, `negative`, `inf`: some
    operand has such elements; `beyond`: some operand exceeds that magnitude; `idle`: part of the gradient that came
    was 0, so another branch was taken; `variance`: a running variance is below 0; `nan`: the result is NaN (False:
    it is infinite); `dtypes` of the result or an operand; `empty`: some operand has no elements; `sound`: every
    operand is finite; `at_outputs`: the gradient came so to the model's outputs; `in_module`: a module is named,
    `named`: an operation; `after_lr_jump`: the learning rate had jumped before.
    """

    id: str
    why: str
    fix: str
    ops: tuple[str, ...] = ()
    phases: tuple[str, ...] = ("forward", "backward")
    zero: bool = False
    negative: bool = False
    inf: bool = False
    beyond: float | None = None
    idle: bool = False
    variance: bool = False
    nan: bool | None = None
    dtypes: tuple[str, ...] = ()
    empty: bool = False
    sound: bool = False
    at_outputs: bool = False
    in_module: bool = False
    named: bool = False
    after_lr_jump: bool = False

    def fits(self, finding: Finding) -> bool:
        """True if a finding meets every condition."""
        operands = [one for one in finding.operands if not one.name.startswith("gradient")]
        result = finding.result
        shown = [*operands, *([] if result is None else [result])]
        return (
            finding.phase in self.phases
            and (finding.at_outputs or not self.at_outputs)
            and (bool(finding.module) or not self.in_module)
            and (bool(finding.op) or not self.named)
            and (finding.lr_jumped_at is not None or not self.after_lr_jump)
            and (not self.ops or finding.op in self.ops)
            and (not self.zero or any(one.zeros for one in operands))
            and (not self.negative or _is_below_zero(operands))
            and (not self.inf or any(one.inf for one in operands))
            and (self.beyond is None or any(_magnitude(one) >= self.beyond for one in operands))
            and (not self.idle or any(one.zeros for one in finding.operands if one not in operands))
            and (not self.variance or _is_below_zero(operands[RUNNING_VARIANCE:]))
            and (self.nan is None or (result is not None and bool(result.nan) == self.nan))
            and (not self.dtypes or any(one.dtype in self.dtypes for one in shown))
            and (not self.empty or any(not one.numel for one in operands))
            and (not self.sound or not any(one.nan or one.inf for one in operands))
        )


def _is_below_zero(operands: Sequence[Operand]) -> bool:
    return any(one.smallest < 0 for one in operands)


def _magnitude(operand: Operand) -> float:
    bounds = (abs(operand.smallest), abs(operand.largest))
    return max((bound for bound in bounds if not math.isnan(bound)), default=0.0)


FORWARD, BACKWARD = ("forward",), ("backward",)

SUGGESTIONS: tuple[Suggestion, ...] = (
    Suggestion(
        "input-not-finite",
        "The batch holds NaN or Inf before the model touches it.",
        "Check it where it is loaded: `assert torch.isfinite(x).all()`; drop or impute such samples.",
        phases=("input",),
    ),
    Suggestion(
        "parameter-not-finite",
        "A weight was not finite when this forward read it: an earlier step, or code that writes to it, made it so.",
        "Go back to a checkpoint from before; keep a rule with `skip_step` so that no such step is taken.",
        phases=("parameter",),
    ),
    Suggestion(
        "tensor-not-finite",
        "A tensor that the loop computes with (a label, a mask, a weight of samples) was not finite when it was read.",
        "Check it where it is loaded or computed: `assert torch.isfinite(y).all()`; drop or impute such samples.",
        phases=("tensor",),
    ),
    Suggestion(
        "buffer-not-finite",
        "A buffer (running statistics, a mask, a table) was not finite when this forward read it.",
        "Reset it (`module.reset_running_stats()`), and find the batch that made it non-finite.",
        phases=("buffer",),
    ),
    Suggestion(
        "loss-side",
        "The model's outputs are finite; what is computed of them makes a non-finite gradient.",
        "Look from that call of the model to `backward()` for log, sqrt or division at 0; compute from logits.",
        phases=("loss",),
    ),
    Suggestion(
        "irreproducible",
        "The same call gave two results: the one of training is not what its inputs and generators give.",
        "Count such steps by host (`gradwatch_irreproducible_steps_total`): where one stands out test that machine, or "
        "take it out; else look for what changes between the forward and the step.",
        phases=("irreproducible",),
    ),
    Suggestion(
        "after-backward",
        "What the last backward gave was finite; code between it and the step made, or put, NaN or Inf there.",
        "Look there for a division (by a count, a norm, a number of ranks), an unscale, a clip of your own, noise, or "
        "gradients of an earlier backward that are put back.",
        phases=("after_backward",),
    ),
    Suggestion(
        "infinite-outputs",
        "The model's outputs are infinite, and the loss is computed of them all the same.",
        "Leave them out of the loss, or write a large finite number such as -1e9 in place of -inf: 0 · inf is NaN.",
        phases=("outputs",),
    ),
    Suggestion(
        "number-not-finite",
        "That operation was given NaN or Inf, as a number or as data: in the code, or computed before.",
        "Look where that comes from: a mean of nothing, a schedule, a table, a division in Python or numpy, `item()`.",
        phases=("number",),
    ),
    Suggestion(
        "learning-rate-jump",
        "The learning rate had jumped shortly before: the weights have moved too far, and what they make with them.",
        "Look at the schedule (its warm-up, its units, a factor that is applied twice), and go on from a checkpoint of "
        "before it.",
        phases=("exploding", "activations"),
        after_lr_jump=True,
    ),
    Suggestion(
        "multiplying-operation",
        "The backward of one operation multiplies the gradient by about as much as it is too large.",
        "Keep its inputs away from where its derivative is large (0 for log, sqrt and division): clamp them, or add an "
        "epsilon inside; of a custom Function look at `backward`.",
        phases=("exploding",),
        named=True,
    ),
    Suggestion(
        "exploding-outputs",
        "All layers are off alike: the loss, what it got, or what follows the last layer made the gradient large.",
        "Look at this batch (labels, weights, its scale), at how the loss is reduced, and at the loss scale; or clip: "
        "`clip: {total: …}`.",
        phases=("exploding",),
        at_outputs=True,
    ),
    Suggestion(
        "vanishing-outputs",
        "All layers are off alike: the loss, what it got, or what follows the last layer made the gradient small.",
        "Look at this batch (masks, weights of its samples), at a coefficient of the loss, and whether the loss is 0.",
        phases=("vanishing",),
        at_outputs=True,
    ),
    Suggestion(
        "activations",
        "The gradients of the weights are off their usual level where that of the bias beside them is not: so is what "
        "enters this layer.",
        "Look at the batch (its scale, an outlier), and the layers before: no normalisation, weights that moved.",
        phases=("activations",),
    ),
    Suggestion(
        "exploding",
        "The gradient grows by a large factor in one place.",
        "Normalise there (LayerNorm, a smaller initialisation), lower the learning rate, or clip: `clip: {total: …}`.",
        phases=("exploding",),
        in_module=True,
    ),
    Suggestion(
        "vanishing",
        "The gradient all but disappears in one place: a saturated activation, a scale that is far too small.",
        "Look at the activations there; use residual connections, a normalisation layer, or another initialisation.",
        phases=("vanishing",),
        in_module=True,
    ),
    Suggestion(
        "place-not-shown",
        "Gradients are off their usual level; where that began norms do not show.",
        "Look at the gradient by depth (`gradwatch report`), at the batch, and at the learning rate before it.",
        phases=("exploding", "vanishing"),
    ),
    Suggestion(
        "where-trap",
        "Where the gradient is 0 (a branch that `torch.where` did not take, a value that is masked), the derivative is "
        "infinite, and 0 times infinity is NaN.",
        "Make the input safe before the operation: `f(x.clamp_min(eps))`, or `f(torch.where(ok, x, 1.0))` and `where` "
        "again.",
        ops=(*LOGS, "sqrt", "rsqrt", "div", "reciprocal", "pow", "acos", "asin", "exp"),
        phases=BACKWARD,
        idle=True,
        nan=True,
    ),
    Suggestion(
        "mean-of-nothing",
        "A mean over nothing is 0/0: the batch, or what was selected of it, has no element.",
        "Leave such a batch out, or write `x.sum() / max(x.numel(), 1)`.",
        phases=FORWARD,
        empty=True,
        nan=True,
    ),
    Suggestion(
        "every-label-ignored",
        "The mean is over no label: each is `ignore_index`, or has a class weight of 0.",
        "Leave such a batch out, or use `reduction='sum'` and divide by the count of labels, at least 1.",
        ops=("nll_loss",),
        phases=FORWARD,
        sound=True,
        nan=True,
    ),
    Suggestion(
        "half-overflow-to",
        "The number does not fit into float16, whose largest is 65,504.",
        "Use bfloat16, or keep this part in float32: `with torch.autocast(device, enabled=False)`.",
        ops=("to",),
        dtypes=HALF,
    ),
    Suggestion(
        "half-overflow",
        "The result does not fit into float16, whose largest is 65,504.",
        "Use bfloat16, scale the inputs down first (attention: divide q before `q @ k`), or go to float32 here.",
        ops=(*PRODUCTS, "mul", "add", "sum", "mean", "pow", "square", "exp", "cumsum", "norm"),
        dtypes=HALF,
    ),
    Suggestion(
        "softmax-fully-masked",
        "A row is masked out altogether: a softmax over nothing but -inf is 0/0.",
        "Leave one position open, or mask with `torch.finfo(x.dtype).min` and zero such rows afterwards.",
        ops=("softmax", "log_softmax", "scaled_dot_product_attention"),
        inf=True,
    ),
    Suggestion(
        "softmax-backward-masked",
        "A row was masked out altogether; replacing its NaN afterwards does not fix the backward.",
        "Leave one position open, or mask with `torch.finfo(x.dtype).min` instead of -inf.",
        ops=("softmax", "log_softmax"),
        phases=BACKWARD,
    ),
    Suggestion(
        "logsumexp-of-nothing",
        "A log-sum-exp over nothing but -inf is -inf, and its derivative NaN.",
        "Leave one position open, or mask with `torch.finfo(x.dtype).min`.",
        ops=("logsumexp",),
    ),
    Suggestion(
        "log-of-negative",
        "log of a negative number is NaN.",
        "Keep it positive: `torch.log(x.clamp_min(eps))`, or parametrise by `softplus`.",
        ops=LOGS,
        phases=FORWARD,
        negative=True,
        nan=True,
    ),
    Suggestion(
        "log-of-zero",
        "log of 0 is -inf; its derivative is infinite there, and overflows close to it.",
        "`torch.log(x.clamp_min(eps))`; for probabilities stay with logits: `log_softmax`, `logsigmoid`; "
        "p·log p is `torch.xlogy(p, p)`.",
        ops=LOGS,
    ),
    Suggestion(
        "sqrt-of-negative",
        "The root of a negative number is NaN; a variance computed as a difference may be slightly negative.",
        "`torch.sqrt(x.clamp_min(eps))`; compute variances with `torch.var`.",
        ops=("sqrt", "rsqrt"),
        phases=FORWARD,
        negative=True,
        nan=True,
    ),
    Suggestion(
        "sqrt-at-zero",
        "The derivative of sqrt at 0 is infinite.",
        "Put the epsilon inside: `torch.sqrt(x + eps)`; for lengths use `torch.linalg.vector_norm`, safe at 0.",
        ops=("sqrt",),
        phases=BACKWARD,
    ),
    Suggestion(
        "reciprocal-of-zero",
        "1/0 is infinite.",
        "Add the epsilon before, not after: `torch.rsqrt(x + eps)`, `1 / x.clamp_min(eps)`.",
        ops=("rsqrt", "reciprocal"),
    ),
    Suggestion(
        "zero-over-zero",
        "0/0: a mean over an empty mask, or a vector of length 0 divided by its length.",
        "`total / count.clamp_min(1)`; `torch.nn.functional.normalize(x)` has an epsilon of its own.",
        ops=("div",),
        phases=FORWARD,
        zero=True,
        nan=True,
    ),
    Suggestion(
        "division-by-zero",
        "A division by 0, or by something so small that the quotient overflows.",
        "Keep the divisor away from 0: `x / (y + eps)` where y ≥ 0, `y.clamp_min(eps)` else.",
        ops=("div",),
    ),
    Suggestion(
        "pow-of-negative",
        "A negative number to a fractional power is NaN.",
        "`x.clamp_min(eps) ** y`, or `x.abs() ** y * x.sign()` if that is meant.",
        ops=("pow",),
        phases=FORWARD,
        negative=True,
        nan=True,
    ),
    Suggestion(
        "pow-at-zero",
        "The derivative of x**y at x = 0 is infinite for y < 1, and log 0 enters the derivative in y.",
        "`x.clamp_min(eps) ** y`.",
        ops=("pow",),
        phases=BACKWARD,
    ),
    Suggestion(
        "pow-overflow",
        "The power is too large for its dtype.",
        "Clamp the base, or work with logarithms.",
        ops=("pow", "square"),
    ),
    Suggestion(
        "exp-overflow",
        "exp overflows float32 above 88 (float16 above 11).",
        "Subtract the maximum (`softmax`, `logsumexp` do), clamp the exponent (log-variances to ±10), or use softplus.",
        ops=("exp", "exp2", "expm1", "sinh", "cosh"),
    ),
    Suggestion(
        "norm-at-zero",
        "The derivative of this norm at a vector of zeros is not finite.",
        "Add an epsilon inside: `(x.square().sum(-1) + eps).sqrt()`.",
        ops=("norm", "linalg_vector_norm", "linalg_matrix_norm", "cdist"),
    ),
    Suggestion(
        "arc-beyond-one",
        "acos and asin are not defined beyond ±1, which a cosine reaches by rounding.",
        "`torch.acos(x.clamp(-1 + eps, 1 - eps))`, or `torch.atan2` of sine and cosine.",
        ops=("acos", "asin", "acosh"),
        phases=FORWARD,
    ),
    Suggestion(
        "arc-at-one",
        "The derivative of acos and asin at ±1 is infinite.",
        "`torch.acos(x.clamp(-1 + eps, 1 - eps))` with eps about 1e-6, or `torch.atan2` of sine and cosine.",
        ops=("acos", "asin", "acosh"),
        phases=BACKWARD,
    ),
    Suggestion(
        "atan2-at-origin",
        "An angle has no derivative at the origin.",
        "Move it away from there: `torch.atan2(y, x + eps)` where x ≥ 0, or predict sine and cosine.",
        ops=("atan2",),
    ),
    Suggestion(
        "logit-at-the-edge",
        "logit and atanh are infinite at the ends of their range, which a sigmoid or tanh reaches by rounding.",
        "`torch.logit(p, eps=1e-6)`, `torch.atanh(x.clamp(-1 + eps, 1 - eps))`, or keep the number before the sigmoid.",
        ops=("logit", "atanh", "erfinv"),
    ),
    Suggestion(
        "std-of-one",
        "The unbiased standard deviation of a single element is 0/0.",
        "`x.std(correction=0)`, or see to it that no group has one element only.",
        ops=("std", "var", "std_mean", "var_mean"),
        phases=FORWARD,
    ),
    Suggestion(
        "cross-entropy-of-inf",
        "A probability of exactly 0 or 1 went into a logarithm, or the logits were infinite already.",
        "`binary_cross_entropy_with_logits` and `cross_entropy` take logits and are safe.",
        ops=("binary_cross_entropy", "nll_loss", "kl_div", "xlogy"),
    ),
    Suggestion(
        "decomposition",
        "The matrix is singular, or has two equal eigenvalues, where the derivative is not finite.",
        "Add a little to the diagonal (`A + eps * torch.eye(n)`); avoid gradients through `eigh` and `svd` vectors.",
        ops=(
            "logdet",
            "slogdet",
            "linalg_slogdet",
            "det",
            "linalg_det",
            "linalg_eigh",
            "linalg_svd",
            "linalg_inv_ex",
            "linalg_inv",
            "linalg_cholesky_ex",
            "cholesky",
            "linalg_solve_ex",
        ),
    ),
    Suggestion(
        "gamma-pole",
        "The gamma functions have poles at 0 and the negative integers.",
        "Keep their argument positive: `x.clamp_min(eps)`, or parametrise by `softplus`.",
        ops=("lgamma", "digamma", "polygamma", "mvlgamma"),
    ),
    Suggestion(
        "running-product",
        "A product of many factors overflows.",
        "Sum logarithms instead: `torch.cumsum(x.log(), -1)`.",
        ops=("cumprod", "prod"),
    ),
    Suggestion(
        "infinity-times-zero",
        "0 times infinity is NaN: a mask cannot be applied by multiplying with it.",
        "`x.masked_fill(~mask, value)` or `torch.where` instead of `x * mask`.",
        ops=("mul",),
        inf=True,
        nan=True,
    ),
    Suggestion(
        "infinity-minus-infinity",
        "Infinity minus infinity is NaN.",
        "Use a large finite number for masks: `torch.finfo(x.dtype).min / 2`.",
        ops=("add", "sub", "sum", "mean", "cumsum"),
        inf=True,
        nan=True,
    ),
    Suggestion(
        "running-variance",
        "The running variance by which a layer divides in `eval()` is below 0 somewhere: no batch makes it so.",
        "Look for what writes to it (a bad checkpoint, weights averaged or decayed); `module.reset_running_stats()`.",
        ops=("batch_norm",),
        variance=True,
        nan=True,
    ),
    Suggestion(
        "norm-layer",
        "A normalisation layer over numbers whose squares overflow, or with an epsilon too small for its dtype.",
        "Raise eps, keep the layer in float32, and look at what makes its input so large.",
        ops=("layer_norm", "batch_norm", "group_norm", "rms_norm", "instance_norm"),
    ),
    Suggestion(
        "matrix-product-overflow",
        "A matrix product overflows: its inputs are far too large.",
        "Look for the layer whose activations grow (a missing normalisation, a learning rate too high).",
        ops=PRODUCTS,
        beyond=1e10,
    ),
    Suggestion(
        "large-numbers",
        "Numbers grew beyond their dtype.",
        "Look for what grows: a missing normalisation, a learning rate too high, a scale that is learned unbounded.",
        ops=("sum", "mean", "cumsum", *PRODUCTS),
    ),
    Suggestion(
        "large-operands",
        "Numbers grew beyond their dtype.",
        "Look for what grows: a missing normalisation, a learning rate too high, a scale that is learned unbounded.",
        ops=("mul", "add", "sub", "square"),
        beyond=200,  # 256 squared is the first to overflow in float16
    ),
)

GENERAL = Suggestion(
    "general",
    "This operation made a non-finite number out of finite ones.",
    "Look at its operands above: keep them inside the range in which it and its derivative are finite.",
)


def suggestion_for(finding: Finding) -> Suggestion | None:
    """The suggested fix; None where nothing was found."""
    if not finding.found:
        return None
    return next((suggestion for suggestion in (*SUGGESTIONS, GENERAL) if suggestion.fits(finding)), None)
