"""Tells a model's reasoning from its answer. Models that think write it first, between <think> and </think>.

The tags are text: the tokenizers of Qwen3, SmolLM3, DeepSeek-R1 and its distillations don't flag them as special, so
vLLM leaves them in. It has parsers of its own, but one for each family, which users would have to choose.
"""

from collections.abc import Iterator

from ragkv.answer import Delta, Reasoning

_OPENING, _CLOSING = "<think>", "</think>"


def ends_in_reasoning(prompt: str) -> bool:
    """Return whether a prompt leaves the model within its reasoning, as DeepSeek-R1's chat template does."""
    return prompt.rfind(_OPENING) > prompt.rfind(_CLOSING)


def without_reasoning(text: str, *, is_open: bool = False) -> str:
    """Return the answer in a whole text. is_open: whether the prompt ended in reasoning."""
    return "".join(event.text for event in split(text, is_open=is_open) if isinstance(event, Delta))


def split(text: str, *, is_open: bool = False) -> list[Reasoning | Delta]:
    """Split a whole text. is_open: whether the prompt ended in reasoning."""
    splitter = ReasoningSplitter(is_open=is_open)
    return [*splitter.feed(text), *splitter.end()]


class ReasoningSplitter:
    """Splits one generation's text as it comes.

    Reasoning is what stands between the tags at the beginning, without the blanks at its ends; tags elsewhere are the
    answer's. Text that may be part of a tag is held back until the next.
    """

    def __init__(self, *, is_open: bool) -> None:
        """is_open: whether the prompt ended in reasoning. Some models open it again all the same."""
        self._is_open = is_open
        self._stage = "opening"  # then "reasoning", "blank" and "answer", or "answer" at once
        self._begun, self._held = False, ""

    def feed(self, text: str) -> Iterator[Reasoning | Delta]:
        """Yield what is certain with this text."""
        self._held += text
        if self._stage == "opening":
            self._open()
        if self._stage == "reasoning":
            yield from self._reason()
        if self._stage == "blank":
            self._held = self._held.lstrip()
            self._stage = "answer" if self._held else "blank"
        if self._stage == "answer" and self._held:
            yield Delta(self._held)
            self._held = ""

    def end(self) -> Iterator[Reasoning | Delta]:
        """Yield what was held back, when the generation has ended."""
        is_reasoning = self._stage == "reasoning" or (self._stage == "opening" and self._is_open)
        rest = self._held
        if is_reasoning:
            rest = rest.rstrip() if self._begun else rest.strip()
        if rest:
            yield Reasoning(rest) if is_reasoning else Delta(rest)
        self._held = ""

    def _open(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(_OPENING):
            self._stage, self._held = "reasoning", begun.removeprefix(_OPENING)
        elif not _OPENING.startswith(begun):
            self._stage = "reasoning" if self._is_open else "answer"

    def _reason(self) -> Iterator[Reasoning]:
        text, tag, rest = self._held.partition(_CLOSING)
        if not tag:
            partial = next((n for n in range(len(_CLOSING) - 1, 0, -1) if text.endswith(_CLOSING[:n])), 0)
            certain = text[: len(text) - partial].rstrip()
            text, rest = certain, text[len(certain) :]
        text = text.rstrip() if self._begun else text.strip()
        self._held, self._stage = rest, "blank" if tag else "reasoning"
        if text:
            self._begun = True
            yield Reasoning(text)
