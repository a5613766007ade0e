"""A stream means the same under any split of its bytes, and never shows half a character."""

from __future__ import annotations

import json

import pytest
import torch
from openai._streaming import SSEDecoder
from tests.serving.conftest import Live, events_of
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.decoding.engine import Engine
from dspark.decoding.grammar import Constraint
from dspark.decoding.request import Request, SamplingSettings
from dspark.targets.transformers import load_target

WORDS = "(é|🙂|日本|a|\u2028){8}"  # characters of 1 to 4 bytes, and a line break of Unicode's
ASKED = {"guided_regex": WORDS, "temperature": 1.0, "seed": 5, "max_tokens": 60}


@pytest.fixture(scope="module")
def bytes_target(tmp_path_factory, byte_tokenizer):
    """A random target that writes bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        config = LlamaConfig(
            vocab_size=len(byte_tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=256,
            eos_token_id=0,
            dtype="float32",
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return load_target(str(folder))


@pytest.fixture(scope="module")
def bytes_live(bytes_target):
    server = Live(bytes_target, None, n=None)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def expected(bytes_target):
    request = Request(
        bytes_target.tokenizer("ü").input_ids,
        60,
        SamplingSettings(1.0, seed=5),
        constraint=Constraint("regex", WORDS),
        logprobs=1,
    )
    (_, result), = Engine(bytes_target).run([request])  # fmt: skip
    assert any(len(character.encode()) > 2 for character in result.text)
    return result


def test_every_chunk_is_whole_characters(bytes_live, expected):
    for rounds in (False, True):
        chunks = bytes_live.stream(prompt="ü", **ASKED, rounds=rounds)
        pieces = [chunk["choices"][0]["text"] for chunk in chunks]
        assert "".join(pieces) == expected.text and "\ufffd" not in expected.text
        assert all(piece.encode().decode() == piece for piece in pieces)
    said = [token for chunk in chunks for token in chunk["choices"][0]["round"]["tokens"]]
    assert [token["id"] for token in said] == expected.output_ids
    assert "".join(token["text"] for token in said) == expected.text
    assert "" in [token["text"] for token in said]


def test_an_answer_that_ends_inside_a_character(bytes_live, bytes_target):
    first = expected_cut = None
    for limit in range(1, 30):
        reply = bytes_live.post(prompt="ü", **(ASKED | {"max_tokens": limit})).json()["choices"][0]["text"]
        chunks = bytes_live.stream(prompt="ü", **(ASKED | {"max_tokens": limit}), rounds=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == reply
        tokens = [token["text"] for chunk in chunks for token in chunk["choices"][0]["round"]["tokens"]]
        assert "".join(tokens) == reply
        expected_cut = expected_cut or reply.endswith("\ufffd")
        first = first or reply
    assert expected_cut


def test_bytes_of_tokens(bytes_live, expected):
    said = bytes_live.post(prompt="ü", **ASKED, logprobs=1).json()["choices"][0]["logprobs"]
    raw = b""
    for token in said["tokens"]:
        hexadecimal = token.removeprefix("bytes:").replace("\\x", "")
        raw += bytes.fromhex(hexadecimal) if token.startswith("bytes:") else token.encode()
    assert raw.decode().startswith(expected.text)
    assert len(said["tokens"]) == len(expected.output_ids) == len(said["text_offset"])
    assert said["text_offset"] == sorted(said["text_offset"])


def test_any_split_of_the_bytes_means_the_same(bytes_live, expected):
    options = {"stream_options": {"include_usage": True}, "rounds": True, "logprobs": 2}
    raw = bytes_live.post(prompt="ü", stream=True, **ASKED, **options).content
    whole = events_of(raw)
    assert raw.isascii()

    def read(parts):
        return [event.data for event in SSEDecoder().iter_bytes(iter(parts))]

    assert read([raw]) == whole
    assert read([raw[i : i + 1] for i in range(len(raw))]) == whole
    for at in range(1, len(raw), 7):
        assert read([raw[:at], raw[at:]]) == whole
    for size in (2, 3, 5, 64, 1000):
        assert read([raw[i : i + size] for i in range(0, len(raw), size)]) == whole
    chunks = [json.loads(event) for event in whole[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == expected.text
