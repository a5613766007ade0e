"""Runs under an interpreter that has vLLM for CPUs: vLLM's own OpenAI server with model runner V2.

python vllm_server.py --model FOLDER --port 8000 ...   # its own arguments
"""

import os

os.environ.update(
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_USE_V2_MODEL_RUNNER="1",
    HF_HUB_OFFLINE="1",
)

import triton_on_cpu  # noqa: F401  (at top level: the engine's process is spawned, and imports this file first)

if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
