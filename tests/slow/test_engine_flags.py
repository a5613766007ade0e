"""Our lists of flags against the engines' own parsers, where an interpreter that has the engine is named:
DSPARK_VLLM_PYTHON, DSPARK_SGLANG_PYTHON."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from dspark.serving.launch.engines import engine

pytestmark = pytest.mark.slow

READ = {
    "vllm": """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps([one for action in parser._actions for one in action.option_strings]))
""",
    "sglang": """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps([one for action in parser._actions for one in action.option_strings]))
""",
}


@pytest.mark.parametrize("key", READ)
def test_the_lists_are_what_the_parsers_say(key: str) -> None:
    python = os.environ.get(f"DSPARK_{key.upper()}_PYTHON")
    if python is None:
        pytest.skip(f"DSPARK_{key.upper()}_PYTHON names no interpreter with {engine(key).name} {engine(key).version}")
    done = subprocess.run([python, "-c", READ[key]], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    own = {one[2:] for one in json.loads(done.stdout.splitlines()[-1]) if one.startswith("--")}
    assert own - {"help"} == engine(key).flags
