"""Measuring: acceptance figures, paired speedups, equality of ids, the demo and its page."""
