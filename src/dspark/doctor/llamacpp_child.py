"""Runs under an interpreter that has `xllamacpp`: times answers to prompts of ids, plainly and with a draft, in turns.

python llamacpp_child.py TARGET.gguf THREADS CONTEXT DRAFT.gguf < {"prompts": [[1, 2]], "tokens": 48, "widths": [3]}

prints one JSON line: the build, and for each width (0 is plain) llama.cpp's own timings of every prompt. A failed
assert in the library ends the process, which is why it is one of its own.
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
    target, threads, context, draft = sys.argv[1:]
    asked = json.load(sys.stdin)
    servers = {n: _server(target, int(threads), int(context), draft, n) for n in (0, *asked["widths"])}
    for server in servers.values():
        _timings(server, asked["prompts"][0], 8)  # a warm-up
    found: dict[int, list[dict[str, float]]] = {n: [] for n in servers}
    for turn, ids in enumerate(asked["prompts"]):
        for n in list(servers)[:: -1 if turn % 2 else 1]:
            found[n].append(_timings(servers[n], ids, asked["tokens"]))
    print(json.dumps({"build": str(xllamacpp.BUILD_INFO), "timings": found}), file=out, flush=True)


def _server(target: str, threads: int, context: int, draft: str, n: int) -> "xllamacpp.Server":
    params = xllamacpp.CommonParams()
    params.model.path = target
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_ctx, params.n_parallel, params.cache_prompt = context, 1, False
    params.verbosity = 0
    if n:
        speculative = params.speculative.draft
        speculative.mparams.path, speculative.n_max = draft, n
        speculative.cpuparams.n_threads = speculative.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def _timings(server: "xllamacpp.Server", ids: "list[int]", tokens: int) -> "dict[str, float]":
    body = {"prompt": ids, "n_predict": tokens, "temperature": 0.0, "cache_prompt": False}
    url, kind = f"{server.listening_address}/completion", {"Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), kind)) as response:
        return json.loads(response.read())["timings"]


if __name__ == "__main__":
    main()
