"""How many examples a law is tried on: few in every run, twenty times as many with `--hypothesis-profile soak`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

FEW = 25
"""Of a law that does not say."""
SOAK = 20


def register_profiles() -> None:
    """Tell hypothesis of both runs, and take the short one; `--hypothesis-profile`, read later, takes the other."""
    for name, more in (("gradwatch", 1), ("soak", SOAK)):
        # Time decides no test: neither how long one example takes nor how long it takes to think of one.
        settings.register_profile(
            name, max_examples=FEW * more, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
    settings.load_profile("gradwatch")


def examples(few: int) -> int:
    """So many, or as many times more as this run takes."""
    return few * settings.default.max_examples // FEW
