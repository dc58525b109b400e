"""Skipping a step exactly: parameters and optimizer state stay bit-identical."""
