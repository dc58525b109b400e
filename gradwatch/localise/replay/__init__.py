"""Recorded calls replayed: forward and backward again, with the state of the training restored.

`step_replay` the step of a training, `closure_replay` its closure, `bundle_replay` that of a bundle in another process,
`live_recording` the next steps instead; `first_nonfinite_in_forward` and `first_nonfinite_in_backward` watch them;
`nonfinite_rows` and `rows_with_large_gradients` name the samples; `reproducibility` compares with what training saw.
"""
