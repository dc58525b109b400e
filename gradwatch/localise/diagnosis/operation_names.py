"""Names of operations, as the user wrote them rather than as ATen or autograd spell them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

_NODE = re.compile(r"^(?P<op>.*?)Backward\d*$")
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")

# Kernels whose name no user ever writes.
PUBLIC = {
    "lift_fresh": "tensor",
    "to_copy": "to",
    "native_layer_norm": "layer_norm",
    "native_batch_norm": "batch_norm",
    "native_group_norm": "group_norm",
    "cudnn_batch_norm": "batch_norm",
    "miopen_batch_norm": "batch_norm",
    "batch_norm_with_update": "batch_norm",
    "native_dropout": "dropout",
    "safe_softmax": "softmax",
    "t": "transpose",
    "unsafe_view": "view",
    "convolution": "conv",
    "mkldnn_rnn_layer": "rnn",
    "thnn_fused_lstm_cell": "lstm_cell",
    "scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
    "scaled_dot_product_fused_attention_overrideable": "scaled_dot_product_attention",
    "nll_loss_forward": "nll_loss",
    "nll_loss2d_forward": "nll_loss",
    "embedding_dense": "embedding",
}
NOT_READ = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize"})
"""What hands out memory as it is: whatever it holds is no result."""

CONTRACTIONS = frozenset(
    {
        *(
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "addbmm",
            "mv",
            "addmv",
            "dot",
            "linear",
            "convolution",
            "cudnn_convolution",
        ),
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit"),
        *(
            "_batch_norm_with_update",
            "native_layer_norm",
            "native_group_norm",
            "var",
            "std",
            "var_mean",
            "std_mean",
        ),
    }
)
"""Kernels that no mask of infinities is ever given to: one that came in with the batch is a fault of the batch."""

LEARNED_IN_TRAINING = {
    "native_batch_norm": (3, 4, 5),
    "cudnn_batch_norm": (3, 4, 5),
    "miopen_batch_norm": (3, 4, 5),
    "_native_batch_norm_legit": (3, 4, 5),
    "_batch_norm_with_update": (3, 4, None),
}
"""Where running statistics stand among the arguments, and whether it trains (None = it does): then they are written,
not read, and the forward that is run again has already left its NaN in them."""


def read_by(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments whose numbers the result of a kernel is made of."""
    if name not in LEARNED_IN_TRAINING:
        return args, kwargs
    mean, variance, trains = LEARNED_IN_TRAINING[name]
    if trains is not None and not args[trains]:
        return args, kwargs
    return [value for place, value in enumerate(args) if place not in (mean, variance)], kwargs


def of_kernel(name: str) -> str:
    """`_softmax` -> "softmax", `log_` -> "log", `native_layer_norm` -> "layer_norm"."""
    bare = name.strip("_")
    return PUBLIC.get(bare, bare)


@functools.lru_cache(maxsize=1024)
def of_node(name: str) -> str:
    """`SqrtBackward0` -> "sqrt", `LinalgVectorNormBackward0` -> "linalg_vector_norm"; a custom Function's own name."""
    match = _NODE.match(name)
    if match is None:
        return name
    if not re.search(r"Backward\d+$", name):  # only torch's own nodes are numbered
        return match["op"]
    return of_kernel(_WORD.sub("_", match["op"]).lower())
