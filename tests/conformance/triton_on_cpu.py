"""Triton on a CPU: a backend that compiles nothing, so that every kernel runs in Triton's own interpreter.

vLLM's model runner V2, the only one that has DSpark, wants Triton, and the Triton of the package index knows no CPU.
Import this before vLLM, in every process (a spawned one imports the main module first).
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton import backends
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    """What Triton and vLLM ask of a device."""

    @classmethod
    def is_active(cls):
        return True

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_target(self):
        return GPUTarget("cpu", 0, 0)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError("only compiled kernels have C++ types")

    def get_benchmarker(self):
        raise NotImplementedError("an interpreter is not to be timed")


backends.backends["cpu"] = backends.Backend(compiler=BaseBackend, driver=InterpreterDriver)
