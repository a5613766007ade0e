"""Builds the CPU kernels, once for each kind of vector registers. Everything else is in pyproject.toml.

Each is optional: where there is no compiler, or it does not know a kind, the package installs without it.
"""

import os
import platform
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = "src/dspark/kernels"
FLAGS = ["-O3", "-std=c++17", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"]
KINDS = {"plain": []}
if platform.machine() in ("x86_64", "AMD64"):
    avx2 = ["-mavx2", "-mfma", "-mf16c"]
    KINDS |= {"avx2": avx2, "avx512": [*avx2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]}


class build_kernels(build_ext):
    """The kernels are plain C functions, called through ctypes: there is no Python module in them to initialise."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def get_export_symbols(self, ext):
        return []


headers = [f"{SOURCES}/{name}.hpp" for name in ("vectors", "matrix", "attention", "pack", "pool")]
kernels = [
    Extension(
        f"dspark.kernels._{kind}",
        [f"{SOURCES}/kernels.cpp"],
        depends=headers,
        extra_compile_args=FLAGS + flags,
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,
    )
    for kind, flags in KINDS.items()
]

setup(ext_modules=[] if sys.platform == "win32" else kernels, cmdclass={"build_ext": build_kernels})
