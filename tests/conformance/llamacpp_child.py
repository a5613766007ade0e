"""Runs under an interpreter that has `xllamacpp`: answers prompts of ids, one JSON line in, one out.

python llamacpp_child.py '{"target": FILE, "draft": FILE or null, "n": 7, "threads": 1, "context": 512}'

The answer is streamed with timings at every token, whose draft counters tell which tokens came from one round.
"""

import json
import os
import sys
from importlib.metadata import version
from urllib.request import Request, urlopen

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the cores are shared with those who wait for their turn

import xllamacpp


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is not ours
    asked = json.loads(sys.argv[1])
    params = xllamacpp.CommonParams()
    params.model.path = asked["target"]
    params.n_ctx, params.n_parallel, params.cache_prompt = asked["context"], 1, False
    speculative = params.speculative.draft
    if asked["draft"]:
        speculative.mparams.path, speculative.n_max = asked["draft"], asked["n"]
    for one in (params, speculative):
        one.cpuparams.n_threads = one.cpuparams_batch.n_threads = asked["threads"]
        one.cache_type_k = one.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    print(json.dumps({"version": version("xllamacpp")}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(server.listening_address, **json.loads(line))), file=out, flush=True)


def answer(address, ids, max_tokens):
    """ids; of each the counters [drafted, accepted] when it was sent; and the counters at the end."""
    body = {
        "prompt": ids,
        "n_predict": max_tokens,
        "temperature": 0.0,
        "return_tokens": True,
        "cache_prompt": False,
        "stream": True,
        "timings_per_token": True,
    }
    headers = {"Content-Type": "application/json"}
    made, counters, end = [], [], None
    with urlopen(Request(f"{address}/completion", json.dumps(body).encode(), headers)) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line[6:])
            timings = part.get("timings", {})
            end = [timings["draft_n"], timings["draft_n_accepted"]] if "draft_n" in timings else None
            made += part.get("tokens", [])
            counters += [end] * len(part.get("tokens", []))
    return {"ids": made, "counters": counters, "end": end}


if __name__ == "__main__":
    main()
