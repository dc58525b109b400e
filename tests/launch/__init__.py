"""`gradwatch run`."""
