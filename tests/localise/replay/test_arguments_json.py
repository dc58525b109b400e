"""Arguments as JSON: there and back unchanged, and no tree of a stranger's does anything but be refused."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwatch.localise.replay.arguments_json import DEPTH, TreeError, decode, encode, missing
from gradwatch.localise.replay.bundle_replay import strided
from tests.support.alphabet import UNICODE
from tests.support.examples import examples

plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(UNICODE))
keys = st.one_of(st.text(UNICODE), st.integers())
trees = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)
anything = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner),
        st.dictionaries(
            st.sampled_from(["value", "float", "dtype", "missing", "tensor", "list", "tuple", "dict", "x"]),
            inner,
            max_size=2,
        ),
    ),
    max_leaves=12,
)


def refused(tensor: Any, place: str = "") -> Any:
    """There are no tensors in this tree."""
    raise AssertionError(tensor)


def same(one: Any, other: Any) -> bool:
    """Equal in value and type, NaN like NaN and -0.0 unlike 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (
            one != one and other != other
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(trees)
def test_there_and_back(value: Any) -> None:
    """Every value of plain types comes back from strict JSON as what it was, type and sign included."""
    text = json.dumps(encode(value, refused), allow_nan=False)
    assert same(decode(json.loads(text), refused, "args"), value)


def test_tensors_dtypes_and_ordered_dicts() -> None:
    """A tensor is what the caller says it is; an OrderedDict comes back as a dict."""
    t = torch.ones(2)
    value = {"x": [t, (t, torch.bfloat16)], "o": OrderedDict(a=1)}
    tree = encode(value, lambda tensor: {"tensor": {"name": str(id(tensor))}})
    back = decode(json.loads(json.dumps(tree)), lambda said, place: t, "args")
    assert back["x"][0] is t
    assert back["x"][1] == (t, torch.bfloat16)
    assert back["o"] == {"a": 1}


class Text(str):
    """A str that is more than one."""


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        Path("x"),
        Pair(1, 2),
        object(),
        {(1, 2): 3},
        Text("x"),
        torch.device("cpu"),
        slice(1),
        b"x",
        {1, 2},
        print,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_need_code_to_be_made_again_is_missing(value: Any) -> None:
    """By its class, at its place; decoding it is refused with that place."""
    tree = encode((1, [value]), refused)
    (said,) = missing(tree, "args")
    assert said.startswith("args[1][0]: ")
    with pytest.raises(TreeError, match=r"^args\[1\]\[0\]: was not kept"):
        decode(tree, refused, "args")


def test_depth_is_bounded_both_ways() -> None:
    """Too deep to encode is missing; too deep to decode is refused before Python gives up."""
    deep: Any = 1
    for _ in range(DEPTH + 5):
        deep = [deep]
    assert list(missing(encode(deep, refused), "args"))
    tree: Any = {"value": 1}
    for _ in range(5000):
        tree = {"list": [tree]}
    with pytest.raises(TreeError):
        decode(tree, refused, "args")


@settings(max_examples=examples(100))
@given(anything)
def test_any_json_is_a_value_or_refused(tree: Any) -> None:
    """Nothing but TreeError ever comes of a stranger's tree."""

    def tensor(said: Any, place: str) -> Tensor:
        assert isinstance(said, dict)
        return torch.ones(1)

    refusals: list[str] = []
    try:
        decode(tree, tensor, "args")
    except TreeError as error:
        refusals.append(str(error))
    assert all(said.startswith("args") for said in refusals)


@given(
    st.lists(st.integers(0, 4), max_size=4).flatmap(
        lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))
    )
)
def test_layouts_without_gaps_come_back(case: tuple[list[int], list[int]]) -> None:
    """Any permutation of the dimensions (channels last among them): same numbers, same strides."""
    shape, order = case
    dense = torch.arange(math.prod(shape), dtype=torch.float32).reshape([shape[k] for k in order])
    permuted = dense.permute([order.index(k) for k in range(len(shape))]) if shape else dense
    found = strided(permuted.contiguous(), list(permuted.stride()))
    assert torch.equal(found, permuted)
    if permuted.numel():
        assert found.is_contiguous(memory_format=torch.contiguous_format) == permuted.is_contiguous()
        sizes = [k for k, size in enumerate(shape) if size > 1]
        assert [found.stride(k) for k in sizes] == [permuted.stride(k) for k in sizes]


@given(
    st.one_of(
        st.none(),
        st.text(UNICODE),
        st.lists(st.one_of(st.integers(), st.floats(), st.text(UNICODE), st.none()), max_size=5),
    )
)
def test_a_strangers_strides_do_no_harm(stride: Any) -> None:
    """Numbers and shape stay, whatever the strides claim; no memory beyond them is taken."""
    tensor = torch.arange(6.0).reshape(2, 3)
    found = strided(tensor, stride)
    assert torch.equal(found, tensor)
    assert found.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
