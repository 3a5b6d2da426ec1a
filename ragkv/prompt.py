"""Lays out the prompt: anchor, chunks, question; in a conversation, each turn's chunks before its question.

Knows nothing about KV or retrieval. The anchor is everything before the first chunk, the same for every request and on
every day: chunks are precomputed after it, so that they see the real attention sink. The parts are tokenised apart, so
a chunk has the same tokens anywhere, and a conversation's prompt begins with that of the turn before.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ragkv.errors import ConfigError, ContextTooLongError, ModelError
from ragkv.reasoning import ends_in_reasoning
from ragkv.retriever.plain_text import PlainTokenizer

_INSTRUCTION = "Answer the question using only the documents below. Be brief."
_CUE = "\nAnswer:"
_ASKING = "Answer this question in one or two sentences, using only the documents above: "
_UNDATED = "given with the question"  # where a chat template prints today's date (docs/decisions/0023)
_PIECE = 1 << 13  # characters
_CUT = 2  # how many tokens more a text may have because it was cut between two pieces
_CHUNKS, _QUESTION, _ANSWER = (f"\u241e{part}\u241e" for part in ("chunks", "question", "answer"))  # until encoded


@dataclass(frozen=True)
class Prompt:
    """The token ids of a prompt, and the positions of its parts. chunk_ranges: one `(start, end)` for each chunk.

    ends_in_reasoning: whether what the model writes next is reasoning already (`ragkv.reasoning`).
    """

    token_ids: list[int]
    anchor_end: int
    chunk_ranges: list[tuple[int, int]]
    ends_in_reasoning: bool = False


class PromptLayout:
    """The parts of a model's prompts that don't change, tokenised once.

    Uses the model's chat template where it has one and no cue is given. instruction: the text before the chunks;
    asking: between them and the question; cue: between the question and its answer. takes_turns: whether the template
    puts turns one after another and keeps the anchor. tells_date: whether it prints the date. thinking: whether models
    may think, if their template leaves it open. Raises ModelError for a folder without a usable tokenizer.
    """

    def __init__(
        self,
        model: Path,
        instruction: str | None = None,
        asking: str | None = None,
        cue: str | None = None,
        *,
        thinking: bool = False,
    ) -> None:
        self._instruction = _INSTRUCTION if instruction is None else instruction
        self._cue, self._thinking = cue, thinking
        self.tells_date = False
        self._user_text = f"{_CHUNKS}{_ASKING if asking is None else asking}{_QUESTION}"
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ModelError(f"no usable tokenizer in {model}: {error}") from error
        self._plain = PlainTokenizer(model)
        before, between, after = _parts(self._render([self._user_text]))
        self.anchor: list[int] = self._encode(before)
        self._asking: list[int] = self._encode(between)
        self._closing: list[int] = self._encode(after)
        self._ends_in_reasoning = ends_in_reasoning(after)
        try:
            again = _parts(self._render([self._user_text, _ANSWER, self._user_text]))
        except ModelError:
            again = []
        self.takes_turns = [*again[:2], *again[4:]] == [before, between, between, after]
        self._answering, self._reopening = map(self._encode, again[2:4] if self.takes_turns else ("", ""))

    def question_tokens(self, question: str, answer: str | None = None) -> list[int]:
        """Return what follows a turn's chunks: up to the answer, or with an answer up to the next turn's chunks.

        Control tokens that are spelt out in question or answer become ordinary text.
        """
        asked = [*self._asking, *self._plain.encode(question)]
        if answer is None:
            return [*asked, *self._closing]
        return [*asked, *self._answering, *self._plain.encode(answer), *self._reopening]

    def instruction_tokens(self, instruction: str) -> list[int]:
        """Return what is put before the tokens of the first question: the date, if the chat template prints it, and the
        user's own instruction."""
        today = date.today()
        dated = f"Today is {today.day} {today:%B %Y}." if self.tells_date else ""
        return self._plain.encode("".join(f"{text}\n\n" for text in (dated, instruction) if text))

    def measured(self, text: str, limit: int) -> tuple[str, int]:
        """Return a text and its number of tokens; of one that has clearly more than `limit`, a beginning that has more.

        So it costs little, however long the text is, and holds other threads up only for a piece at a time.
        """
        num_tokens = 0
        for end in range(_PIECE, len(text), _PIECE):
            num_tokens += len(self._plain.encode(text[end - _PIECE : end])) - _CUT
            if num_tokens > limit:
                return text[:end], num_tokens
        return text, len(self._plain.encode(text))

    def check_question(self, question: str, instruction: str, max_model_len: int) -> int:
        """Return how many tokens an answer may have if no chunk stands before the question.

        Raises ContextTooLongError if not even one fits into the context.
        """
        limit = max(0, max_model_len - len(self.anchor) - 1)
        parts = self.measured(question, limit)[1], self.measured(instruction, limit)[1]
        if max(parts) <= limit:
            parts = len(self.question_tokens(question)), len(self.instruction_tokens(instruction))
        if sum(parts) > limit:
            raise ContextTooLongError(
                f"the question has {sum(parts)} tokens or more; at most {limit} fit into the model's context of "
                f"{max_model_len}, so that an answer has room",
                sum(parts),
                limit,
            )
        return 1 + limit - sum(parts)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Decode each token by itself. Part of a character becomes a replacement character."""
        texts: list[str] = self._tokenizer.batch_decode([[id] for id in token_ids])
        return texts

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))

    def chat_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """Return a conversation for the model itself, without documents, as its chat template has it.

        messages: each with `role` and `content`. Raises ConfigError if there is no template, or it refuses them.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError("the model has no chat template: ask for /v1/completions, with `prompt`")
        try:
            return self._encode(str(self._templated(messages)))
        except Exception as error:  # templates raise whatever their author chose
            raise ConfigError(f"the model's chat template refuses the messages: {error}") from error

    def text_tokens(self, text: str) -> list[int]:
        """Return a text for the model to continue, after what its tokenizer puts before every text."""
        token_ids: list[int] = self._tokenizer.encode(text)
        return token_ids

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    def assemble(self, chunks: Sequence[Sequence[int]], question: Sequence[int]) -> Prompt:
        """Put the parts of one turn together, chunks in the order given."""
        return self.converse([(chunks, question)])

    def converse(self, turns: Sequence[tuple[Sequence[Sequence[int]], Sequence[int]]]) -> Prompt:
        """Put turns together, oldest first. Each has its chunks and the tokens that follow them."""
        token_ids, ranges = list(self.anchor), []
        for chunks, question in turns:
            for chunk in chunks:
                ranges.append((len(token_ids), len(token_ids) + len(chunk)))
                token_ids += chunk
            token_ids += question
        return Prompt(token_ids, len(self.anchor), ranges, self._ends_in_reasoning)

    def _encode(self, text: str) -> list[int]:
        """Tokenise text of the template, which has control tokens."""
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def _render(self, messages: Sequence[str]) -> str:
        """Return a conversation as text, up to the answer. The user's and the model's messages alternate."""
        if self._tokenizer.chat_template and self._cue is None:
            return self._apply_template(messages)
        closings = (_CUE if self._cue is None else self._cue, "\n\n")  # of a question, of an answer
        turns = "".join(message + closings[i % 2] for i, message in enumerate(messages))
        return f"{self._tokenizer.bos_token or ''}{self._instruction}\n\n{turns}"

    def _apply_template(self, messages: Sequence[str]) -> str:
        # Some templates know no system role; there the instruction opens the user's message.
        first, *others = messages
        rest = [{"role": ("assistant", "user")[i % 2], "content": text} for i, text in enumerate(others)]
        conversations = (
            [{"role": "system", "content": self._instruction}, {"role": "user", "content": first}, *rest],
            [{"role": "user", "content": f"{self._instruction}\n\n{first}"}, *rest],
        )
        for conversation in conversations:
            try:
                text = self._templated(conversation, strftime_now=self._undated, date_string=_UNDATED)
            except Exception as error:  # templates raise whatever their author chose
                problem = error
                continue
            if isinstance(text, str) and self._instruction in text and all(message in text for message in messages):
                self.tells_date |= _UNDATED in text
                return text
            problem = ValueError("it drops or changes the message")
        raise ModelError(f"the model's chat template can't be used: {problem}")

    def _templated(self, messages: list[dict[str, str]], **more: Any) -> object:
        return self._tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self._thinking,  # Qwen3, SmolLM3, GLM
            thinking=self._thinking,  # Granite, DeepSeek-V3.1
            **more,
        )

    def _undated(self, format: str) -> str:
        """Take the place of `strftime_now`, which transformers gives to chat templates."""
        self.tells_date = True
        return _UNDATED


def _parts(text: str) -> list[str]:
    """Return the fixed text around the chunks, questions and answers."""
    return re.split(f"{_CHUNKS}|{_QUESTION}|{_ANSWER}", text)
