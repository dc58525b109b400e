"""The ranks of one training: the process group, membership, the facts they reduce, replica divergence."""
