"""gradwatch as a callback of `transformers.Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwatch.integrations import checkpoint_file
from gradwatch.integrations.callback_session import Session
from gradwatch.integrations.missing_framework import requires
from gradwatch.session.watch import Watch

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gradwatch.integrations.callback_session import Options

with requires("transformers", "transformers"):
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


class GradwatchCallback(TrainerCallback):
    """Watches every `train()`: `Trainer(..., callbacks=[GradwatchCallback(rules="default")])`.

    Options are those of `gradwatch.watch`. `norm` is read before the Trainer clips, over all accumulated
    batches. The rules see the loss of every step, which its backwards began with: what the Trainer logs at
    `logging_steps=1`, NaN included. The state is a file in each checkpoint folder, and resuming from a checkpoint
    under `output_dir` continues it; so does a second `train()` of the same model.

    The Trainer has no callback for an exception: a watch then ends with its model, at the next
    `train()`, or with the process. Raises at the start of training what `gradwatch.watch` raises.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        self._session = Session(options)

    @property
    def gw(self) -> Watch | None:
        """The watch of the present `train()`, or of the last one; None before any."""
        return self._session.gw

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch: model and optimizer are prepared."""
        gw = self._session.open(kwargs["model"], [kwargs["optimizer"]])
        if state.global_step:
            given = args.resume_from_checkpoint
            for folder in (given, self._folder(args, state)):
                if isinstance(folder, (str, Path)) and checkpoint_file.load(gw, folder):
                    break

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The checkpoint folder has just been written."""
        # A hyper-parameter search has a folder per trial, which the callback is not told, and nothing to resume.
        if self.gw is not None and state.is_world_process_zero and not state.is_hyper_param_search:
            checkpoint_file.save(self.gw, self._folder(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the watch: training is over."""
        self._session.close()

    @staticmethod
    def _folder(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
