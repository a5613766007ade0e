"""Draft checkpoints on disk."""
