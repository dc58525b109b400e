"""The situations by name, and which law does not hold or is not asked in which, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tests.situations import architectures, changes, graphs, optimizers
from tests.situations.training import Training, net, plain
from tests.support.zoo import MODELS


@dataclass(frozen=True)
class Situation:
    """`special` are numbers that are not simply right, and what they are; `without` laws not asked, and why."""

    make: Callable[[], Training]
    note: str = ""
    special: dict[str, str] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)


ALREADY = dict.fromkeys(
    ("bits", "copies"), "bits: tests/promises/test_compile.py asks, with dynamo's counters"
)
COALESCED = "several steps make one Snapshot, or one step several"
FIRST_GRADIENT = {
    "given": "the Snapshot of a step is its first gradient's; what the last one was is not told"
}
NAMED = ("norm", "norm_applied", "norm_local")

SITUATIONS: dict[str, Situation] = {
    "plain eager, `clip_grad_norm_` before the step": Situation(lambda: plain(net())),
    "no clipping": Situation(lambda: plain(net(), clip=False)),
    **{f"zoo: {name}": Situation(lambda name=name: architectures.of_zoo(name)) for name in MODELS},  # type: ignore[misc]
    # -- models
    "in-place activations and outputs": Situation(architectures.in_place_activations),
    "in-place operations on outputs": Situation(architectures.in_place_outputs),
    "one layer three times in a forward": Situation(architectures.reused_layer),
    "tied and reused parameters": Situation(architectures.tied_and_reused),
    "tied across two models": Situation(architectures.tied_across_models),
    "frozen, unfrozen, frozen, unfrozen": Situation(architectures.frozen_and_unfrozen),
    "unused parameter": Situation(architectures.unused),
    "lazy modules": Situation(architectures.lazy),
    "lazy modules, watched before their first forward": Situation(architectures.lazy_at_attach),
    "parametrizations": Situation(architectures.parametrized),
    "parametrizations that come and go": Situation(
        architectures.parametrized_later, without=dict.fromkeys(NAMED, "the parameter keeps the name it had")
    ),
    "ParameterList, ParameterDict": Situation(architectures.parameter_list_and_dict),
    "sparse embedding, SparseAdam": Situation(architectures.sparse_embedding),
    "sparse embedding": Situation(architectures.sparse_among_dense),
    "bf16 parameters": Situation(lambda: architectures.of_dtype(torch.bfloat16)),
    "float64 parameters": Situation(lambda: architectures.of_dtype(torch.float64)),
    "complex parameters": Situation(architectures.complex_parameters),
    "parameters of every dtype, one empty, one scalar": Situation(architectures.every_dtype),
    "gradients of stride zero, of views": Situation(architectures.stride_zero_and_views),
    "nested outputs, keywords only, ModuleList, `.forward()` directly": Situation(
        architectures.nested_outputs_and_keywords
    ),
    "packed sequences": Situation(architectures.packed_sequences),
    "LSTM, MultiheadAttention": Situation(architectures.recurrent_and_attention),
    "bare tensors in the optimizer": Situation(
        architectures.bare_tensors, without=dict.fromkeys((*NAMED, "total_norm"), "`given` is of all tensors")
    ),
    "DataParallel without a GPU": Situation(architectures.data_parallel),
    "DataParallel itself is watched": Situation(architectures.data_parallel_is_watched),
    "traced by torch.fx": Situation(architectures.traced_by_fx),
    # -- models that change, before turns 3 and 10
    "`.half().float()`": Situation(changes.through_half),
    "`param.data = …`": Situation(changes.data_assigned),
    "`load_state_dict(assign=True)`, new optimizer": Situation(changes.state_assigned),
    "parameter replaced, new optimizer": Situation(changes.parameter_replaced),
    "head and parameter replaced, in the optimizer too": Situation(changes.replaced_in_place),
    "`to_empty`, new optimizer": Situation(changes.emptied),
    "made on `meta`, `to_empty` after the attach": Situation(changes.materialized_after_attach),
    "`.to()` that overwrites parameters, new optimizer": Situation(changes.overwritten),
    "`.to()` that swaps tensors": Situation(changes.swapped),
    "LoRA adapters added, `add_param_group`": Situation(changes.adapters_added),
    "averaged (EMA) and target copies": Situation(changes.averaged),
    "deepcopy and pickle of the watched model": Situation(changes.copied),
    "pickled and loaded back at every turn": Situation(changes.pickled_and_back),
    "layers that appear in a forward": Situation(changes.grows_in_forward),
    # -- backwards
    "accumulation over 3 micro-batches": Situation(graphs.accumulated(True)),
    "the same with `zero_grad(set_to_none=False)`": Situation(graphs.accumulated(False)),
    "custom Function that returns None": Situation(graphs.function_returning_none),
    "gradient penalty (`autograd.grad(create_graph=True)`)": Situation(graphs.gradient_penalty),
    "MAML": Situation(graphs.meta_learning),
    "`backward(retain_graph=True)`, then again": Situation(graphs.retained_graph_twice),
    "`backward(create_graph=True)`": Situation(graphs.graph_of_the_backward),
    "`functional_call`": Situation(graphs.functional),
    "`torch.func.grad`, `autograd.grad(is_grads_batched=True)` beside it": Situation(graphs.transforms_beside),
    "gradients set by hand": Situation(
        graphs.manual_gradients, "no backward, so nothing that one made", {"norm_local": "absent"}
    ),
    "checkpoint, non-reentrant": Situation(graphs.checkpointed(False)),
    "checkpoint, reentrant": Situation(graphs.checkpointed(True)),
    "torch.compile, aot_eager": Situation(graphs.compiled("aot_eager")),
    "torch.compile, inductor (aot_eager where there is no C++ compiler)": Situation(
        graphs.compiled(graphs.INDUCTOR), without=ALREADY
    ),
    "what torch.compile returns is watched": Situation(graphs.compiled_wrapper_is_watched),
    "attached after the first compiled call": Situation(graphs.attached_after_compiling, without=ALREADY),
    "compiled autograd": Situation(
        graphs.compiled_autograd(False), "tensor hooks would break its graph", {"norm_local": "absent"}
    ),
    "compiled autograd and clipping": Situation(
        graphs.compiled_autograd(True), "read after clipping, and says so",
        {"norm": "provisional", "norm_local": "provisional", "total_norm": "provisional"}, ALREADY,
    ),
    "compiled `optimizer.step`": Situation(graphs.compiled_step),
    "hooks of the user's": Situation(
        graphs.users_own_hooks, without={"norm_local": "one of them doubles what the backward made"}
    ),
    "`detect_anomaly`, `inference_mode`": Situation(graphs.anomaly_mode),
    "`saved_tensors_hooks`": Situation(graphs.saved_tensors_packed),
    "bf16 autocast": Situation(graphs.autocast),
    "a backward that raises, retried": Situation(graphs.failing_backward),
    # -- optimizers
    "`step(closure)`": Situation(optimizers.SGD, without=FIRST_GRADIENT),
    "`step(closure)`, Adam": Situation(optimizers.ADAM, without=FIRST_GRADIENT),
    "LBFGS": Situation(optimizers.LBFGS, without=FIRST_GRADIENT),
    "sharpness-aware minimisation": Situation(optimizers.SAM, without=FIRST_GRADIENT),
    "optimizers that step inside backward": Situation(
        optimizers.in_backward(False),
        "one Snapshot per backward, observed only; clipping inside the hook is not seen",
        without={"given": COALESCED},
    ),
    "the same, in hooks that are older than the watch": Situation(
        optimizers.in_backward(True), without={"given": COALESCED}
    ),
    "two optimizers, as in a GAN": Situation(optimizers.gan),
    "one backward, now one optimizer, now two": Situation(optimizers.one_backward_two_optimizers),
    "a step that calls `super().step()`": Situation(optimizers.double_firing_step, without={"given": COALESCED}),
    "GradScaler, unscaled and clipped": Situation(optimizers.scaled(False)),
    "the same, fused": Situation(optimizers.scaled(True)),
    "GradScaler, an overflow step": Situation(
        optimizers.scaled(False, overflow=6), "the rejected step is a Snapshot that says so"
    ),
}  # fmt: skip
