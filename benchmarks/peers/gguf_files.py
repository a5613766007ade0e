"""The embedded target in f16 for llama.cpp; the draft is written by `dspark.checkpoints.gguf`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize

from dspark.checkpoints.gguf import copy_field, finish


def write_target(source: Path, destination: Path) -> None:
    """The weights of a quantised GGUF file in f16 (vectors in f32), everything else as it is."""
    reader = GGUFReader(source)
    writer = GGUFWriter(destination, str(reader.fields["general.architecture"].contents()))
    for key in reader.fields:
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            copy_field(reader, writer, key)
    writer.add_file_type(1)  # mostly f16
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32 if values.ndim == 1 else np.float16))
    finish(writer)
