"""Steps on which no idle rule trips, proven by a few bounds: one of them, or many in one call."""
