"""Figures of models: what they cost, beside what the paper says."""
