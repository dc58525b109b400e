"""Groups that the names of a model suggest."""

from __future__ import annotations

from gradwatch.rules.proposed_groups import proposed


def groups(*names: str) -> dict[str, int]:
    return {group.name: group.count for group in proposed(names)}


def test_parts_are_known_by_their_names() -> None:
    """Of a transformer with experts and adapters; a parameter is in the first group that it matches."""
    found = groups(
        "embed_tokens.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.q_proj.lora_A.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.mlp.experts.3.up.weight",
        "layers.0.mlp.gate.weight",
        "layers.0.mlp.shared.weight",
        "lm_head.weight",
    )
    assert found == {
        "adapters": 1,
        "experts": 1,
        "routers": 1,
        "embeddings": 1,
        "head": 1,
        "norms": 1,
        "attention": 1,
        "mlp": 1,
    }


def test_only_globs_that_match_are_written() -> None:
    """The file is about this model, not about all that there are."""
    (group,) = proposed(["layer1.0.conv1.weight", "other"])
    assert (group.name, group.globs, group.examples) == (
        "convolutions",
        ("*conv*",),
        ("layer1.0.conv1.weight",),
    )


def test_modules_at_the_top_where_no_name_is_known() -> None:
    """Two to eight of them, whose names are words: not the numbers of a Sequential."""
    assert groups("actor.0.weight", "actor.0.bias", "critic.0.weight", "scale") == {
        "actor": 2,
        "critic": 1,
        "scale": 1,
    }
    assert groups("0.weight", "2.weight") == {}
    assert groups(*(f"part{number}.weight" for number in range(9))) == {}


def test_a_group_of_all_is_none() -> None:
    """It would say nothing."""
    assert groups("a.norm.weight", "b.norm.weight") == {}
    assert groups() == {}
