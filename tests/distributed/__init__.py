"""The ranks of one training, without starting any; `tests.ranks` starts them."""
