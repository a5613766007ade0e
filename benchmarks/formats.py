"""Storage formats of linear layers: what a pass of few rows costs in each, beside the floor of reading the weights.

    python benchmarks/formats.py > formats.json

All linear layers of the target once each, by rows, formats in turns; median milliseconds, bytes of weights, the floor
(bytes / read bandwidth) and the relative error of the outputs against float32. Ours (`dspark.kernels`) keep activations
in float32; `exact` is for each layer the smallest format that holds its weights. Formats of libraries that are not
installed (torchao, onnxruntime with onnx) say so: none is needed by the project. A table goes to stderr, one JSON
object to stdout.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from dspark.bench.command import HelpFormatter, run_program
from dspark.errors import DsparkError
from dspark.kernels.library import kind, library
from dspark.kernels.matrix import Format, pack
from dspark.machine import describe_machine
from dspark.targets.transformers import load_target
from engine import read_bandwidth

ROWS = (1, 2, 4, 8, 16)
Layer = Callable[[Tensor], Any]


class Kernel:
    """Our kernels; format None: the smallest that holds every weight."""

    def __init__(self, weight: Tensor, format: Format | None) -> None:
        if library() is None:
            raise DsparkError("kernels", kind(), "were not built here, or cannot be loaded")
        self.matrix = pack(weight, None, format)

    def __call__(self, x: Tensor) -> Tensor:
        return self.matrix.multiply(x)


def kernel(format: Format | None) -> Callable[[], Callable[[Tensor], Layer]]:
    return lambda: lambda weight: Kernel(weight, format)


def plain(weight: Tensor) -> Layer:
    return lambda x: F.linear(x, weight)


def onednn(weight: Tensor) -> Layer:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def fbgemm_fp16(weight: Tensor) -> Layer:
    """FBGEMM: weights in fp16, widened as they are read; float32 activations and sums."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed)


def bf16(weight: Tensor) -> Layer:
    half = weight.bfloat16()
    return lambda x: F.linear(x.bfloat16(), half)


def onednn_bf16(weight: Tensor) -> Layer:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x.bfloat16(), packed, None, "none", [], "")


def dynamic_int8(engine: str) -> Callable[[Tensor], Layer]:
    """int8 weights by output row; activations quantised at run time, one scale a call."""

    def build(weight: Tensor) -> Layer:
        torch.backends.quantized.engine = engine
        scales, zeros = weight.abs().amax(1).double() / 127, torch.zeros(len(weight), dtype=torch.int64)
        packed = torch.ops.quantized.linear_prepack(
            torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), None
        )
        return lambda x: torch.ops.quantized.linear_dynamic(x, packed, reduce_range=engine != "onednn")

    return build


def int8_weight_only(weight: Tensor) -> Layer:
    """ATen's kernel behind torchao's weight-only int8: bf16 activations."""
    scales = weight.abs().amax(1) / 127
    rounded = (weight / scales[:, None]).round().to(torch.int8)
    return lambda x: torch._weight_int8pack_mm(x.bfloat16(), rounded, scales.bfloat16())


def torchao(config: str) -> Callable[[Tensor], Layer]:
    quantization = importlib.import_module("torchao.quantization")

    def build(weight: Tensor) -> Layer:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16)
        linear.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
        quantization.quantize_(linear, getattr(quantization, config)())
        return lambda x: linear(x.bfloat16())

    return build


def onnxruntime(bits: int) -> Callable[[Tensor], Layer]:
    """One session a layer; bits 32: MatMul, 8 or 4: MatMulNBits in blocks of 32 with float32 activations."""
    onnx, ort = importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    helper = onnx.helper

    def build(weight: Tensor) -> Layer:
        n, k = weight.shape
        values = weight.numpy()
        if bits == 32:
            data = [onnx.numpy_helper.from_array(np.ascontiguousarray(values.T), "w")]
            node = helper.make_node("MatMul", ["x", "w"], ["y"])
        else:
            blocks = values.reshape(n, k // 32, 32)
            low = blocks.min(-1, keepdims=True).clip(max=0)
            scale = (blocks.max(-1, keepdims=True).clip(min=0) - low) / (2**bits - 1) + 1e-12
            zero = np.round(-low / scale)
            q = (np.round(blocks / scale) + zero).clip(0, 2**bits - 1).astype(np.uint8)
            zero = zero.astype(np.uint8)[..., 0]
            if bits == 4:
                q = q[..., 0::2] | (q[..., 1::2] << 4)
                zero = np.pad(zero, ((0, 0), (0, zero.shape[1] % 2)))
                zero = zero[:, 0::2] | (zero[:, 1::2] << 4)
            arrays = {"q": q, "s": scale[..., 0].astype(np.float32).reshape(-1), "z": zero.reshape(-1)}
            data = [onnx.numpy_helper.from_array(np.ascontiguousarray(v), name) for name, v in arrays.items()]
            node = helper.make_node(
                "MatMulNBits", ["x", "q", "s", "z"], ["y"], domain="com.microsoft", K=k, N=n, bits=bits, block_size=32
            )
        kind = onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            [node],
            "linear",
            [helper.make_tensor_value_info("x", kind, ["rows", k])],
            [helper.make_tensor_value_info("y", kind, ["rows", n])],
            data,
        )
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # one pool a session
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return lambda x: session.run(None, {"x": x.numpy()})[0]

    return build


FORMATS: dict[str, Callable[[], Callable[[Tensor], Layer]]] = {
    "ours, exact": kernel(None),
    "ours, int8 weights": kernel("int8"),
    "ours, fp16 weights": kernel("float16"),
    "ours, bf16 weights": kernel("bfloat16"),
    "ours, float32": kernel("float32"),
    "F.linear, float32": lambda: plain,
    "oneDNN packed, float32": lambda: onednn,
    "FBGEMM packed, fp16 weights": lambda: fbgemm_fp16,
    "F.linear, bf16": lambda: bf16,
    "oneDNN packed, bf16": lambda: onednn_bf16,
    "dynamic int8, x86": lambda: dynamic_int8("x86"),
    "dynamic int8, oneDNN": lambda: dynamic_int8("onednn"),
    "int8 weights, bf16 (ATen)": lambda: int8_weight_only,
    "torchao int8 weight-only": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao int8 dynamic": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "onnxruntime, float32": lambda: onnxruntime(32),
    "onnxruntime MatMulNBits, 8": lambda: onnxruntime(8),
    "onnxruntime MatMulNBits, 4": lambda: onnxruntime(4),
}
STORED = {"int8": 1, "fp16": 2, "bf16": 2, "NBits, 8": 1.1875, "NBits, 4": 0.65625}
"""Bytes a weight by a word of the format's name, scales included; 4 for the others."""


class Frozen(nn.Module):
    """All layers in one graph, for torch.compile with constant folding: [rows, in] by width -> the outputs."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)

    def forward(self, inputs: dict[int, Tensor]) -> list[Tensor]:
        return [F.linear(inputs[weight.shape[1]], weight) for weight in self.weights]


def stored_bytes(name: str, values: int) -> float:
    """Bytes of weights a pass reads."""
    return values * next((size for word, size in STORED.items() if word in name), 4)


def measure(weights: Sequence[Tensor], names: Sequence[str], rows: Sequence[int], repeats: int) -> dict[str, Any]:
    """name -> {ms: {rows: median}, error, of ours bytes, stored} or {missing: why}; formats in turns."""
    result: dict[str, Any] = {}
    layers: dict[str, list[Layer]] = {}
    for name in names:
        try:
            build = FORMATS[name]()
            layers[name] = [build(weight) for weight in weights]
            result[name] = {"ms": {}, "error": error(layers[name], weights)}
            if own := [layer.matrix for layer in layers[name] if isinstance(layer, Kernel)]:
                result[name] |= {"bytes": sum(one.bytes for one in own), "stored": sorted({one.format for one in own})}
        except Exception as why:  # each library refuses in its own way
            layers.pop(name, None)
            result[name] = {"missing": f"{type(why).__name__}: {str(why).strip().splitlines()[0][:160]}"}
    for count in rows:
        inputs = {width: torch.randn(count, width) for width in {weight.shape[1] for weight in weights}}
        samples: dict[str, list[float]] = {name: [] for name in layers}
        for turn in range(-2, repeats):
            for name, own in layers.items():
                start = time.perf_counter()
                for layer, weight in zip(own, weights, strict=True):
                    layer(inputs[weight.shape[1]])
                if turn >= 0:
                    samples[name].append(1000 * (time.perf_counter() - start))
        for name, taken in samples.items():
            result[name]["ms"][count] = median(taken)
    return result


def error(layers: Sequence[Layer], weights: Sequence[Tensor]) -> float:
    """Largest over layers of ||y - y32|| / ||y32||, 8 rows of normal inputs."""
    worst = 0.0
    for layer, weight in zip(layers, weights, strict=True):
        x = torch.randn(8, weight.shape[1])
        wanted = F.linear(x.double(), weight.double())
        found = torch.as_tensor(layer(x)).double()
        worst = max(worst, float((found - wanted).norm() / wanted.norm()))
    return worst


def compiled(weights: Sequence[Tensor], rows: Sequence[int], repeats: int) -> dict[str, Any]:
    """torch.compile with freezing: one graph a number of rows."""
    inductor = importlib.import_module("torch._inductor.config")
    found: dict[int, float] = {}
    try:
        with inductor.patch(freezing=True):
            for count in rows:
                torch._dynamo.reset()
                run = torch.compile(Frozen(weights).eval(), dynamic=False)
                inputs = {width: torch.randn(count, width) for width in {weight.shape[1] for weight in weights}}
                samples = []
                for turn in range(-2, repeats):
                    start = time.perf_counter()
                    run(inputs)
                    if turn >= 0:
                        samples.append(1000 * (time.perf_counter() - start))
                found[count] = median(samples)
    except Exception as why:  # no C++ compiler, say
        return {"missing": f"{type(why).__name__}: {str(why).strip().splitlines()[0][:160]}"}
    return {"ms": found}


def show(result: dict[str, Any], rows: Sequence[int], console: Console) -> None:
    """The table for people."""
    head = f"{'ms for all linear layers, rows:':<32}" + "".join(f"{count:>8}" for count in rows)
    for line in (f"{head}{'floor':>8}{'error':>10}", "─" * (50 + 8 * len(rows))):
        console.print(line, highlight=False, soft_wrap=True)
    for name, one in result.items():
        if "missing" in one:
            line = f"{name:<32} not measured: {one['missing']}"
        else:
            times = "".join(f"{one['ms'][count]:8.1f}" for count in rows)
            wrong = f"{one['error']:10.0e}" if "error" in one else ""
            line = f"{name:<32}{times}{one['floor_ms']:8.1f}{wrong}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--target", default="embedded:smollm2-135m", help="folder, hub name or the embedded target")
    parser.add_argument(
        "--formats", help="words of which a format's name must have one, e.g. ours,oneDNN (default: all)"
    )
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="rows of a pass")
    parser.add_argument("--repeats", type=int, default=12, help="turns")
    parser.add_argument("--compile", action="store_true", help="torch.compile with freezing too (minutes)")
    return parser.parse_args(argv)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    warnings.simplefilter("ignore")  # what is deprecated here is what is being tried
    words = args.formats.split(",") if args.formats else [""]
    names = [name for name in FORMATS if any(word in name for word in words)]
    if not names and not args.compile:
        raise DsparkError("formats", args.formats, f"fits none of {', '.join(FORMATS)}")
    rows = [int(part) for part in args.rows.split(",")]
    target = load_target(args.target, packed=False)
    weights = [module.weight.detach() for module in target.model.modules() if type(module) is nn.Linear]
    values, bandwidth, load = sum(weight.numel() for weight in weights), read_bandwidth(), os.getloadavg()[0]
    result = measure(weights, names, rows, args.repeats)
    if args.compile:
        result["torch.compile, frozen, float32"] = compiled(weights, rows, args.repeats)
    for name, one in result.items():
        one["floor_ms"] = 1000 * one.get("bytes", stored_bytes(name, values)) / bandwidth
    show(result, rows, Console(stderr=True))
    about = {"values": values, "layers": len(weights), "read_bytes_per_s": bandwidth}
    machine = {**describe_machine(), "load_average_before": load}
    print(json.dumps({**about, "formats": result, "machine": machine}, indent=1))
    return 0


if __name__ == "__main__":
    run_program(main)
