"""The step boundary: at an optimizer's hooks, inside a backward, or where a loop without an optimizer moves weights."""
