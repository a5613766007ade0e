"""Runs under an interpreter that has `xllamacpp`: answers prompts of ids, one JSON line in, one out.

python llamacpp_child.py TARGET.gguf THREADS CONTEXT [DRAFT.gguf N]
"""

import json
import os
import sys
import time
from urllib.request import Request, urlopen

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the cores are shared with those who wait for their turn

import xllamacpp


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is not ours
    target, threads, context, *draft = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = target
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.n_ctx, params.n_parallel, params.cache_prompt = int(context), 1, False
    params.verbosity = 0
    if draft:
        speculative = params.speculative.draft
        speculative.mparams.path, speculative.n_max = draft[0], int(draft[1])
        speculative.cpuparams.n_threads = speculative.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)
    url = f"{server.listening_address}/completion"
    print(json.dumps({"version": xllamacpp.BUILD_INFO}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        body = {
            "prompt": asked["ids"],
            "n_predict": asked["max_tokens"],
            "temperature": 0.0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        start = time.perf_counter()
        data = json.dumps(body).encode()
        with urlopen(Request(url, data, {"Content-Type": "application/json"})) as response:
            answer = json.loads(response.read())
        seconds = time.perf_counter() - start
        found = {"ids": answer["tokens"], "seconds": seconds, "timings": answer["timings"]}
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
