"""What is told to whom, and in which form."""
