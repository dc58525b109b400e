"""Models and loops that break other monitors: each makes an `Odd`, whose `step(i)` is one turn of its training."""

from __future__ import annotations

from collections.abc import Callable

from tests.odd_models.architectures import (
    bare_tensors,
    data_parallel,
    every_dtype,
    frozen_then_unfrozen_then_frozen,
    in_place_activations,
    lazy,
    lazy_at_attach,
    nested_outputs_and_keywords,
    packed_sequences,
    parameter_list_and_dict,
    parametrized,
    parametrized_later,
    reused_layer,
    sparse_embedding,
    stride_zero_and_views,
    tied_across_models,
    traced_by_fx,
)
from tests.odd_models.changes import (
    adapters_added_later,
    assigned_state,
    averaged,
    grows_in_forward,
    materialized_after_attach,
    pickled_and_back,
    replaced_head,
    swapped_tensors,
)
from tests.odd_models.graphs import (
    anomaly_mode,
    checkpoint_non_reentrant,
    checkpoint_reentrant,
    compiled,
    compiled_autograd,
    compiled_step,
    compiled_wrapper_is_watched,
    failing_backward,
    function_returning_none,
    functional,
    gradient_penalty,
    gradients_by_hand,
    hessian_from_backward,
    meta_learning,
    retained_graph_twice,
    saved_tensors_packed,
    users_own_hooks,
)
from tests.odd_models.loops import (
    adam_with_closure,
    double_firing_step,
    gan,
    lbfgs,
    one_backward_two_optimizers,
    optimizer_in_backward,
    sharpness_aware,
)
from tests.odd_models.odd import Odd

__all__ = ["ODD", "Odd"]

ODD: dict[str, Callable[[], Odd]] = {
    make.__name__: make
    for make in (
        in_place_activations, reused_layer, tied_across_models, frozen_then_unfrozen_then_frozen, lazy,
        lazy_at_attach, parametrized, parametrized_later, parameter_list_and_dict, sparse_embedding,
        function_returning_none, gradient_penalty, meta_learning, retained_graph_twice, hessian_from_backward,
        lbfgs, adam_with_closure, sharpness_aware, optimizer_in_backward, gan, one_backward_two_optimizers,
        functional, gradients_by_hand, checkpoint_reentrant, checkpoint_non_reentrant, compiled,
        compiled_wrapper_is_watched, compiled_autograd, compiled_step, adapters_added_later, swapped_tensors,
        assigned_state, replaced_head, materialized_after_attach, averaged, pickled_and_back, every_dtype,
        stride_zero_and_views, users_own_hooks, nested_outputs_and_keywords, packed_sequences, bare_tensors,
        grows_in_forward, anomaly_mode, traced_by_fx, data_parallel, saved_tensors_packed, double_firing_step,
        failing_backward,
    )
}  # fmt: skip
