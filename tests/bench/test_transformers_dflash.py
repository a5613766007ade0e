"""Transformers' DFlash generation against our engine, on a tiny target and drafts made for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dspark.bench.transformers_dflash import (
    RoundDifference,
    TransformersDFlash,
    load_assistant,
    load_model,
    round_differences,
)
from dspark.checkpoints.native import load_draft, save_draft
from dspark.checkpoints.zlab import export_zlab, over_whole_vocabulary
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Request, Result, Round
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget

TOKENS = 48


@pytest.fixture(scope="module")
def model(target: TransformersTarget, tiny_llama_folder: Path) -> Any:
    """The same target, as Transformers runs it."""
    model = load_model(str(tiny_llama_folder))
    model.load_state_dict(target.model.state_dict())
    return model


@pytest.fixture(scope="module")
def prompts(questions) -> list[list[int]]:
    return [list(question.ids) for question in questions]


@pytest.fixture(scope="module")
def make_dflash(target: TransformersTarget) -> Callable[..., DSparkDraft]:
    """A random DFlash draft for the target, exact in BF16."""

    def make(**changes: Any) -> DSparkDraft:
        fields: dict[str, Any] = {
            "hidden_size": target.hidden_size,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 64,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "layer_types": ("full_attention", "full_attention"),
            "sliding_window": None,
            "sliding_window_non_causal": False,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": target.vocab_size,
            "target_layer_ids": (2, 0),
            "num_target_layers": target.num_layers,
            "target_name": "tiny",
            "mask_token_id": 3,
            "sample_from_anchor": False,
            "block_size": 6,
            "markov_rank": 0,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
            "training_length": 256,
            "prompt_recipe": {"template_sha256": None, "thinking": None},
            **changes,
        }
        torch.manual_seed(5)
        draft = DSparkDraft(DraftConfig(**fields))
        with torch.no_grad():
            for parameter in draft.parameters():
                scale = 0.3 if parameter.dim() > 1 else 0.0
                parameter.add_(scale * torch.randn_like(parameter)).copy_(parameter.bfloat16())
        return draft

    return make


@pytest.fixture(scope="module")
def answers(target: TransformersTarget, prompts) -> list[Result]:
    """Our plain decoding."""
    engine = Engine(target)
    return [ask(engine, prompt) for prompt in prompts]


def ask(engine: Engine, prompt: list[int], **settings: Any) -> Result:
    for _ in engine.stream(Request(**{"prompt_ids": prompt, "max_tokens": TOKENS, **settings})):
        pass
    return engine.last_result


def taught(draft: DSparkDraft, target: TransformersTarget, rows: list[list[int]]) -> DSparkDraft:
    """The draft overfitted to these rows, so that it is often right on them."""
    draft.bind(target.embedding_weight, target.head_weight)
    optimiser = torch.optim.Adam(draft.parameters(), lr=1e-2)
    gamma, index = draft.config.gamma, {int(token): i for i, token in enumerate(draft.draft_ids)}
    for step in range(120):
        row = torch.tensor(rows[step % len(rows)])
        taps = target.forward([(target.new_state(len(row)), row)], taps=draft.config.target_layer_ids).taps
        anchors = torch.arange(1, len(row) - gamma)
        hidden = draft.train_hidden(
            taps.clone(), torch.arange(len(row)), anchors, row[anchors], torch.zeros_like(anchors)
        )
        labels = row[anchors[:, None] + torch.arange(1, gamma + 1)]
        known = torch.tensor([[index.get(token, -100) for token in one] for one in labels.tolist()])
        loss = F.cross_entropy(draft.base_logits(hidden).flatten(0, 1), known.flatten(), ignore_index=-100)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(parameter.bfloat16())
    return draft


@pytest.fixture(scope="module")
def folder(make_dflash, target, prompts, answers, tmp_path_factory) -> Path:
    """A native draft folder that knows two of the four answers."""
    rows = [prompt + answer.output_ids for prompt, answer in zip(prompts[:2], answers[:2])]
    path = tmp_path_factory.mktemp("taught") / "draft"
    save_draft(taught(make_dflash(), target, rows), path)
    return path


def engine_for(target: TransformersTarget, folder: Path) -> Engine:
    return Engine(target, make_proposer(target, load_draft(folder)))


def test_ids_are_plain_decodings_and_rounds_are_ours(model, target, folder, prompts, answers, tmp_path) -> None:
    export_zlab(load_draft(folder), tmp_path / "dflash")
    assistant = load_assistant(tmp_path / "dflash", model)
    theirs, ours = TransformersDFlash(model, assistant, target.stop_ids), engine_for(target, folder)
    accepted = set()
    for prompt, answer in zip(prompts, answers):
        for tokens in (1, 2, 3, TOKENS - 1, TOKENS):
            got, own = theirs.generate(prompt, tokens), ask(ours, prompt, max_tokens=tokens)
            assert got.output_ids == own.output_ids == answer.output_ids[:tokens]
            assert got.finish_reason == own.finish_reason
            assert all(one.explained for one in round_differences(got.rounds, own.rounds))
            assert 0 < got.first_seconds <= got.seconds
            accepted |= {one.accepted for one in got.rounds}
        plain = TransformersDFlash(model, None, target.stop_ids).generate(prompt, TOKENS)
        assert plain.output_ids == answer.output_ids and plain.rounds == []
    assert {0, 1, 2, 5} <= accepted  # none, some, all


def test_a_stop_id_inside_the_accepted_run_counts_what_was_kept(model, target, folder, prompts, tmp_path) -> None:
    export_zlab(load_draft(folder), tmp_path / "dflash")
    assistant, ours = load_assistant(tmp_path / "dflash", model), engine_for(target, folder)
    whole = ask(ours, prompts[0], ignore_eos=True)
    cut = 0
    for stop in dict.fromkeys(whole.output_ids):
        own = ask(ours, prompts[0], stop_ids=frozenset([stop]))
        got = TransformersDFlash(model, assistant, [stop]).generate(prompts[0], TOKENS)
        assert (got.output_ids, got.finish_reason) == (own.output_ids, own.finish_reason)
        assert got.rounds == own.rounds
        cut += bool(own.rounds) and sum(one.accepted + 1 for one in own.rounds) + 1 > len(own.output_ids)
    assert cut  # at least one draft token ended the answer


def test_a_reduced_vocabulary_is_confined_or_left_whole(model, target, make_dflash, prompts, answers, tmp_path) -> None:
    ids = sorted({token for answer in answers[:2] for token in answer.output_ids})
    draft = make_dflash(draft_vocab_size=len(ids))
    draft.set_vocabulary(ids)
    rows = [prompt + answer.output_ids for prompt, answer in zip(prompts[:2], answers[:2])]
    save_draft(taught(draft, target, rows), tmp_path / "reduced", lm_head=False)
    whole = over_whole_vocabulary(load_draft(tmp_path / "reduced"))
    save_draft(whole, tmp_path / "whole")
    export_zlab(whole, tmp_path / "dflash")
    assistant = load_assistant(tmp_path / "dflash", model)
    for kept, name in ((torch.tensor(ids), "reduced"), (None, "whole")):
        theirs = TransformersDFlash(model, assistant, target.stop_ids, kept)
        ours, seen = engine_for(target, tmp_path / name), []
        for prompt, answer in zip(prompts, answers):
            got, own = theirs.generate(prompt, TOKENS), ask(ours, prompt)
            assert got.output_ids == own.output_ids == answer.output_ids
            assert all(one.explained for one in round_differences(got.rounds, own.rounds))
            seen += got.rounds
        assert max(one.accepted for one in seen) > 1


ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
SLIDING = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window_non_causal": True}


@pytest.mark.parametrize(
    "changes",
    [
        *({"rope_parameters": rope} for rope in ROPES.values()),
        *({**SLIDING, "sliding_window": window} for window in (2, 5, 16, 500)),
        {"layer_types": ("sliding_attention",) * 2, "sliding_window_non_causal": True, "sliding_window": 9},
        {"hidden_act": "gelu", "target_layer_ids": (1,), "block_size": 2, "num_key_value_heads": 4},
    ],
    ids=str,
)
def test_block_states_are_ours(model, target, make_dflash, prompts, tmp_path, changes) -> None:
    assert len(compare_states(make_dflash(**changes), model, target, prompts[3], tmp_path)) > 10


def test_a_sliding_window_follows_accepted_runs(model, target, make_dflash, prompts, answers, tmp_path) -> None:
    draft = make_dflash(**SLIDING, sliding_window=7)
    rounds = compare_states(
        taught(draft, target, [prompts[3] + answers[3].output_ids]), model, target, prompts[3], tmp_path
    )
    assert {3, 5} <= {one.accepted for one in rounds}


def compare_states(
    draft: DSparkDraft, model: Any, target: TransformersTarget, prompt: list[int], path: Path
) -> list[Round]:
    """Round by round, what the head reads, [gamma, d], must be ours; returns the rounds."""
    draft.bind(target.embedding_weight, target.head_weight)
    export_zlab(draft, path / "dflash")
    assistant = load_assistant(path / "dflash", model)
    states: list[torch.Tensor] = []
    assistant.register_forward_hook(lambda _m, _a, out: states.append(out.last_hidden_state[0, 1:]))
    got = TransformersDFlash(model, assistant, []).generate(prompt, 40)
    ids = torch.tensor(prompt + got.output_ids)
    taps = target.forward([(target.new_state(len(ids)), ids)], taps=draft.config.target_layer_ids).taps
    context, anchor = draft.new_context(len(ids)), len(prompt)
    assert len(got.rounds) - len(states) in (0, 1)  # none for a last token alone
    for state, one in zip(states, got.rounds):
        draft.write_context([(context, taps[context.length : anchor])])
        expected = draft.block_hidden([(context, int(ids[anchor]))], draft.config.gamma)[0]
        assert torch.allclose(state, expected, rtol=1e-4, atol=1e-4)
        anchor += one.accepted + 1
    return got.rounds


def test_the_models_own_settings_are_set_aside_and_come_back(model, target, prompts, answers) -> None:
    model.generation_config.repetition_penalty = 3.0
    before = model.generation_config
    got = TransformersDFlash(model, None, target.stop_ids).generate(prompts[0], TOKENS)
    assert got.output_ids == answers[0].output_ids
    assert model.generation_config is before and "_get_candidate_generator" not in vars(model)
    with pytest.raises(AttributeError):  # also when generation fails: this is no draft
        TransformersDFlash(model, model, [2]).generate(prompts[0], 4)
    assert model.generation_config is before and "_get_candidate_generator" not in vars(model)
    before.repetition_penalty = None


def test_the_limit_is_the_context(model, target, make_dflash, tmp_path) -> None:
    export_zlab(make_dflash(), tmp_path / "dflash")
    theirs = TransformersDFlash(model, load_assistant(tmp_path / "dflash", model), [])
    prompt = [5 + i % 90 for i in range(250)]
    got, own = theirs.generate(prompt, 20), ask(Engine(target), prompt, max_tokens=20, ignore_eos=True)
    assert got.output_ids == own.output_ids and len(got.output_ids) == 6
    for bad, tokens in (([], 5), ([5] * 256, 5), ([5], 0)):
        with pytest.raises(DsparkError):
            theirs.generate(bad, tokens)


def test_bad_input_is_named(model, target, make_dflash, tmp_path) -> None:
    with pytest.raises(DsparkError, match="load it anew"):
        TransformersDFlash(target.model, None)
    with pytest.raises(DsparkError, match=r"config\.json"):
        load_assistant(tmp_path / "nowhere", model)
    with pytest.raises(DsparkError, match="target"):
        load_model(str(tmp_path / "nowhere"))
    export_zlab(make_dflash(), tmp_path / "zlab", form="z-lab")
    with pytest.raises(DsparkError, match="model_type"):
        load_assistant(tmp_path / "zlab", model)
    export_zlab(make_dflash(), tmp_path / "dflash")
    hook = model.get_input_embeddings().register_forward_hook(lambda _m, _a, out: out * 2.0)
    with pytest.raises(DsparkError, match="scales its token embeddings"):
        load_assistant(tmp_path / "dflash", model)
    hook.remove()
    load_assistant(tmp_path / "dflash", model)
    path = tmp_path / "dflash" / "config.json"
    text = path.read_text()
    for field, value in (
        ("num_target_layers", 9),
        ("vocab_size", 99),
        ("hidden_size", 16),
        ("target_layer_ids", [0, 3]),
        ("num_hidden_layers", 3),
        ("num_hidden_layers", 1),
    ):
        changed = {**json.loads(text), field: value}
        if field == "num_hidden_layers":
            changed["layer_types"] = ["full_attention"] * value
        path.write_text(json.dumps(changed))
        with pytest.raises(DsparkError) as caught:
            load_assistant(tmp_path / "dflash", model)
        assert "\n" not in str(caught.value)


def test_only_the_undrafted_last_token_explains_a_difference() -> None:
    none, some, all_of_it = Round(0, 0, 0), Round(5, 5, 1), Round(5, 5, 5)
    assert round_differences([some, none], [some, none]) == []
    assert round_differences([some, none], [some, some]) == [RoundDifference(2, none, some, True)]
    assert round_differences([none, some], [some, some]) == [RoundDifference(1, none, some, False)]
    assert round_differences([some, all_of_it], [some]) == [RoundDifference(2, all_of_it, None, False)]
    assert round_differences([some, none], [some, some, some])[0].explained is False
