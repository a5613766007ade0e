"""The ragged pass, the taps and the head, against plain Transformers."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import HFValidationError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from dspark.errors import DsparkError
from dspark.targets.packed import PackedLinear, pack_linears
from dspark.targets.transformers import TransformersTarget, load_target, load_tokenizer

SMALL = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def reference(tiny_llama_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def target(tiny_llama_folder):
    return load_target(str(tiny_llama_folder))


def ids_of(count, seed, vocab=90):
    return torch.randint(5, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def test_packed_layers_are_as_near_to_the_true_values_as_plain_ones(target, reference, tiny_llama_folder):
    """Sums in another order round otherwise; what counts is the distance to the same model in float64."""
    ids = ids_of(17, 0)
    exact = AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.float64)
    with torch.no_grad():
        true, plain = (m(ids[None], output_hidden_states=True).hidden_states for m in (exact, reference))
    taps = target.forward([(target.new_state(32), ids)], taps=[0, 1, 2]).taps.split(32, dim=-1)
    for tap in range(3):
        wanted = true[tap + 1][0]
        assert (taps[tap] - wanted).norm() < 2 * (plain[tap + 1][0] - wanted).norm()


def test_taps_are_the_layer_outputs_exactly(tiny_llama_folder, reference):
    """Tap id = 0-based layer, value after the layer; an off-by-one costs only a few per cent acceptance unseen."""
    ids = ids_of(17, 0)
    seen = {}
    hooks = [
        layer.register_forward_hook(
            lambda _m, _a, out, i=i: seen.__setitem__(i, out[0] if isinstance(out, tuple) else out)
        )
        for i, layer in enumerate(reference.model.layers)
    ]
    expected = reference(ids[None], output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    target = load_target(str(tiny_llama_folder), packed=False)
    out = target.forward([(target.new_state(32), ids)], taps=[0, 1, 2, 3])
    for tap in range(4):
        mine = out.taps[:, tap * 32 : (tap + 1) * 32]
        torch.testing.assert_close(mine, seen[tap].reshape(17, 32), rtol=1e-5, atol=1e-5)
        if tap < 3:
            torch.testing.assert_close(mine, expected.hidden_states[tap + 1][0], rtol=1e-5, atol=1e-5)
            assert not torch.allclose(mine, expected.hidden_states[tap][0], atol=1e-3)
    assert torch.equal(out.taps[:, 96:], out.last_hidden)


def test_the_head_rebuilds_the_targets_own_logits(target):
    out = target.forward([(target.new_state(32), ids_of(17, 1))])
    torch.testing.assert_close(target.head(out.last_hidden), out.logits, rtol=1e-5, atol=1e-5)
    rows = torch.tensor([3, 40, 7])
    torch.testing.assert_close(target.head(out.last_hidden, rows), out.logits[:, rows], rtol=1e-5, atol=1e-5)


def test_a_ragged_batch_equals_its_requests_alone(target, reference):
    lengths = (3, 17, 1, 9)
    prompts = [ids_of(n, n) for n in lengths]
    states = [target.new_state(40) for _ in lengths]
    first = target.forward(list(zip(states, prompts, strict=True)))
    more = [ids_of(n, 50 + n) for n in (2, 1, 4, 3)]
    second = target.forward(list(zip(states, more, strict=True)), taps=[1])
    start_first = start_second = 0
    for prompt, extra, state in zip(prompts, more, states, strict=True):
        assert state.length == len(prompt) + len(extra)
        whole = reference(torch.cat([prompt, extra])[None]).logits[0]
        mine = torch.cat(
            [
                first.logits[start_first : start_first + len(prompt)],
                second.logits[start_second : start_second + len(extra)],
            ]
        )
        torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-4)
        start_first += len(prompt)
        start_second += len(extra)


def test_rollback_leaves_no_trace(target):
    ids, rest = ids_of(12, 3), ids_of(4, 4)
    state, fresh = target.new_state(40), target.new_state(40)
    target.forward([(state, ids)])
    target.forward([(state, ids_of(7, 5))])
    state.truncate(12)
    after = target.forward([(state, rest)]).logits
    target.forward([(fresh, ids)])
    torch.testing.assert_close(after, target.forward([(fresh, rest)]).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(DsparkError, match="length"):
        state.truncate(99)


def test_a_failed_pass_changes_nothing(target):
    state = target.new_state(8)
    target.forward([(state, ids_of(6, 6))])
    with pytest.raises(DsparkError, match="capacity"):
        target.forward([(state, ids_of(3, 7))])
    assert state.length == 6
    with pytest.raises(DsparkError, match="target_layer_ids = 4"):
        target.forward([(state, ids_of(1, 7))], taps=[4])
    assert state.length == 6


def test_last_logits_only(target):
    ids = [ids_of(5, 8), ids_of(9, 9)]
    every = target.forward([(target.new_state(16), i) for i in ids]).logits
    last = target.forward([(target.new_state(16), i) for i in ids], logits="last").logits
    torch.testing.assert_close(last, every[[4, 13]])


def test_packed_linear_layers_give_the_same(tiny_llama_folder, target):
    plain = load_target(str(tiny_llama_folder), packed=False)
    assert any(isinstance(m, PackedLinear) for m in target.model.modules())
    assert not any(isinstance(m, PackedLinear) for m in plain.model.modules())
    for count in (1, 8, 40):
        ids = ids_of(count, count)
        ours = target.forward([(target.new_state(64), ids)]).logits
        torch.testing.assert_close(ours, plain.forward([(plain.new_state(64), ids)]).logits, rtol=1e-4, atol=1e-4)


def test_packing_leaves_other_dtypes_alone():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 4, dtype=torch.float64))
    assert pack_linears(module) == 0


@pytest.mark.parametrize("kind", ["qwen3", "mistral-sliding", "gemma2", "qwen3-tied"])
def test_other_architectures(kind, tiny_llama_folder, target):
    """Sliding windows, soft caps, tied heads, scaled embeddings: whatever the architecture does, we do."""
    if kind.startswith("qwen3"):
        model = Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=kind.endswith("tied")))
    elif kind == "gemma2":
        model = Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=6, query_pre_attn_scalar=8))
    else:
        model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=6))
    model = model.eval()
    model.set_attn_implementation("eager")
    ids = ids_of(20, 10, 80)
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    ours = TransformersTarget("small", model, target.tokenizer)
    state = ours.new_state(32)
    parts = [ours.forward([(state, part)]) for part in ids.split([9, 1, 7, 3])]
    torch.testing.assert_close(torch.cat([p.logits for p in parts]), expected, rtol=1e-4, atol=1e-4)
    rebuilt = ours.head(torch.cat([p.last_hidden for p in parts]))
    torch.testing.assert_close(rebuilt, expected, rtol=1e-4, atol=1e-4)


def test_missing_folder_and_bad_file(tmp_path, tiny_llama_folder):
    with pytest.raises(DsparkError, match="no such folder"):
        load_target(str(tmp_path / "nothing"))
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_llama_folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(DsparkError, match="cannot be loaded"):
        load_target(str(broken))


def test_a_misspelt_embedded_target_is_told_the_name():
    """The hub would be asked for it, and answer with its own rules for names."""
    with pytest.raises(DsparkError, match="there is embedded:smollm2-135m"):
        load_target("embedded:smollm")


@pytest.mark.parametrize("name", ["gpt2", "someone/no-such-model"])
@pytest.mark.parametrize("load", [load_target, load_tokenizer])
def test_a_hub_name_without_a_network_is_not_called_a_folder(monkeypatch, load, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DsparkError, match=f"target = '{name}': is neither a folder nor in the local cache, and"):
        load(name)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (OSError("no route"), "is neither a folder nor in the local cache, and the hub could not be reached"),
        (HFValidationError("a name cannot be this"), "cannot be loaded \\(asked\\)"),
        (None, "cannot be loaded \\(asked\\)"),
    ],
)
def test_the_hub_is_asked_once_before_transformers_asks_it_many_times(monkeypatch, outcome, said):
    def model_info(self, name, timeout):
        if outcome is not None:
            raise outcome

    def asked(name, **kwargs):
        raise ValueError("asked")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", asked)
    with pytest.raises(DsparkError, match=said):
        load_tokenizer("someone/no-such-model")


def test_a_tokenizer_alone_needs_no_weights(tmp_path, tiny_llama_folder):
    for file in tiny_llama_folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = load_target(str(tiny_llama_folder)).tokenizer
    assert load_tokenizer(str(tmp_path)).decode([36, 37]) == whole.decode([36, 37])


def test_weights_that_lack_a_tensor_are_refused(tmp_path, tiny_llama_folder):
    """Transformers would make the tensor up and only warn."""
    folder = tmp_path / "lacking"
    shutil.copytree(tiny_llama_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DsparkError, match="down_proj"):
        load_target(str(folder))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (
            lambda: MambaForCausalLM(MambaConfig(vocab_size=80, hidden_size=32, num_hidden_layers=4)),
            "max_position_embeddings",
        ),
        (lambda: GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=2)), "s_aux"),
        (lambda: StableLmForCausalLM(StableLmConfig(**SMALL)), "attention"),
        (lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL, num_experts=2)), "linear_attention"),
    ],
    ids=["no attention", "attention sinks", "arguments not handed on", "linear attention"],
)
def test_models_that_would_be_run_wrongly_are_refused(model, names):
    tokenizer = SimpleNamespace(eos_token_id=None)
    with pytest.raises(DsparkError, match=names):
        target = TransformersTarget("other", model(), tokenizer)
        target.forward([(target.new_state(3), torch.tensor([1, 2, 3]))])
