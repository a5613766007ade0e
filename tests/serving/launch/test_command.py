"""Command lines: published ones as they were published, others built, and what is refused."""

from __future__ import annotations

import json
import shlex

import pytest
from tests.decoding.conftest import draft_config

from dspark.calibration.export import COSTS_FLAG, TEMPERATURES_FLAG
from dspark.errors import DsparkError
from dspark.serving.launch.command import MODE, Wish, compose
from dspark.serving.launch.engines import ENGINES, engine
from dspark.serving.launch.flags import OWN, parse_flags
from dspark.serving.launch.notes import notes
from dspark.training.recipe import load_recipe

# The published commands: flags and values in their order.
KIMI_K2 = [
    ("tensor-parallel-size", 8),
    ("max-model-len", 20000),
    ("trust-remote-code", True),
    ("compilation-config", {"pass_config": {"fuse_allreduce_rms": False}}),
]
KIMI_K3 = [
    ("trust-remote-code", True),
    ("model-path", "moonshotai/Kimi-K3"),
    ("tp-size", 8),
    ("dcp-size", 8),
    ("mem-fraction-static", 0.85),
    ("max-mamba-cache-size", 160),
    ("max-running-requests", 32),
    ("cuda-graph-max-bs-decode", 32),
    ("reasoning-parser", "kimi_k3"),
    ("tool-call-parser", "kimi_k3"),
    ("host", "0.0.0.0"),
    ("port", 30000),
    ("speculative-algorithm", "DSPARK"),
    ("speculative-draft-model-path", "RadixArk/Kimi-K3-DSpark"),
    ("speculative-dspark-block-size", 7),
    ("speculative-draft-attention-backend", "trtllm_mha"),
    ("enable-linear-replayssm-spec", True),
    ("context-length", 1048576),
    ("chunked-prefill-size", 16384),
]


def published(name, key, **changes):
    recipe = load_recipe(name)
    wish = Wish(recipe.target, recipe.serve.draft, **changes)
    return compose(engine(key), wish, recipe.draft_config(), getattr(recipe.serve, key)), recipe.draft_config()


def built(key, config=None, **changes):
    wish = Wish(**{"target": "org/target", "draft": "org/draft", **changes})
    return compose(engine(key), wish, draft_config() if config is None else config)


@pytest.mark.parametrize(
    ("name", "target", "draft"),
    [
        ("kimi-k2.6", "moonshotai/Kimi-K2.6", "novita/kimi-k2.6-dspark"),
        ("kimi-k2.7-code", "moonshotai/Kimi-K2.7-Code", "novita/kimi-k2.7-code-dspark"),
    ],
)
def test_the_published_vllm_commands_come_out_as_they_are(name, target, draft):
    command, _ = published(name, "vllm")
    speculation = {"model": draft, "num_speculative_tokens": 7, "method": "dspark"}
    assert command.words == ("vllm", "serve", target) and not command.environment and not command.dropped
    assert list(command.flags.items()) == [*KIMI_K2, ("speculative-config", speculation)]
    assert list(command.flags["speculative-config"]) == list(speculation)  # JSON in this order, too
    assert json.loads(command.arguments()[-1]) == speculation


def test_the_published_sglang_command_comes_out_as_it_is():
    command, _ = published("kimi-k3", "sglang")
    assert command.words == ("sglang", "serve") and not command.environment and not command.dropped
    assert list(command.flags.items()) == KIMI_K3


@pytest.mark.parametrize(("name", "key"), [("kimi-k2.7-code", "vllm"), ("kimi-k3", "sglang")])
def test_the_text_is_one_flag_a_line_and_a_shell_reads_it_back(name, key):
    command, _ = published(name, key)
    lines = command.text().splitlines()
    assert len(lines) == 1 + len(command.flags) and all(line.endswith(" \\") for line in lines[:-1])
    assert shlex.split(command.text().replace("\\\n", "")) == command.arguments()


def test_what_is_asked_for_takes_the_published_places():
    command, _ = published("kimi-k2.6", "vllm", n=3, tp=16, context=8192, port=9000, adaptive=True)
    assert list(command.flags) == [*(name for name, _ in KIMI_K2), "speculative-config", "port"]
    assert command.flags["tensor-parallel-size"] == 16 and command.flags["max-model-len"] == 8192
    assert command.flags["speculative-config"]["num_speculative_tokens"] == 3
    assert command.flags["speculative-config"]["enable_adaptive_verification"] is True


def test_flags_that_are_gone_are_left_out_and_said():
    recipe = load_recipe("kimi-k3")
    old = {"tp-size": 8, "old-flag": 1, "trust-remote-code": True}
    command = compose(engine("sglang"), Wish(recipe.target, recipe.serve.draft), recipe.draft_config(), old)
    assert command.dropped == ("old-flag",) and "old-flag" not in command.flags
    assert notes(engine("sglang"), command, None)[0].startswith("--old-flag is not in SGLang 0.5.23")
    old = {"compilation-config": {"pass_config": {"fuse_allreduce_rms": False, "gone": True}, "mode": 3}}
    command = compose(engine("vllm"), Wish("t", "o/d"), recipe.draft_config(), old)
    assert command.dropped == ("compilation-config.pass_config.gone",)
    assert command.flags["compilation-config"] == {"pass_config": {"fuse_allreduce_rms": False}, "mode": 3}


def test_every_recipe_is_known_to_the_version():
    for name, key in (("kimi-k2.6", "vllm"), ("kimi-k2.7-code", "vllm"), ("kimi-k3", "sglang")):
        assert not published(name, key)[0].dropped


def test_built_commands():
    assert built("vllm", tp=4, context=200).flags == {
        "tensor-parallel-size": 4,
        "max-model-len": 200,
        "compilation-config": {"pass_config": {"fuse_allreduce_rms": False}},
        "speculative-config": {"model": "org/draft", "num_speculative_tokens": 7, "method": "dspark"},
    }
    assert "compilation-config" not in built("vllm").flags  # nothing is reduced over one device
    assert built("sglang", n=4, port=30000).flags == {
        "model-path": "org/target",
        "port": 30000,
        "speculative-algorithm": "DSPARK",
        "speculative-draft-model-path": "org/draft",
        "speculative-dspark-block-size": 4,
    }
    command = built("llamacpp", target="t.gguf", draft="d.gguf", n=5)
    assert command.arguments() == [
        *["llama-server", "--model", "t.gguf", "--model-draft", "d.gguf"],
        *["--spec-type", "draft-dspark", "--spec-draft-n-max", "5"],
    ]


def test_plain_dflash_is_asked_for_by_its_name():
    plain = draft_config(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False)
    assert built("vllm", plain).flags["speculative-config"]["method"] == "dflash"
    flags = built("sglang", plain, n=6).flags
    assert flags["speculative-algorithm"] == "DFLASH" and flags["speculative-dflash-block-size"] == 7
    assert built("llamacpp", plain).flags["spec-type"] == "draft-dflash"


def test_compact_verification_is_an_environment_variable_of_sglang():
    command = built("sglang", adaptive=True)
    assert command.environment == {MODE: "compact"}
    assert command.text().startswith(f"{MODE}=compact \\\n  sglang serve \\\n")


def exported(folder, temperatures=(1.5,) * 7, tokens=(1, 8), rates=(90.0, 50.0)):
    folder.mkdir()
    table = {"sample_batch_tokens": tokens, "sample_steps_per_sec": rates, "max_batch_tokens": 8}
    (folder / "temperatures.json").write_text(json.dumps({"temperatures": temperatures}))
    (folder / "costs.json").write_text(json.dumps(table))
    return folder


def test_exported_files_are_passed(tmp_path):
    folder = exported(tmp_path / "files", [1.5] * 3)
    command = built("sglang", n=3, adaptive=True, exported=folder)
    assert command.flags[TEMPERATURES_FLAG] == str(folder / "temperatures.json")
    assert command.flags[COSTS_FLAG] == str(folder / "costs.json")
    said = "\n".join(notes(engine("sglang"), command, draft_config(), True, True))
    assert "not passed" not in said and "still verifies" not in said and "measured elsewhere" in said
    (folder / "costs.json").unlink()
    assert COSTS_FLAG not in built("sglang", n=3, adaptive=True, exported=folder).flags
    static = built("sglang", n=3, exported=folder)
    assert "are passed, and not used" in "\n".join(notes(engine("sglang"), static, draft_config(), True))
    without = built("sglang", n=3, adaptive=True)
    assert "temperatures are not passed" in "\n".join(notes(engine("sglang"), without, draft_config(), False, True))
    vllm = built("vllm", n=3, adaptive=True, exported=folder)
    assert vllm.flags == built("vllm", n=3, adaptive=True).flags
    assert "nothing is used" in "\n".join(notes(engine("vllm"), vllm, draft_config(), True))


@pytest.mark.parametrize(
    ("key", "content", "wish", "message"),
    [
        ("sglang", {}, {"n": 3}, "has 7 temperatures, a round 3 draft tokens"),
        ("sglang", {"temperatures": [0.0] * 7}, {}, "temperatures.0: Input should be greater than 0"),
        ("sglang", {"rates": [1.0]}, {}, "must have a rate for each number of tokens"),
        ("sglang", {"tokens": [8, 1]}, {}, "in rising order"),
        ("sglang", {}, {"flags": {COSTS_FLAG: "x"}}, "is given by --exported"),
        ("sglang", {"rates": (50.0, 90.0)}, {}, "rates falling"),
        ("sglang", {"temperatures": ["1.5"] * 7}, {}, "temperatures.0: Input should be a valid number"),
        ("llamacpp", {}, {}, "llama.cpp has no scheduler"),
    ],
)
def test_exported_files_that_do_not_fit(tmp_path, key, content, wish, message):
    folder = exported(tmp_path / "files", **content)
    with pytest.raises(DsparkError, match=message):
        built(key, n=wish.pop("n", 7), exported=folder, **wish)


def test_a_folder_without_exported_files(tmp_path):
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(DsparkError, match=r"has no temperatures.json or costs.json"):
        built("sglang", exported=tmp_path)
    for key in ("sglang", "vllm"):
        for name in ("none", "x" * 300):
            with pytest.raises(DsparkError, match="is no folder"):
                built(key, exported=tmp_path / name)


def test_further_flags_are_checked_and_merged():
    given = parse_flags(
        ["--max-num-seqs=32", "enforce-eager", 'speculative-config={"attention_backend": "TRITON_ATTN"}']
    )
    flags = built("vllm", flags=given).flags
    assert flags["max-num-seqs"] == "32" and flags["enforce-eager"] is True
    assert flags["speculative-config"]["method"] == "dspark"
    assert flags["speculative-config"]["attention_backend"] == "TRITON_ATTN"
    with pytest.raises(DsparkError, match=r"'max-num-sekvs': is not known to vLLM 0\.32\.0; it has max-num-seqs"):
        built("vllm", flags={"max-num-sekvs": "1"})
    with pytest.raises(DsparkError, match=r"'speculative-config\.modle': is not known to vLLM 0.32.0; it has mode"):
        built("vllm", flags={"speculative-config": {"modle": "x"}})
    for text in ("", "--", "a b=1"):
        with pytest.raises(DsparkError, match="must be NAME"):
            parse_flags([text])
    with pytest.raises(DsparkError, match="is not JSON"):
        parse_flags(["speculative-config={method}"])


@pytest.mark.parametrize(
    ("key", "changes", "words"),
    [
        ("vllm", {"n": 8}, r"n = 8: must be 1\.\.7"),
        ("vllm", {"n": 0}, r"n = 0: must be 1\.\.7"),
        ("vllm", {"tp": 0}, "tp = 0: must be at least 1"),
        ("sglang", {"context": 0}, "context = 0: must be at least 1"),
        ("vllm", {"context": 257}, "context = 257: must be at most 256"),
        ("sglang", {"context": 257}, "context = 257: must be at most 256"),
        ("llamacpp", {"flags": {"ctx-size": "257"}}, "context = 257: must be at most 256"),
        ("vllm", {"port": 70000}, r"port = 70000: must be 1\.\.65535"),
        ("llamacpp", {"tp": 2}, "llama.cpp splits a model"),
        ("llamacpp", {"adaptive": True}, "llama.cpp has no scheduler"),
        ("vllm", {"target": "-x"}, r"target = '-x': would be taken for a flag; write \./-x"),
        ("vllm", {"draft": "--a/b"}, "draft = '--a/b': would be taken for a flag"),
        ("sglang", {"adaptive": True, "flags": {"dcp-size": "8"}}, "with dcp-size 8 SGLang verifies statically"),
    ],
)
def test_what_cannot_be_is_refused(key, changes, words):
    with pytest.raises(DsparkError, match=words):
        built(key, **changes)


@pytest.mark.parametrize(
    ("key", "flag", "words"),
    [
        ("vllm", "max-model-len", "max-model-len = None: must be a whole number, 32k, 32K or auto"),
        ("vllm", "max-model-len=1e3", "max-model-len = '1e3': must be a whole number"),
        ("vllm", "max-model-len=32k", "context = 32000: must be at most 256"),
        ("vllm", "max-model-len=1K", "context = 1024: must be at most 256"),
        ("vllm", "max-model-len=0", "context = 0: must be at least 1"),
        ("sglang", "context-length=32k", "context-length = '32k': must be a whole number"),
        ("sglang", "dcp-size=x", "dcp-size = 'x': must be a whole number"),
        ("sglang", "dcp-size", "dcp-size = None: must be a whole number"),
        ("vllm", "tensor-parallel-size=auto", "'tensor-parallel-size': is set by launch itself; use --tp"),
        ("vllm", "port=99999999", "'port': is set by launch itself; use --port"),
        ("vllm", "speculative-config=5", "speculative-config = '5': must be a JSON object"),
        ("vllm", "speculative-config=[1]", "must be a JSON object"),
        ("vllm", "speculative-config", "speculative-config = True: must be a JSON object"),
        ("vllm", 'speculative-config={"num_speculative_tokens": 99}', r"num_speculative_tokens': is set .*; use -n"),
        ("vllm", 'speculative-config={"model": "/other"}', "model': is set by launch itself; use --draft"),
        ("vllm", "spec-tokens=99", "use -n"),
        ("vllm", 'speculative-config={"a":' + "[" * 100000, "is not JSON"),
        ("sglang", "speculative-dspark-block-size=99", "use -n"),
        ("sglang", "model-path=/other", "use --target"),
        ("llamacpp", "spec-draft-n-max=99", "use -n"),
    ],
)
def test_flags_that_cannot_be_are_one_line(key, flag, words):
    with pytest.raises(DsparkError, match=words):
        built(key, flags=parse_flags([flag]))


def test_contexts_as_the_engines_read_them():
    assert (
        built("vllm", draft_config(max_position_embeddings=40000), flags={"max-model-len": "32k"}).flags[
            "max-model-len"
        ]
        == "32k"
    )
    for key, name, value in (("vllm", "max-model-len", "auto"), ("llamacpp", "ctx-size", "0")):
        command = built(key, flags={name: value})
        assert command.flags[name] == value
        assert any(note.startswith("without --") for note in notes(engine(key), command, draft_config()))


def test_published_values_that_are_false_or_null_are_left_out():
    published = {"trust-remote-code": False, "max-model-len": None, "enforce-eager": True}
    command = compose(engine("vllm"), Wish("t", "o/d"), draft_config(), published)
    assert list(command.flags) == ["enforce-eager", "speculative-config"]
    with pytest.raises(DsparkError, match=r"port = 99999999: must be 1\.\.65535"):
        compose(engine("vllm"), Wish("t", "o/d"), draft_config(), {"port": 99999999})
    with pytest.raises(DsparkError, match="tensor-parallel-size = 'x': must be a whole number"):
        compose(engine("vllm"), Wish("t", "o/d"), draft_config(), {"tensor-parallel-size": "x"})


def test_every_flag_that_launch_sets_is_known_to_the_engine():
    for key, own in OWN.items():
        for name in own:
            place, _, last = name.rpartition(".")
            assert last in (engine(key).keys[place] if place else engine(key).flags), name


def test_a_draft_that_is_elsewhere_needs_n_and_adaptive_needs_a_head():
    with pytest.raises(DsparkError, match="give -n"):
        compose(engine("vllm"), Wish("org/target", "org/draft"), None)
    assert compose(engine("vllm"), Wish("org/target", "org/draft", n=9), None).flags
    headless = draft_config(enable_confidence_head=False)
    with pytest.raises(DsparkError, match="confidence head, which this draft has not"):
        built("sglang", headless, adaptive=True)
    assert built("vllm", headless, adaptive=True)  # estimates from the draft's logits there
    with pytest.raises(DsparkError, match="must be one of vllm, sglang, llamacpp"):
        engine("tgi")


def test_notes_follow_the_command():
    command, config = published("kimi-k3", "sglang")
    text = "\n".join(notes(engine("sglang"), command, config))
    for words in ("beyond the 65,536 tokens", "16.0 x 65,536 = 1,048,576", f"{MODE} must stay at static"):
        assert words in text
    command, config = published("kimi-k2.6", "vllm")
    text = "\n".join(notes(engine("vllm"), command, config))
    for words in (
        "fuse_allreduce_rms is off",
        "FlashAttention 3",
        "num_speculative_tokens is always given",
        "--adaptive",
    ):
        assert words in text
    assert "fuse_allreduce_rms" not in "\n".join(notes(engine("vllm"), built("vllm"), draft_config()))
    text = "\n".join(notes(engine("sglang"), built("sglang", adaptive=True), draft_config()))
    assert "speculative-dspark-sps-table-path" in text and "without --context-length SGLang" in text
    assert "draft_n" in "\n".join(notes(engine("llamacpp"), built("llamacpp"), draft_config()))


def test_the_flag_lists_name_what_they_were_read_from():
    found = {key: engine(key) for key in ENGINES}
    assert {key: one.version for key, one in found.items()} == {
        "vllm": "0.32.0",
        "sglang": "0.5.23",
        "llamacpp": "b11549",
    }
    assert all(len(one.flags) > 300 for one in found.values())
    assert "draft-max" not in found["llamacpp"].flags  # answered with "has been removed"
