"""Figures of models: what they cost, measured and computed, beside what the paper says."""
