"""Steps on which no idle rule trips, proven by a few bounds: one step, or many in one call."""
