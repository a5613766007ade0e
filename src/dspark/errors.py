"""The one error a user is meant to see: one line, no traceback, exit code 2."""

from __future__ import annotations


class DsparkError(Exception):
    """Bad input. The message names the field, its value and what would be right."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        one_line = " ".join(remedy.split())  # it may quote another library's error
        super().__init__(f"{field} = {value!r}: {one_line}")
