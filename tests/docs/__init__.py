"""What README.md and gradwatch/docs say, held against the code."""
