"""Ways of reading one large gradient once, with one thread: `python -m tests.benchmarks.reading`.

Every gradient is out of the caches when its turn comes, as after a backward. What is measured here decided how
`gradwatch.reading.row_sums` reads; beside it what columns of whole tensors cost.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gradwatch.capture.columns.batch_hash import batch_hash
from gradwatch.reading import chunked_statistics
from gradwatch.reading.row_sums import RowBuffer, divided
from gradwatch.reading.row_sums_by_blas import SquareRows
from gradwatch.reading.row_sums_by_torch import NormRows

ELEMENTS = 1 << 24


def _sheet(kind: type[RowBuffer], grad: Tensor) -> Callable[[], object]:
    shape = divided(grad.numel())
    assert shape is not None
    sheet = kind([shape])
    return lambda: sheet.read([sheet.matrix(grad, shape, None)])


def ways(grad: Tensor) -> dict[str, Callable[[], object]]:
    """What is compared, by name."""
    moment = torch.randn_like(grad)
    return {
        "rows.SquareRows (one thread's way)": _sheet(SquareRows, grad),
        "rows.NormRows (several threads')": _sheet(NormRows, grad),
        "one torch.dot": lambda: torch.dot(grad, grad),
        "torch._foreach_norm": lambda: torch._foreach_norm([grad]),
        "columns: zeros and extremes": lambda: chunked_statistics.zeros_and_extremes(grad),
        "columns: mean and std": lambda: chunked_statistics.mean_and_std(grad),
        "columns: count below a bound": lambda: chunked_statistics.count_below(grad, 0.0),
        "columns: histogram": lambda: chunked_statistics.exponents(grad),
        "columns: cosine with a moment": lambda: chunked_statistics.products(grad, moment),
        "batch hash": lambda: batch_hash([grad]),
    }


def main(argv: list[str] | None = None) -> int:
    """Measure in shuffled rounds, print medians."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.reading", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    grad, others = torch.randn(ELEMENTS), torch.randn(ELEMENTS)
    found = ways(grad)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(args.rounds):
        for name in random.sample(list(found), len(found)):
            others.mul_(1.0)
            began = time.perf_counter()
            found[name]()
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in sorted(medians.items(), key=lambda item: item[1]):
        relative = median / medians["torch._foreach_norm"]
        print(f"{name:32s} {median * 1e3:6.2f} ms  {relative:.2f} of torch._foreach_norm's")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
