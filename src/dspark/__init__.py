"""dspark trains, checks, measures and serves DSpark speculators."""

__version__ = "0.1.0"
