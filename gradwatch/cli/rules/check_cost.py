"""`gradwatch rules check --cost`: how often rules read whole tensors, and how many bytes that is for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradwatch.cli.terminal import table
from gradwatch.errors import GradwatchError
from gradwatch.runtime.printable import plural

if TYPE_CHECKING:
    from torch import nn

    from gradwatch.rules.rule_set import RuleSet


def cost_of(ruleset: RuleSet, model: nn.Module | None) -> dict[str, Any]:
    """`columns`: those that rules read of whole tensors; with a model also `model`: the bytes of its steps."""
    from gradwatch.engine.read_cost import column_costs, histogram_costs

    columns = column_costs(ruleset.rules)
    if ruleset.histograms is not None:
        columns += histogram_costs(ruleset.histograms)
    found: dict[str, Any] = {"columns": [one._asdict() for one in columns]}
    return found if model is None else {**found, "model": _bytes_of(ruleset, model)}


def _bytes_of(ruleset: RuleSet, model: nn.Module) -> dict[str, Any]:
    import numpy as np
    from torch.nn.parameter import is_lazy

    from gradwatch.engine import Engine
    from gradwatch.engine.read_cost import step_cost
    from gradwatch.records.snapshot import Sites

    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not trained:
        raise GradwatchError("--model: the model has no parameter that requires a gradient")
    lazy = [name for name, param in trained if is_lazy(param)]
    if lazy:
        raise GradwatchError(
            f"--model: {lazy[0]} has no shape yet: return the model after a forward (lazy modules)"
        )
    sites = Sites(
        tuple(name for name, _ in trained),
        ("param",) * len(trained),
        np.array([param.numel() for _, param in trained], np.int64),
        np.array([param.ndim for _, param in trained], np.int64),
        np.arange(len(trained)),
    )
    sizes = np.array([param.element_size() for _, param in trained], np.int64)
    cost = step_cost(Engine(ruleset).bind(sites).plan, sizes, ruleset.histograms)
    return {"parameters": len(trained), **cost._asdict()}


def model_of(reference: str) -> nn.Module:
    """The model that the user's function returns; GradwatchError where it fails, or returns none."""
    from torch import nn

    from gradwatch.cli.user_function import call

    found = call("--model", reference)
    if isinstance(found, tuple) and found:
        found = found[0]
    if not isinstance(found, nn.Module):
        raise GradwatchError(f"--model {reference}: returned {type(found).__name__}; return the model")
    return found


def lines_of(cost: dict[str, Any]) -> list[str]:
    """Lines of text for the terminal, of what `cost_of` returns."""
    if not cost["columns"]:
        return ["      no rule reads whole tensors beyond the norms"]
    rows = [
        (one["column"], one["reads"], ", ".join(one["cadences"]), ", ".join(one["rules"]))
        for one in cost["columns"]
    ]
    lines = [table(("column", "reads", "judged", "rules"), rows, indent="      ")]
    if "model" in cost:
        of = cost["model"]
        norms, mean, most = (f"{of[name] / 1e6:,.3g} MB" for name in ("norms", "mean", "most"))
        lines.append(
            f"      {plural(of['parameters'], 'parameter')}: {norms} of gradients a step for their norms, "
            f"and for these columns {mean} on average, {most} at most"
        )
        if any(one["reads"] in ("input", "output", "running statistics") for one in cost["columns"]):
            lines.append(
                "      without what is read of modules, whose inputs and outputs depend on the batch"
            )
    return lines
