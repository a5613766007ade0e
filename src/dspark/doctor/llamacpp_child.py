"""Runs under an interpreter that has `xllamacpp`: times answers to prompts of ids, plainly or with a draft.

python llamacpp_child.py TARGET.gguf THREADS CONTEXT [DRAFT.gguf N]   < {"prompts": [[ids], ...], "tokens": 64}

prints one JSON line: the build, and of every prompt llama.cpp's own timings and the ids. A failed assert in the library
ends the process, which is why it is one of its own.
"""

import json
import os
import sys
from urllib.request import Request, urlopen

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the cores are shared

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
    asked = json.load(sys.stdin)
    answers = [_answer(server, ids, asked["tokens"]) for ids in asked["prompts"]]
    print(json.dumps({"build": str(xllamacpp.BUILD_INFO), "answers": answers}), file=out, flush=True)


def _answer(server: "xllamacpp.Server", ids: "list[int]", tokens: int) -> "dict[str, object]":
    body = {"prompt": ids, "n_predict": tokens, "temperature": 0.0, "return_tokens": True, "cache_prompt": False}
    request = Request(
        f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request) as response:
        answer = json.loads(response.read())
    return {"ids": answer["tokens"], "timings": answer["timings"]}


if __name__ == "__main__":
    main()
