"""Health of checkpoints: judged at every step (`health_tracker`), checked when asked, written (`health_tag`).

A checkpoint taken now is *healthy* unless
- a weight is not finite, or the norm of a parameter is more than 10 times the larger of its own when the weights were
  last healthy and sqrt(numel) times the root mean square of all weights then (so that a bias or an adapter of zeros
  may grow), or that of matrices whose rows have a norm of 0.5 (so may a model that was initialised far smaller than
  usual). Once one was, until none is more than 2 times as large, or 100 steps have shown that it was learning: 90 % of
  their losses below that of the first step and below their mean at the last healthy look. `Watch.healthy` looks at what
  this rank holds at the moment it is asked; without being asked weights are looked at after every jump of the total
  norm, when watching ends, and else once a second or less often, at 0.1 % of the time at most;
  `CheckpointHealth.weights_step` says after which step that was last done and nothing was found (None: never, as where
  the model is gone when it ends);
- the norm of a parameter is more than 10 times the larger of its own when watching began and sqrt(numel) times the root
  mean square of all weights then (or that of such matrices), and the loss of its optimizer was not below that of the
  first step in most of the last 50: so a learning rate that is too large from the first step on is seen, also where no
  two looks differ by much. Until a look finds that the loss is lower, or the weights are smaller;
- a weight that no optimizer of the watch moves (frozen, or of a module put in since) is NaN, or not finite where it
  wants a gradient; looked at when asked, and again only where its version has changed;
- a rule of severity critical is firing;
- a gradient of the last step was not finite, even if that step was skipped: the next one is looked at first;
- the total norm of a step that was taken was 100 times the largest so far or more, and the weights have not been
  checked since;
- the total norm of a step that was taken was 10 times the largest so far or more, and that step made a parameter twice
  as large as the larger of its own and sqrt(numel) times the root mean square of all weights before it: for 100 steps,
  in which the training shows what became of it;
- training was stopped by a rule;
- a fault of gradwatch's own kept the last step from being judged, or has paused the watch;
- running statistics of a normalisation layer are not finite: a skipped step does not take them back. Looked at with
  the weights, and at once where gradients are not finite;
- some earlier step gave a non-finite gradient to the optimizer (it was not skipped, zeroed, or rejected as a
  GradScaler does). Weights or optimizer state may then hold NaN for ever, in a row of an embedding that no later batch
  touches, so this holds until a state saved before it is loaded (`Watch.load_state_dict`; under `gradwatch run` also
  where the job was started again and the optimizer has counted fewer steps than that).
Nothing of this is held against weights that another optimizer trains in the place of these, as in a sweep: the account
and the report say that those of before were not healthy.
A step that the GradScaler rejected says nothing. What cannot be looked at is not healthy, and the reason says so.
Parameters that cannot be measured (`Watch.coverage` below 1) are not vouched for. Nor is what comes next: the weights
before the step that ruins a training are finite and of a usual size, and their next forward may already overflow. So
keep the last few healthy checkpoints.

    if gw.healthy:                                 # or, from another process: read_tag(run_directory).healthy
        torch.save({"model": model.state_dict(), "gradwatch": gw.state_dict()}, "last-good.pt")
"""

from gradwatch.checkpoint.health_tag import read_tag, read_tag_step

__all__ = ["read_tag", "read_tag_step"]
