"""Loss code evaluated expression by expression: what only computes is called, and all else refused before it is."""
