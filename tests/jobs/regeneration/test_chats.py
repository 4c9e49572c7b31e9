"""From prompt ids back to messages: exactly, or not at all."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jobs.regeneration.chats import Chats

CHATML = """{% if messages[0]['role'] != 'system' %}<|system|>
You are helpful.<|end|>
{% endif %}{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if tools %}Tools: {{ tools }}{% endif %}<|assistant|>
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""
STRICT = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}
{%- endif %}{{ '[INST]' if m.role == 'user' }}{{ m.content }}
{{- '[/INST]' if m.role == 'user' else '</s>' }}
{%- endfor %}"""
TRIMMING = CHATML.replace("m.content", "m.content | trim")
DATED = "Today is {{ strftime_now('%f') }}. " + CHATML

ONE = [{"role": "user", "content": "How many? {{ 1 + 1 }} <|user|>"}]
LONG = [
    {"role": "user", "content": "Hi\n"},
    {"role": "assistant", "content": "  Hello é \U0001f642"},
    {"role": "user", "content": ""},
]
SYSTEM = [{"role": "system", "content": "Be short."}, *LONG]


def tokenizer(template):
    """Bytes as tokens: every text comes back as it was."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    bytewise.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    found = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    found.chat_template = template
    return found


def back(template, messages, thinking=None, **more):
    words = tokenizer(template)
    mode = {} if thinking is None else {"enable_thinking": thinking}
    ids: Any = words.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **mode, **more
    )
    return Chats(words).messages_of(list(ids), thinking)


def test_chats_come_back_as_they_were():
    for messages in (ONE, LONG, SYSTEM):
        assert back(CHATML, messages) == messages
        assert back(CHATML, messages, thinking=False) == messages
    assert back(STRICT, ONE) == ONE
    assert back(STRICT, LONG) == LONG


def test_what_cannot_be_told_for_certain_is_not_guessed():
    assert back(DATED, ONE) is None
    assert back(CHATML, ONE, tools=[{"name": "f"}]) is None
    words = tokenizer(CHATML)
    chats = Chats(words)
    assert chats.messages_of(words.encode("a plain prompt"), None) is None
    assert chats.messages_of([], None) is None
    # A conversation that ends with the assistant's words is no prompt of a chat.
    assert back(CHATML, LONG[:2]) is None
    # Without its generation prompt, a request of another thinking mode is another prompt.
    ids: Any = words.apply_chat_template(ONE, add_generation_prompt=True, return_dict=False)
    assert chats.messages_of(list(ids), False) is None


def test_content_that_the_template_changed_renders_the_same_prompt():
    [message] = back(TRIMMING, [{"role": "user", "content": "  Hi \n"}]) or [{}]
    assert message == {"role": "user", "content": "Hi"}


def test_a_target_without_a_template_has_no_chats():
    words = tokenizer(None)
    assert Chats(words).messages_of(words.encode("Hi"), None) is None
