from __future__ import annotations

import pytest

from dspark.data.chat import ChatRenderer
from dspark.errors import DsparkError

# Writes an empty think block itself when thinking is off, and drops the thoughts of earlier turns.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set c = c.split('</think>\n\n')[-1] %}{% endif %}"
    "{{ c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
OPENS_THINKING = THINKING.replace(
    "{% if enable_thinking is defined and not enable_thinking %}", "{% if true %}"
).replace("<think>\n\n</think>\n\n'", "<think>\n'")
TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + c['function']['name'] + "
    "(c['function']['arguments'] | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nwell\n</think>\n\nHello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]


def _call(arguments: object = None) -> list[dict]:
    function = {"name": "weather", "arguments": {"city": "Lima"} if arguments is None else arguments}
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "No."},
    ]


def test_one_row_for_each_turn_supervised_through_the_stop_token(make_tokenizer):
    tokenizer = make_tokenizer()
    renderer = ChatRenderer(tokenizer)
    rows = renderer.supervised_rows(CONVERSATION, {tokenizer.eos_token_id}, source="talk")
    assert [(row.source, row.turn, row.finish) for row in rows] == [("talk", 0, "stop"), ("talk", 1, "stop")]
    assert tokenizer.decode(rows[0].answer_ids) == "<think>\nwell\n</think>\n\nHello<|im_end|>"
    assert tokenizer.decode(rows[1].answer_ids) == "See you<|im_end|>"
    for row, messages in zip(rows, (CONVERSATION[:1], CONVERSATION[:3]), strict=True):
        assert row.prompt_ids == renderer.prompt_ids(messages)
        assert row.answer_ids.count(tokenizer.eos_token_id) == 1  # nothing the template adds after it
        assert 0 < sum(row.loss_mask) < len(row.ids)
    assert tokenizer.decode(rows[1].prompt_ids).endswith("Bye<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_rewrites_earlier_turns(make_tokenizer):
    tokenizer = make_tokenizer(THINKING)
    rows = ChatRenderer(tokenizer).supervised_rows(CONVERSATION, {tokenizer.eos_token_id})
    assert "well" in tokenizer.decode(rows[0].answer_ids)
    assert "well" not in tokenizer.decode(rows[1].prompt_ids)


def test_an_empty_think_block_of_the_template_is_context(make_tokenizer):
    tokenizer = make_tokenizer(THINKING)
    renderer = ChatRenderer(tokenizer, thinking="off")
    (row,) = renderer.supervised_rows(CONVERSATION[2:], {tokenizer.eos_token_id})
    assert tokenizer.decode(row.prompt_ids).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(row.answer_ids) == "See you<|im_end|>"
    assert row.prompt_ids == renderer.prompt_ids(CONVERSATION[2:3])


def test_a_thought_after_an_empty_think_block_is_refused(make_tokenizer):
    tokenizer = make_tokenizer(THINKING)
    with pytest.raises(DsparkError, match="has closed the think block"):
        ChatRenderer(tokenizer, thinking="off").supervised_rows(CONVERSATION[:2], {tokenizer.eos_token_id})


def test_an_answer_without_reasoning_under_an_open_think_block_is_refused(make_tokenizer):
    tokenizer = make_tokenizer(OPENS_THINKING)
    renderer = ChatRenderer(tokenizer)
    with pytest.raises(DsparkError, match="opens a think block"):
        renderer.supervised_rows(CONVERSATION[2:], {tokenizer.eos_token_id})
    (row,) = renderer.supervised_rows(CONVERSATION[:2], {tokenizer.eos_token_id})
    assert tokenizer.decode(row.answer_ids).startswith("well\n</think>")


def test_thinking_needs_a_template_that_listens(make_tokenizer):
    with pytest.raises(DsparkError, match="no thinking switch"):
        ChatRenderer(make_tokenizer(), thinking="off")
    on, off = (ChatRenderer(make_tokenizer(THINKING), thinking=mode) for mode in ("on", "off"))
    assert on.prompt_ids(CONVERSATION[:1]) != off.prompt_ids(CONVERSATION[:1])
    assert on.recipe()["template_sha256"] == off.recipe()["template_sha256"] != ChatRenderer(make_tokenizer()).recipe()
    assert (on.recipe()["thinking"], off.recipe()["thinking"]) == ("on", "off")


def test_no_chat_template(make_tokenizer):
    tokenizer = make_tokenizer(None)
    with pytest.raises(DsparkError, match='template="none"'):
        ChatRenderer(tokenizer)
    plain = ChatRenderer(tokenizer, template="none")
    assert tokenizer.decode(plain.prompt_ids(CONVERSATION[:1])) == "Hi\n"
    assert plain.recipe() == {"template_sha256": None, "thinking": None}
    rows = plain.supervised_rows(CONVERSATION[2:], {tokenizer.eos_token_id})
    assert tokenizer.decode(rows[0].answer_ids) == "See you<|im_end|>"


def test_masks_that_cannot_be_right_are_refused(make_tokenizer):
    tokenizer = make_tokenizer()
    renderer, stops = ChatRenderer(tokenizer), {tokenizer.eos_token_id}
    with pytest.raises(DsparkError, match="nothing would be supervised"):
        renderer.supervised_rows(CONVERSATION[:1], stops)
    with pytest.raises(DsparkError, match="empty answer"):
        renderer.supervised_rows([CONVERSATION[0], {"role": "assistant", "content": " "}], stops)
    with pytest.raises(DsparkError, match="opens the conversation"):
        renderer.supervised_rows(CONVERSATION[1:2], stops)
    with pytest.raises(DsparkError, match="none of these stop ids"):
        renderer.supervised_rows(CONVERSATION[:2], {7})
    with pytest.raises(DsparkError, match="must end with the message to be answered"):
        renderer.prompt_ids(CONVERSATION[:2])
    with pytest.raises(DsparkError, match="role"):
        renderer.prompt_ids([{"role": "narrator", "content": "Once"}])


def test_tool_calls_survive_or_are_refused(make_tokenizer):
    tokenizer = make_tokenizer(TOOLS)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    first, second = ChatRenderer(tokenizer).supervised_rows(_call(), {tokenizer.eos_token_id}, tools=tools)
    assert tokenizer.decode(first.answer_ids) == '<tool_call>weather{"city": "Lima"}<|im_end|>'
    assert "sunny" in tokenizer.decode(second.prompt_ids)

    deaf = make_tokenizer(TOOLS.replace("c['function']['name'] + ", "'?' + "))
    with pytest.raises(DsparkError, match=r"tool_calls\[0\] = 'weather': is lost"):
        ChatRenderer(deaf).supervised_rows(_call(), {tokenizer.eos_token_id})
    forgetful = make_tokenizer(TOOLS.replace("c['function']['arguments'] | tojson", "'{}'"))
    with pytest.raises(DsparkError, match=r"arguments.* are lost"):
        ChatRenderer(forgetful).supervised_rows(_call(), {tokenizer.eos_token_id})
    with pytest.raises(DsparkError, match=r"tools\[0\]"):
        ChatRenderer(make_tokenizer()).prompt_ids([{"role": "user", "content": "Rain?"}], tools=tools)


@pytest.mark.parametrize("arguments", ['{"city": ', ["Lima"]])
def test_malformed_tool_calls_are_refused(make_tokenizer, arguments):
    tokenizer = make_tokenizer(TOOLS)
    with pytest.raises(DsparkError, match=r"tool_calls\[0\]\.arguments"):
        ChatRenderer(tokenizer).supervised_rows(_call(arguments), {tokenizer.eos_token_id})
