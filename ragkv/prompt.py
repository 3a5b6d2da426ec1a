"""Lays out the prompt: anchor, chunks, question. Knows nothing about KV or retrieval.

The anchor is everything that stands before the first chunk, the same for every request: chunks are captured behind it,
so that they see the real attention sink. The three parts are tokenised apart, so a chunk has the same tokens anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from ragkv.errors import ModelError

_INSTRUCTION = "Answer the question using only the documents below. Be brief."
_ASKING = "Answer this question in one or two sentences, using only the documents above: "
_CHUNKS, _QUESTION = "\u241echunks\u241e", "\u241equestion\u241e"  # stand for the parts while the template is rendered


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, and where its parts lie: `anchor_end`, then one `(start, end)` for each chunk."""

    token_ids: list[int]
    anchor_end: int
    chunk_ranges: list[tuple[int, int]]


class PromptLayout:
    """The parts of a model's prompts that don't change, tokenised once.

    Uses the model's chat template where it has one. instruction stands before the chunks, asking between them and the
    question. Raises ModelError if the folder has no usable tokenizer.
    """

    def __init__(self, model: Path, instruction: str | None = None, asking: str | None = None) -> None:
        self._instruction = _INSTRUCTION if instruction is None else instruction
        self._user_text = f"{_CHUNKS}{_ASKING if asking is None else asking}{_QUESTION}"
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ModelError(f"no usable tokenizer in {model}: {error}") from error
        before, between, after = self._render()
        self.anchor: list[int] = self._encode(before)
        self._asking: list[int] = self._encode(between)
        self._closing: list[int] = self._encode(after)

    def question_tokens(self, question: str) -> list[int]:
        """What follows the chunks. Control tokens spelt out in the question become ordinary text."""
        text: list[int] = self._tokenizer.encode(question, add_special_tokens=False, split_special_tokens=True)
        return [*self._asking, *text, *self._closing]

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    def assemble(self, chunks: Sequence[Sequence[int]], question: Sequence[int]) -> Prompt:
        """Put the parts together, chunks in the order given."""
        token_ids, ranges = list(self.anchor), []
        for chunk in chunks:
            ranges.append((len(token_ids), len(token_ids) + len(chunk)))
            token_ids += chunk
        return Prompt([*token_ids, *question], len(self.anchor), ranges)

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def _render(self) -> tuple[str, str, str]:
        """The prompt's fixed text: before the chunks, between them and the question, after the question."""
        user = self._user_text
        if not self._tokenizer.chat_template:
            start = self._tokenizer.bos_token or ""
            text = f"{start}{self._instruction}\n\n{user}\nAnswer:"
        else:
            text = self._apply_template(user)
        before, rest = text.split(_CHUNKS)
        between, after = rest.split(_QUESTION)
        return before, between, after

    def _apply_template(self, user: str) -> str:
        """Some templates know no system role; there the instruction opens the user's message."""
        conversations = (
            [{"role": "system", "content": self._instruction}, {"role": "user", "content": user}],
            [{"role": "user", "content": f"{self._instruction}\n\n{user}"}],
        )
        for messages in conversations:
            try:
                text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # templates raise whatever their author chose
                problem = error
                continue
            if isinstance(text, str) and self._instruction in text and user in text:
                return text
            problem = ValueError("it drops or changes the message")
        raise ModelError(f"the model's chat template can't be used: {problem}")
