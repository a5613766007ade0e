"""What every room's tests share: a small random target on disk, the embedded one, fixed seeds, few threads."""

from __future__ import annotations

import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dspark import cli
from dspark.targets.embedded import ensure_embedded

torch.set_num_threads(min(2, torch.get_num_threads()))

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
CHARACTERS = ["\n", *(string.digits + string.ascii_letters + string.punctuation + " ")]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 4-layer LlamaForCausalLM (d 32, untied, 100 ids, 256 positions), its tokenizer and a chat template.

    One id per printable character after four special ones: 0 unknown/end of text, 1 turn start, 2 turn end (the stop
    id), 3 a mask that no text contains. The weights are large enough that greedy choices are no ties.
    """
    folder = tmp_path_factory.mktemp("tiny-llama")
    vocabulary = {token: index for index, token in enumerate(SPECIAL + CHARACTERS)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        config = LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            initializer_range=0.3,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            dtype="float32",
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    _tiny_tokenizer(vocabulary).save_pretrained(folder)
    return folder


def _tiny_tokenizer(vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL[0]))
    words.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    words.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        mask_token=SPECIAL[3],
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def embedded_path() -> Iterator[Path]:
    """The embedded target, converted if it is not in the cache yet; a missing package fails with the way to get it."""
    yield ensure_embedded()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Call the command in this process: (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dspark", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        seen = capsys.readouterr()
        return int(stop.value.code or 0), seen.out, seen.err

    return call


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id per UTF-8 byte: every longer character is made by several ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({symbol: i for i, symbol in enumerate(["<end>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=False)
