"""A part of a chat that the prompt does not show is found, and no other part is."""

import pytest
from covering import in_one_test
from transformers.cli.serving.utils import Modality

from titans_hf.cli.serving.parts import first_unprinted
from titans_hf.cli.serving.requests import CheckedHandler
from titans_hf.cli.training.tokenizer import byte_tokenizer

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content | trim | upper }}\n{% endfor %}"
CALLS = (  # as many templates have it: calls in the place of the content, the last thoughts alone
    "{% for m in messages %}{{ m.role }}: {% if m.tool_calls %}"
    "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endif %}\n{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.tool_call_id and m.content != '7' %}{{ raise_exception('no') }}{% endif %}"
    + (CALLS.partition("%}")[2])
)
USER = {"role": "user", "content": "What is it?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": ["x", 5], "type": "all"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
THOUGHT = {"role": "assistant", "content": "It is 7.", "reasoning_content": "6 + 1"}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
FILE = {"type": "file", "file": {"file_data": "x"}}
TEXT = {"type": "text", "text": "What is this?"}
ECHO = {"refusal": None, "audio": None, "annotations": [], "tool_calls": None}  # as OpenAI's client gives it back
CASES = [
    (PLAIN, [USER, {"role": "assistant", "content": "It.", **ECHO}, {"role": "user", "content": [TEXT, TEXT]}], None),
    (PLAIN, [USER, {"role": "assistant", "content": ""}, USER], None),
    (PLAIN, [{"role": "user", "content": [TEXT, IMAGE]}], "messages.0.content.1.image_url.url"),
    (
        PLAIN,
        [{"role": "user", "content": [{"type": "file", "file": {"file_data": "x"}}]}],
        "messages.0.content.0.file.file_data",
    ),
    (PLAIN, [{**USER, "name": "Ann"}], "messages.0.name"),
    (PLAIN, [USER, THOUGHT], "messages.1.reasoning_content"),
    (
        PLAIN,
        [USER, CALLING],
        "messages.1.tool_calls.0.function.name",
    ),
    (CALLS, [USER, CALLING], None),
    (CALLS, [USER, {**CALLING, "content": "Wait."}], "messages.1.content"),
    (CALLS, [USER, THOUGHT], None),
    (CALLS, [USER, THOUGHT, USER], "messages.1.reasoning_content"),
    (STRICT, [USER, {"role": "tool", "tool_call_id": "c1", "content": "7"}], None),
    (STRICT, [USER, {"role": "tool", "tool_call_id": "c1", "content": "7", "name": "f"}], "messages.1.name"),
]


@in_one_test("template,messages,unprinted", CASES)
def test_the_part_that_a_template_drops(template, messages, unprinted):
    """Parts that transformers' server or a chat template drops are named: an answer would be of a part of the chat."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template

    def prompt_of(asked: dict) -> str:
        inputs = CheckedHandler.get_processor_inputs_from_messages(asked["messages"], Modality.LLM)
        return tokenizer.apply_chat_template(inputs, tokenize=False)

    found = first_unprinted({"messages": messages}, prompt_of)
    assert (None if found is None else ".".join(map(str, found))) == unprinted


def test_a_request_that_the_template_refuses():
    """The error of a template is raised."""
    with pytest.raises(ZeroDivisionError):
        first_unprinted({"messages": [USER]}, lambda asked: 1 / 0)
