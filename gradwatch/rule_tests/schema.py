"""The shape of a `*.test.yaml` as pydantic models, strict as those of rule files."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gradwatch.records.event import EventKind, Severity
from gradwatch.rules.files.model_base import Model, unset

Shape = Annotated[list[Annotated[int, Field(ge=0, le=1 << 40)]], Field(max_length=16)]
Step = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1, max_length=500)]


class Document(Model):
    """A file of unit tests for one rule file."""

    version: Annotated[int, Field(ge=1, le=1)] = Field(description="Version of the test language.")
    rules: Name = Field(description="The rule file under test: a path from this file, or a shipped pack.")
    run: Name = unset("The run id that `overrides: match:` is compared with.")
    tests: Annotated[list[dict[str, Any]], Field(min_length=1)] = Field(description="The tests.")


class CaseEntry(Model):
    """One run of made-up steps, and what is to come of it."""

    name: Name = Field(description="What is tested, in a sentence.")
    params: Annotated[dict[str, Shape], Field(min_length=1)] = Field(
        description="Shapes of the parameters, in the order of registration."
    )
    modules: list[Name] = unset("Names of tapped modules.")
    ranks: Annotated[int, Field(ge=2, le=1024)] = unset("Ranks, where rules about them are tested.")
    input: dict[str, Any] = Field(
        description="By column, the values of a series; or by glob on parameters, the values of each."
    )
    only: Annotated[list[Name], Field(min_length=1)] = unset(
        "Only events and actions of these rules are compared; `clip:` is the file's own clip section."
    )
    events: list[dict[str, Any]] = unset("Every event of these steps, in any order.")
    actions: list[dict[str, Any]] = unset("Every action of these steps, in any order.")


class ExpectedEvent(Model):
    """An event; what is left out is not compared."""

    step: Step = Field(description="The optimizer step, from 0.")
    rule: Name = Field(description="Id of the rule.")
    kind: EventKind = Field("firing", description="The transition.")
    severity: Severity = unset("Its severity.")
    sites: list[str] = unset("The worst sites, worst first, as the event names them (at most five).")
    count: Step = unset("How many sites.")
    value: float = unset("What was measured at the worst site, within 0.1 %.")
    notify: bool = unset("True if it alerts; false where an incident is reopened within its cooldown.")
    summary: str = unset("The text of the annotation.")
    description: str = unset("The text of the annotation.")


class ExpectedAction(Model):
    """An action; what is left out is not compared, but for `shadow`."""

    step: Step = Field(description="The optimizer step, from 0.")
    rule: Name = Field(description="Id of the rule, or `clip:` for the clip section.")
    action: Literal[
        "clip", "skip_step", "rescale", "zero_nonfinite", "localise", "snapshot", "stop", "drop_micro"
    ] = Field(description="As spelled in `do:`.")
    shadow: bool = Field(False, description="Only reported, because of `mode: shadow`.")
    site: str = unset('The site it changes most; "" for the total.')
    count: Step = unset("How many sites.")
    before: float = unset("The norm there before it, within 0.1 %.")
    after: float = unset("The norm there after it, within 0.1 %.")
    coefficient: float = unset("The factor it multiplies by, within 0.1 %.")
