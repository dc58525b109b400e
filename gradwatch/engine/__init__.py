"""The engine: bind rules to sites, judge each step, decide what to do, keep what was learned.

`selected_parameters` gives the sites that a rule is about, `series` the series that it judges of them, `rule_plan`
binds a rule file to sites. `judged_steps` says which sites are read, and which series judged, at a step. `judge` takes
one step through all rules; `firing` keeps what is pending and firing; `reporting` makes the Events. `actions` makes the
orders of due rules, `clipping` applies the policies of `clip:`. `engine_state` is what is kept between steps,
`baseline_restarts` makes baselines begin anew. `engine` and `bound_engine` hold the two classes below.
"""

from __future__ import annotations

from gradwatch.engine.bound_engine import BoundEngine
from gradwatch.engine.columns_needed import Needs
from gradwatch.engine.engine import Engine
from gradwatch.engine.engine_state import EngineState

__all__ = ["BoundEngine", "Engine", "EngineState", "Needs"]
