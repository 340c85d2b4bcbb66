"""Data: a small set made on the spot, and checks of sets that are elsewhere."""
