"""What becomes of a training when something goes wrong in the middle of it, and who was guarding it."""
