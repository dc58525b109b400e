"""`clip:` -> standing clipping policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwatch.policies import POLICIES, AnyPolicy, find_policy
from gradwatch.rules.files import words_of_other_tools
from gradwatch.rules.files.key_validation import check
from gradwatch.rules.files.pydantic_models import ClipEntry, policy_model
from gradwatch.rules.rule_set import Clip, ClipPolicy
from gradwatch.rules.yaml.nodes import Map, Mark, Node, Scalar, without
from gradwatch.rules.yaml.problems import Problems, quoted, shown


def clip(node: Node | None, groups: frozenset[str], problems: Problems) -> Clip | None:
    """`clip:` resolved; None when there is none or it is wrong."""
    if not isinstance(node, Map):
        return None
    entry = check(node, ClipEntry, problems, node.mark, "`clip`")
    at = entry.at or "step" if entry else "step"
    total = _policy(node.get("total"), node.key_mark("total"), "total", at, problems)
    by_group: dict[str, ClipPolicy] = {}
    listed = node.get("groups")
    for name, (mark, policy) in listed.entries.items() if isinstance(listed, Map) else ():
        if name not in groups:
            unknown_group(name, mark, groups, problems)
        found = _policy(policy, mark, "group", at, problems)
        if found is not None:
            by_group[name] = found
    return Clip(total, by_group, at, bool(entry.local), entry.from_step or 0) if entry else None


def unknown_group(name: str, mark: Mark, groups: frozenset[str], problems: Problems) -> None:
    """Report a group that is not defined."""
    known = sorted(groups)
    hint = f"groups: {', '.join(known)}; or define it in `groups:`" if known else "define it in `groups:`"
    problems.add(mark, "GW205", f"unknown group {quoted(name)}{problems.meant(name, known)}", hint)


def _policy(node: Node | None, at_mark: Mark, place: str, at: str, problems: Problems) -> ClipPolicy | None:
    if node is None:
        return None
    if not isinstance(node, Map):
        problems.add(
            at_mark,
            "GW103",
            f"a clipping policy must be a map, not {shown(node)}",
            "{method: norm, max_norm: 1.0}",
        )
        return None
    method = node.get("method")
    if not isinstance(method, Scalar):
        problems.add(
            at_mark,
            "GW102",
            "a clipping policy lacks the key 'method'",
            f"methods: {', '.join(sorted(POLICIES))}",
        )
        return None
    policy = find_policy(method.text)
    if policy is None:
        message = f"'method' cannot be {shown(method)}{problems.meant(method.text, POLICIES)}"
        problems.add(method.mark, "GW104", message, f"one of: {', '.join(sorted(POLICIES))}")
        return None
    where, words = f"method '{method.text}'", words_of_other_tools.POLICY_KEYS
    valid = check(without(node, "method"), policy_model(policy), problems, at_mark, where, words)
    if valid is None:
        return None
    params = valid.model_dump()
    if "scope" in params:
        params["scope"] = params["scope"] or place
        if params["scope"] == "total" and place == "group":
            message = "a policy of a group covers that group, not the total"
            problems.add(node.key_mark("scope"), "GW212", message, "use `scope: group`, or leave it out")
    _possible_policy(policy, method, params, node, at, problems)
    return ClipPolicy(method.text, params)


def _possible_policy(
    policy: type[AnyPolicy], method: Scalar, params: Mapping[str, Any], node: Map, at: str, problems: Problems
) -> None:
    alone = params.get("scope", "param") == "param"
    if at == "backward" and not (alone and policy.works_in_backward()):
        message = f"method '{method.text}' over more than one parameter cannot work in the backward"
        problems.add(method.mark, "GW206", message, "use `at: step`, or `scope: param`")
    low, high = params.get("low"), params.get("high")
    if low is not None and high is not None and low > high:
        problems.add(node.key_mark("low"), "GW208", "low must not exceed high")
