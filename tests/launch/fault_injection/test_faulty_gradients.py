"""A fault in gradients of every layout, and the parameter that is chosen for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradwatch.launch.fault_injection.faulty_gradients import FaultyGradients, faulty, parameter_to_break
from gradwatch.launch.selftest_faults import FAULTS

BY_NAME = {fault.name: fault for fault in FAULTS}
GRADIENTS = {
    "contiguous": torch.ones(2, 3),
    "transposed": torch.ones(3, 2).t(),
    "expanded": torch.ones(1, 3).expand(2, 3),
    "channels_last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "no dimension": torch.ones(()),
    "sparse": torch.sparse_coo_tensor(
        [[0, 2]], [[1.0, 1.0], [1.0, 1.0]], (4, 2), check_invariants=True
    ).coalesce(),
    "not coalesced": torch.sparse_coo_tensor(
        [[2, 2]], [[1.0, 1.0], [1.0, 1.0]], (4, 2), check_invariants=True
    ),
}


@pytest.mark.parametrize("layout", GRADIENTS)
def test_one_element_becomes_nan_in_every_layout(layout: str) -> None:
    """The layout stays, and the gradient that was given is left as it was."""
    gradient = GRADIENTS[layout]
    before = gradient.to_dense().clone()
    wrong = faulty(gradient, BY_NAME["nan"])
    assert wrong is not None
    assert wrong.layout is gradient.layout
    assert int(wrong.to_dense().isnan().sum()) == 1
    assert torch.equal(gradient.to_dense(), before)


@pytest.mark.parametrize("layout", GRADIENTS)
def test_a_factor_scales_every_layout(layout: str) -> None:
    """All elements, stored or not."""
    gradient = GRADIENTS[layout]
    wrong = faulty(gradient, BY_NAME["spike"])
    assert wrong is not None
    assert torch.equal(wrong.to_dense(), gradient.to_dense() * 1e4)


def test_an_empty_sparse_gradient_stays_as_it_is() -> None:
    """None: there is no element that could be wrong."""
    assert faulty(torch.sparse_coo_tensor(size=(4, 2), check_invariants=True), BY_NAME["nan"]) is None


def test_a_failure_of_the_hook_is_told_and_not_raised() -> None:
    """The script's backward goes on with the gradient that it has."""
    param, told = nn.Parameter(torch.ones(2)), list[Exception]()
    # A fault of no known kind: multiplying by it raises a TypeError.
    wrong = type(BY_NAME["spike"])("odd", "", 0, 1, factor=object())  # type: ignore[arg-type]
    gradients = FaultyGradients(wrong, [param], told.append)
    param.sum().backward()
    assert [type(error) for error in told] == [TypeError]
    assert gradients.entered == 0
    assert torch.equal(param.grad, torch.ones(2))  # type: ignore[arg-type]


def test_hooks_are_there_as_long_as_the_fault() -> None:
    """Gradients are counted that were made faulty; after `remove` they are healthy."""
    param = nn.Parameter(torch.ones(2))
    gradients = FaultyGradients(BY_NAME["freeze"], [param], lambda error: None)
    param.sum().backward()
    gradients.remove()
    assert gradients.entered == 1
    assert float(param.grad.sum()) == 0  # type: ignore[union-attr]
    param.sum().backward()
    assert float(param.grad.sum()) == 2  # type: ignore[union-attr]


def _param(shape: tuple[int, ...], gradient: Tensor | None) -> nn.Parameter:
    param = nn.Parameter(torch.ones(shape))
    param.grad = gradient
    return param


def test_a_matrix_with_a_dense_gradient_is_chosen() -> None:
    """Not one without a gradient, a sparse one or a bias, as long as there is another."""
    unused, bias = _param((2, 2), None), _param((2,), torch.ones(2))
    sparse, dense = _param((2, 2), torch.eye(2).to_sparse()), _param((2, 2), torch.eye(2))
    assert parameter_to_break([unused, bias, sparse, dense]) is dense
    assert parameter_to_break([unused, bias, sparse]) is bias
    assert parameter_to_break([unused, sparse]) is sparse
    assert parameter_to_break([unused]) is unused
