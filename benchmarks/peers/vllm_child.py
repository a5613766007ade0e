"""Runs under an interpreter that has vLLM for CPUs: answers prompts of ids, one JSON line in, one out.

python vllm_child.py MODEL_FOLDER THREADS CONTEXT
"""

import json
import os
import sys
import time


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is not ours
    model, threads, context = sys.argv[1:]
    os.environ.update(
        OMP_NUM_THREADS=threads,
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # the cores are shared with those who wait for their turn
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_USE_V2_MODEL_RUNNER="0",  # the other one needs a Triton that CPUs do not have
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    import vllm  # reads the environment

    engine = vllm.LLM(model, dtype="float32", enforce_eager=True, max_model_len=int(context), max_num_seqs=1)
    print(json.dumps({"version": vllm.__version__}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        settings = vllm.SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"])
        start = time.perf_counter()
        [answer] = engine.generate({"prompt_token_ids": asked["ids"]}, settings, use_tqdm=False)
        seconds = time.perf_counter() - start
        print(json.dumps({"ids": list(answer.outputs[0].token_ids), "seconds": seconds}), file=out, flush=True)


if __name__ == "__main__":
    main()
