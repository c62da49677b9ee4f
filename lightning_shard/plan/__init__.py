"""What a choice of strategy costs, before the run."""
