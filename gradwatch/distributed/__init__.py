"""The ranks of one training: they meet once, exchange facts of each step, and so act alike.

`process_group` has the collectives, `handshake` the first meeting, `rank_membership` what was agreed on there; `ranks`
exchanges one step: packed (`all_reduce_packing`) into a vector (`all_reduce_layout`), whose sum over ranks makes the
norms of shards whole (`sharded_norms`), shows `replica_divergence`, and gives the step that all judge
(`step_seen_by_all_ranks`). `all_ranks_or_none` is for what all do after the same step, or none.
"""
