"""Rules judged on recorded runs: what would fire, where, and how that differs."""
