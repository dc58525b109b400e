"""The engine: bind rules to sites, judge each step, decide what to do, remember what was seen.

`series` which series a rule is about and how they are read; `plan` a rule file bound to sites; `temporal`
pending, firing, resolved; `events` the Events; `judge` one step; `state` what is remembered; `rules_fit`
what is refused before training starts; `binding` the two classes below.
"""

from __future__ import annotations

from gradwatch.engine.binding import BoundEngine, Engine
from gradwatch.engine.columns_needed import Needs
from gradwatch.engine.state import EngineState

__all__ = ["BoundEngine", "Engine", "EngineState", "Needs"]
