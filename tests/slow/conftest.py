"""A real headless browser for the pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium, or Playwright's own. Skips, with the way to get one, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'dspark[slow]'")
    with sync_api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        if found is None and not Path(playwright.chromium.executable_path).is_file():
            pytest.skip(f"no browser: none of {', '.join(BROWSERS)} on the path (or: playwright install chromium)")
        opened = playwright.chromium.launch(executable_path=found)
        yield opened
        opened.close()
