"""Rules bound to one optimizer, fitted to its models and its ranks."""
