"""The one error a user is meant to see: one line, no traceback, exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path


class DsparkError(Exception):
    """Bad input. The message names the field, its value and what would be right."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        one_line = " ".join(remedy.split())  # it may quote another library's error
        super().__init__(f"{field} = {value!r}: {one_line}")


def pip_install(packages: str) -> str:
    """The command that installs them where this program runs, which the `pip` of the shell need not do."""
    python, here = Path(sys.executable), Path.cwd()
    return f"{python.relative_to(here) if python.is_relative_to(here) else python} -m pip install {packages}"
