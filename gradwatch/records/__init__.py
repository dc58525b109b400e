"""Values passed from capture to the sinks, one noun a file; no torch."""
