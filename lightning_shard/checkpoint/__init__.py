"""Checkpoints: what all strategies share."""
