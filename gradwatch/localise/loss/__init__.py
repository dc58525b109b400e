"""Loss code in the loop, run again on copies: which operation and which line of it made the first NaN or Inf."""
