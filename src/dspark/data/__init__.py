"""Prompts in, target-written token rows out."""
