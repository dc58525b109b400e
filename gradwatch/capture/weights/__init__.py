"""The weights themselves, looked at: finite, and none far larger than when they were last healthy."""
