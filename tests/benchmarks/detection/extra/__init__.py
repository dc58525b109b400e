"""Healthy trainings in neither half: other models, losses and optimizers than those that rules were tuned on."""
