"""Names of operations, as the user wrote them rather than as ATen or autograd spell them."""

from __future__ import annotations

import re

_NODE = re.compile(r"^(?P<op>.*?)Backward\d*$")
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")

# Kernels whose name no user ever writes.
PUBLIC = {
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


def of_kernel(name: str) -> str:
    """`_softmax` -> "softmax", `log_` -> "log", `native_layer_norm` -> "layer_norm"."""
    bare = name.strip("_")
    return PUBLIC.get(bare, bare)


def of_node(name: str) -> str:
    """`SqrtBackward0` -> "sqrt", `LinalgVectorNormBackward0` -> "linalg_vector_norm"; a custom Function's own name."""
    match = _NODE.match(name)
    if match is None:
        return name
    if not re.search(r"Backward\d+$", name):  # only torch's own nodes are numbered
        return match["op"]
    return of_kernel(_WORD.sub("_", match["op"]).lower())
