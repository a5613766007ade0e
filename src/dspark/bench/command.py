"""What the programs in `benchmarks/` share: help with defaults, bad input as one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from dspark.errors import DsparkError


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description's lines as they are, and each option's default unless it is none or its help tells it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.default is None or action.default is False or "(default" in (action.help or "")
        return action.help if told else super()._get_help_string(action)


def run_program(main: Callable[[], int]) -> NoReturn:
    """Exit with what `main` returns."""
    try:
        sys.exit(main())
    except DsparkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
