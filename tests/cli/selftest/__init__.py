"""`gradwatch selftest` on real scripts."""
