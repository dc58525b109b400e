"""Standing policies of `clip:`, bound to sites; the strictest of several clips wins."""
