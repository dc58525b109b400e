"""An incident as a whole: findings, explanations, suggestions."""
