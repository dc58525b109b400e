"""A run as one page: read from its journals, downsampled without losing a spike, as HTML, Markdown or JSON.

`read_run` makes a `RunReport`; `html_page`, `markdown_page` and `json_document` write it. Needs no torch.
"""

from gradwatch.report.run_reader import load, read_run
from gradwatch.report.run_report import RunReport

__all__ = ["RunReport", "load", "read_run"]
