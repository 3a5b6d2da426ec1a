"""A tokenizer with a token for each byte, and chat templates that say what those of well-known families say."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TURNS = (
    "{%- for m in messages if m.role != 'system' %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_OWN = "{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<|end|>\n"
_LLAMA = "<|system|>\n\nCutting Knowledge Date: December 2023\nToday Date: {{ date_string }}\n\n" + _OWN + _TURNS
# How each family comes to its date; the rest is the same in all that matters here.
DATED = {
    "Llama 3.1": "{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}" + _LLAMA,
    "Llama 3.3": (
        "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
        "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
        "{%- endif %}" + _LLAMA
    ),
    "SmolLM3": (
        "<|system|>\n{%- set today = strftime_now('%d %B %Y') -%}{{- '## Metadata\n\nToday Date: ' ~ today ~ '\n' -}}"
        "{{- 'Reasoning Mode: ' ~ ('/think' if enable_thinking is not defined or enable_thinking else '/no_think') -}}"
        "{{- '\n\n## Custom Instructions\n\n' -}}" + _OWN + "{%- for m in messages if m.role != 'system' %}"
        "<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think>\n\n</think>\n{% endif %}{{ m.content }}<|end|>\n"
        "{% endfor %}{%- if add_generation_prompt %}<|assistant|>\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}{% endif %}"
    ),
    "Granite 3": "<|system|>Knowledge Cutoff Date: April 2024.\nToday's Date: {{ strftime_now('%B %d, %Y') }}.\n"
    + _OWN
    + _TURNS,
    "gpt-oss": "<|system|>Current date: {{ strftime_now('%Y-%m-%d') }}\n\nReasoning: medium\n\n" + _OWN + _TURNS,
    "Mistral": (
        "{%- set today = strftime_now('%Y-%m-%d') %}<|system|>The current date is {{ today }}.\n" + _OWN + _TURNS
    ),
    "the time of day": "<|system|>It is {{ strftime_now('%H:%M:%S') }}.\n" + _OWN + _TURNS,
    "the year": "<|system|>Copyright {{ strftime_now('%Y')[2:] }}.\n" + _OWN + _TURNS,
}
_HISTORY = (
    "{%- for m in messages %}<|{{ m.role }}|>\n{{ m.content.split('</think>')[-1].lstrip('\n') }}<|end|>\n{% endfor %}"
)
# Models that think, and whether they can be asked not to.
THINKING = {
    "Qwen3": (
        _HISTORY + "{%- if add_generation_prompt %}<|assistant|>\n"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
        "{%- endif %}",
        True,
    ),
    "SmolLM3": (DATED["SmolLM3"], True),
    "DeepSeek-R1-Distill": (
        _HISTORY + "{%- if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{%- endif %}",
        False,
    ),
}


def save_tokenizer(folder: Path, template: str | None, *, added: tuple[str, ...] = ()) -> None:
    """Save the tokenizer. added: tokens that aren't special, as models that think have them for <think>."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(token_models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", additional_special_tokens=special)
    fast.add_tokens(list(added))
    fast.chat_template = template
    fast.save_pretrained(folder)
