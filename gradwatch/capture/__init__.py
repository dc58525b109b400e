"""Gradients as they arrive, by optimizer: the measurement of one accumulation window.

`read_after_backward` and `read_before_user_clip` say when norms are read; `optimizer_gradients` holds what backwards
have brought to one optimizer, `optimizer_capture` adds what happens at its steps, `snapshot_assembly` makes a Snapshot
of it. Parameters: `watched_parameters` all of them, `optimizer_parameters` those of one optimizer, `parameter_names`
their names, `parameter_shards` the part that this rank holds, `coverage` the share that is watched.
"""
