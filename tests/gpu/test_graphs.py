"""CUDA graphs: a capture is left alone and said, partial graphs are watched, and streams are kept in order."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from gradwatch.reading import foreach_norms
from tests.gpu.training import Training
from tests.precision.loops import norms_in, watched
from tests.reading.test_foreach_norms import X, net


def test_a_captured_step_replays() -> None:
    """A whole step captured in a CUDA graph under a watch: capture succeeds and the replay trains."""
    model, x = net().cuda(), X.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, capturable=True)
    gw, _ = watched(model, optimizer, "observe-only")
    with gw:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad()
                model(x).pow(2).sum().backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            model(x).pow(2).sum().backward()
            optimizer.step()
        before = model[0].weight.detach().clone()
        graph.replay()
        torch.cuda.synchronize()
        assert not torch.equal(before, model[0].weight)
        assert gw.health.errors() == {"capture": 1}


def warned(watch: bool) -> set[str]:
    """What torch and Python warn of in a training whose forward and backward are graphs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = Training("mlp", "sgd")
        training.called = torch.cuda.make_graphed_callables(training.model, (training.batch()[0],))  # type: ignore[assignment]
        gw = watched(training.model, training.optimizer, "default")[0] if watch else None
        for _ in range(4):
            training.step()
        if gw is not None:
            gw.close()
    return {str(one.message) for one in caught}


def test_no_warning_is_ours() -> None:
    """Graphs make torch warn of streams, or not: watched as bare, in a process where neither warning was given."""
    code = "import sys; from tests.gpu.test_graphs import warned; print(sorted(warned(sys.argv[1] == '1')))"
    said = [
        subprocess.run([sys.executable, "-c", code, watch], capture_output=True, text=True, check=True).stdout
        for watch in "01"
    ]
    assert said[0] == said[1]


def test_a_graphed_model_is_watched() -> None:
    """`make_graphed_callables`: forward and backward are replayed, gradients arrive as ever, and norms are right."""
    training = Training("mlp", "sgd")
    training.called = torch.cuda.make_graphed_callables(training.model, (training.batch()[0],))  # type: ignore[assignment]
    gw, sink = watched(training.model, training.optimizer, "default")
    wants = []
    with gw:
        for _ in range(8):
            training.step()
            grads = training.gradients()
            wants.append({name: float(grad.double().norm()) for name, grad in grads.items()})
        assert gw.health.errors() == {}
    assert len(sink.records) == 8
    for record, want in zip(sink.records, wants, strict=True):
        assert norms_in(record) == pytest.approx(want, rel=1e-5)


def test_norms_of_a_backward_on_another_stream() -> None:
    """A training on a side stream, slowed down there: what is read is what the backward left, at every step."""
    training = Training("mlp", "sgd")
    gw, sink = watched(training.model, training.optimizer, "observe-only")
    side, wants = torch.cuda.Stream(), []
    side.wait_stream(torch.cuda.current_stream())
    with gw:
        for _ in range(8):
            with torch.cuda.stream(side):
                torch.cuda._sleep(
                    20_000_000
                )  # some ten milliseconds in which a read on the default stream is too early
                training.step()
                wants.append(training.gradients())
        torch.cuda.synchronize()
    for record, grads in zip(sink.records, wants, strict=True):
        want = {name: float(grad.double().norm()) for name, grad in grads.items()}
        assert norms_in(record) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_against_float64(dtype: torch.dtype) -> None:
    """1e-5 relative where float32 squares overflow or vanish, too."""
    for magnitude in (1.0, 1e-4, 3e4) + ((1e25, 1e-25) if dtype is not torch.float16 else ()):
        grads = [(torch.randn(n, dtype=torch.float64) * magnitude).to(dtype).cuda() for n in (3, 5000, 2**20)]
        want = [float(grad.double().div(magnitude).norm()) * magnitude for grad in grads]
        assert foreach_norms.read(grads).norms().tolist() == pytest.approx(want, rel=1e-5)
