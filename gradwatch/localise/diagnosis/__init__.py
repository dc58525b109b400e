"""The cause of the first NaN or Inf: the operation, its module, its line and its values."""
