"""The kinds of draft there are. Where code reads `Draft` or `Config` it serves all of them."""

from __future__ import annotations

from typing import TypeAlias

from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.eagle3 import Eagle3Draft
from dspark.drafts.eagle3_config import Eagle3Config

Draft: TypeAlias = DSparkDraft | Eagle3Draft
Config: TypeAlias = DraftConfig | Eagle3Config


def new_draft(config: Config) -> Draft:
    """A draft of this config with fresh weights."""
    return Eagle3Draft(config) if isinstance(config, Eagle3Config) else DSparkDraft(config)
