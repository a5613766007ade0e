"""Runs under an interpreter that has vLLM for CPUs: answers batches of prompts, one JSON line in, one out.

python vllm_child.py '{"model": FOLDER, "draft": FOLDER or null, "n": 7, "method": "dspark", "runner": 2, ...}'
"""

import json
import os
import sys
import time


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is not ours
    asked = json.loads(sys.argv[1])
    os.environ.update(
        OMP_NUM_THREADS=str(asked["threads"]),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_USE_V2_MODEL_RUNNER=str(asked["runner"] - 1),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
    )
    if asked["runner"] == 2:
        import triton_on_cpu  # noqa: F401
    import vllm
    import vllm_parts

    speculative = None
    if asked["draft"]:
        speculative = {
            "method": asked["method"],
            "model": asked["draft"],
            "num_speculative_tokens": asked["n"],
        }
    engine = vllm.LLM(
        asked["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=asked["context"],
        max_num_seqs=asked["batch"],
        max_num_batched_tokens=asked["context"],
        enable_prefix_caching=False,
        async_scheduling=False,
        scheduler_cls=vllm_parts.NotingScheduler,
        worker_cls="vllm_parts.Worker",
        speculative_config=speculative,
    )
    print(json.dumps({"version": vllm.__version__}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(vllm, vllm_parts, engine, json.loads(line))), file=out, flush=True)


def answer(vllm, parts, engine, asked):
    """The prompts' ids and rounds [drafts, tokens made], in order."""
    parts.norm_context_keys(asked["norm_per_layer"])
    parts.ROUNDS.clear()
    settings = vllm.SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"])
    start = time.perf_counter()
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    answers = engine.generate(prompts, settings, use_tqdm=False)
    seconds = time.perf_counter() - start
    rounds = {name.split("-")[0]: noted for name, noted in parts.ROUNDS.items()}  # a suffix is added inside
    return {
        "seconds": seconds,
        "answers": [
            {"ids": list(one.outputs[0].token_ids), "rounds": rounds.get(one.request_id, [])} for one in answers
        ],
    }


if __name__ == "__main__":
    main()
