"""`gradwatch serve`: one address for many runs. Needs no torch.

It reads run folders (`run_scanner`, `process_discovery`: endpoint files, journals), gives Prometheus its scrape targets
(`/sd`), keeps the last counters of runs that have ended (`/metrics`, from `ended_run_counters`), and shows people a
page of all runs (`runs_page`). Everything it knows is in the folders: it can be killed and started at any time, and
never writes into them.
"""

from gradwatch.serve.run_scanner import Fleet
from gradwatch.serve.server import Server

__all__ = ["Fleet", "Server"]
