"""Models whose parameters are sharded over ranks, made whole for one replay."""
