"""ZeRO on the DeepSpeed engine: its configuration, the optimizers it can partition, its state by parameter name."""
