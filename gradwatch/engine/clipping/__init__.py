"""The policies of `clip:`, bound to sites; where several clip one gradient, the smallest factor holds."""
