"""A rule file fitted to the models and ranks it is attached to: what cannot be carried out there is refused, or off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from gradwatch.account import NOT_ARMED
from gradwatch.capture.columns.module_taps import COLUMNS as MODULE_COLUMNS
from gradwatch.capture.columns.module_taps import ModuleTaps, taps_on
from gradwatch.capture.parameter_shards import sharded_positions
from gradwatch.engine import Engine
from gradwatch.engine.unsupported_rules import Refusal, disarmed, not_armed, refuse
from gradwatch.errors import AttachError, UnfitRulesError
from gradwatch.records.snapshot import Sites
from gradwatch.rules.rule_set import RuleSet
from gradwatch.session.binding.backward_actions import refused_in_backward
from gradwatch.session.binding.rank_requirements import refused_on_ranks, refused_on_shards

OFF = "switched off, everything else stays active (--strict-rules refuses it): "


class Fitting:
    """Collects what is off. `lenient`: refused actions are off by themselves, else they raise `UnfitRulesError`.

    `off` says why, by rule, `clip:PLACE` or `modules:TAP`.
    """

    def __init__(self, lenient: bool) -> None:
        self.lenient = lenient
        self.off: dict[str, str] = {}
        self._unsaid: list[str] = []

    def without(self, refusals: Iterable[Refusal], ruleset: RuleSet) -> RuleSet:
        """The rule file without what is refused; `ruleset` itself where nothing is."""
        found = list(refusals)
        if not self.lenient:
            refuse(found, ruleset)
        if not found:
            return ruleset
        self.off |= not_armed(found)
        self._unsaid += [one.sentence(ruleset) for one in found]
        return disarmed(found, ruleset)

    def taps(
        self,
        engine: Engine,
        models: list[nn.Module],
        failed: Callable[[str, BaseException], None],
    ) -> ModuleTaps | None:
        """The module taps that rules or histograms ask for; None where none do, or where they are off.

        Raises `UnfitRulesError` where the modules cannot be tapped so, unless `lenient`.
        """
        asked, needs = engine.ruleset.modules, engine.needs.only(MODULE_COLUMNS)
        histograms = engine.ruleset.histograms
        if histograms is not None and "activations" not in histograms.of:
            histograms = None
        if asked is None or not (needs.columns or histograms):
            return None
        try:
            return taps_on(models, asked.names, asked.tap, needs, failed, histograms)
        except AttachError as error:
            if not self.lenient:
                raise UnfitRulesError(str(error)) from None
            self.off[f"modules:{asked.tap}"] = f"{NOT_ARMED}{error}"
            self._unsaid.append(f"modules: {error}")
            return None

    def news(self) -> str:
        """Notice of what is switched off and what to do about it, once; "" where there is nothing new."""
        sentence, self._unsaid = self._unsaid, []
        return OFF + " · ".join(sentence) if sentence else ""


def refused_here(
    engine: Engine,
    sites: Sites,
    models: Sequence[nn.Module],
    wanted: Sequence[nn.Parameter],
    world_size: int,
) -> list[Refusal]:
    """Refusals of what cannot be carried out on these models, or with these ranks.

    `sites` are those of all models; `wanted` the parameters that want a gradient, in the order of the sites.
    """
    return [
        *engine.refusals(sites),
        *refused_on_ranks(engine, world_size),
        *refused_on_shards(engine, sites, sharded_positions(wanted, models)),
        *refused_in_backward(engine.ruleset, models, world_size),
    ]
