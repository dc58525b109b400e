"""TensorBoard: scalars and a log of events in an event file beside the journal.

The records are TensorBoard's; the file is ours. Its own `EventFileWriter` waits for ever in `flush` once the disk
has failed, and `torch.utils.tensorboard` makes one of those.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gradwatch.records.histogram import with_zeros
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.background_worker import background_worker
from gradwatch.runtime.optional_dependencies import require
from gradwatch.sinks.parameter_selection import ParameterChoice, ParamsMode
from gradwatch.sinks.trackers.incident_list import NAME, IncidentList
from gradwatch.sinks.trackers.points import Note, Point
from gradwatch.sinks.trackers.tracker import DEFAULT_EVERY, Tracker

EVENTS = "gradwatch/events"


class TensorBoardSink(Tracker):
    """Writes a point every `every` steps, and of every step on which something happens, to an event file in `dir`.

    `dir` None is `tensorboard` in the folder of the run; `tensorboard --logdir gradwatch-runs` shows all runs.
    Rules that begin or cease to fire, and causes, are texts under `gradwatch/events`, each at its step. TensorBoard
    shows a sample of the texts of a name, and always the newest: under `gradwatch/incidents` that is a table of the
    last 200. NaN and Inf are written as they are, and TensorBoard draws them as marks; the counter
    `gradwatch/nonfinite_steps_total` stands beside. Local folders only. Needs the extra
    `tensorboard`; TensorFlow is not imported.

    `params` says which parameters get series of their own, `gradwatch/param_COLUMN/NAME`: off, worst (`top_k` seats,
    sticky), match (globs of `match`) or all, at most `max_series` in total; what is left out is counted and reported.
    """

    name = "tensorboard"

    def __init__(
        self,
        dir: str | None = None,
        every: int = DEFAULT_EVERY,
        params: ParamsMode = "off",
        top_k: int = 20,
        max_series: int = 200,
        match: Sequence[str] = (),
    ) -> None:
        require("tensorboard", "tensorboard")
        super().__init__(every, background_worker(), ParameterChoice(params, top_k, max_series, tuple(match)))
        self._directory = dir
        self._writer: Any = None
        self._files = 0

    def load(self, run: RunInfo) -> None:
        """Import what makes records."""
        import tensorboard.compat.proto.event_pb2
        import tensorboard.plugins.text.metadata
        import tensorboard.summary.writer.record_writer  # noqa: F401

    def start(self, run: RunInfo) -> None:
        """Make an event file of this process; a failed one is left as it is, and another one begun."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory = self._directory or os.path.join(run.directory, "tensorboard")
        os.makedirs(directory, exist_ok=True)
        self._files += 1
        # TensorBoard reads what has "tfevents" in its name, in the order of the names.
        name = (
            f"events.out.tfevents.{time.time():.0f}.{platform.node()}.{os.getpid()}.{self._files}.gradwatch"
        )
        file = open(os.path.join(directory, name), "xb")  # noqa: SIM115 (the writer closes it)
        self._writer = RecordWriter(file)
        self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def send(self, points: Sequence[Point]) -> None:
        """Write and flush. After a fault the rest of the file cannot be read: the next attempt makes a new one."""
        if self._writer is None:
            self.start(self._run)
        try:
            for point in points:
                self._writer.write(_event(point).SerializeToString())
            if self._incidents.unsent:
                self._writer.write(_listed(self._incidents).SerializeToString())
            self._writer.flush()
            self._incidents.sent()
        except BaseException:
            broken, self._writer = self._writer, None
            _abandon(broken)
            raise

    def finish(self, stopped: bool) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _abandon(writer: Any) -> None:
    """Close a file that cannot be written; its buffer is lost, and was never acknowledged."""
    try:
        writer.close()
    except OSError:
        return  # the fault that is being reported already


def _event(point: Point) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    scalars = [Summary.Value(tag=name, simple_value=_single(value)) for name, value in point.values.items()]
    return Event(
        step=point.step,
        wall_time=point.time,
        summary=Summary(value=[*scalars, *_histograms(point), *_texts(point.notes)]),
    )


def _listed(incidents: IncidentList) -> Any:
    """The Event that holds the table of all incidents so far."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    value = _text(NAME, [incidents.markdown()], "Rules that fired in this run, and their causes.")
    return Event(step=incidents.last_step, wall_time=time.time(), summary=Summary(value=[value]))


def _histograms(point: Point) -> Iterator[Any]:
    """Over log2 of the magnitude, from -48 to 16; exact zeros stand in one more bucket below all others."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    for name, found in point.histograms.items():
        counts, edges = with_zeros(found)
        there, middles = np.flatnonzero(counts), (edges[:-1] + edges[1:]) / 2
        if not len(there):
            continue  # all elements are NaN or Inf
        proto = HistogramProto(
            min=float(edges[there[0]]),
            max=float(edges[there[-1] + 1]),
            num=float(counts.sum()),
            sum=float(counts @ middles),
            sum_squares=float(counts @ np.square(middles)),
            bucket_limit=edges[1:].astype(float).tolist(),
            bucket=counts.astype(float).tolist(),
        )
        yield Summary.Value(tag=name, histo=proto)


def _single(value: float) -> float:
    """A protobuf float: what is beyond float32 becomes an infinity of the same sign, as in any cast."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _texts(notes: tuple[Note, ...]) -> Iterator[Any]:
    if notes:
        yield _text(EVENTS, [note.text for note in notes], "Rules that fire, resolve or fail.")


def _text(name: str, texts: Sequence[str], description: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    encoded = [text.encode("utf-8", "replace") for text in texts]
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(encoded))])
    tensor = TensorProto(dtype=DT_STRING, string_val=encoded, tensor_shape=shape)
    described = create_summary_metadata(display_name="", description=description)
    return Summary.Value(tag=name, metadata=described, tensor=tensor)
