"""Tiny drafts, as the tests of checkpoints make them."""

from tests.checkpoints.conftest import make_config, make_draft

__all__ = ["make_config", "make_draft"]
