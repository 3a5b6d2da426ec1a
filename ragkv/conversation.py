"""Fits a conversation into the model's context: which chunks stand before which of its questions.

A turn's prompt begins with the prompt and the answer of the turn before, whose KV vLLM may still have. So chunks stay
where they are, and a chunk that is a hit again isn't repeated, until the context is full: then the chunks of all
earlier turns are dropped at once, and where that isn't enough, the oldest turns. What is dropped depends on the
conversation alone, so that the next turn drops the same. Turns also go until the last question's chunks have half of
the context, if they need it: an answer without sources would be worse than one that has forgotten an old turn.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ragkv.answer import Conversation, Turn
from ragkv.prompt import Prompt, PromptLayout
from ragkv.retriever.retriever import Hit


@dataclass(frozen=True)
class Fitted:
    """A prompt that fits. hits: its chunks, in order. question_hits: the last question's, wherever they stand.
    num_left_out: how many of the last question's had no room."""

    prompt: Prompt
    hits: list[Hit]
    question_hits: list[Hit]
    num_left_out: int


def recent(layout: PromptLayout, conversation: Conversation, room: int) -> Conversation:
    """Leave out the turns that `fit` would drop in any case, but for the newest of them, perhaps cut.

    Only these are tokenised, not all of a chat of megabytes. `fit` makes the same of the rest as of the whole: where it
    drops the oldest of these turns, it puts all chunks anew, whatever was before.
    """
    fixed = len(layout.question_tokens("", "")) if layout.takes_turns else 0
    turns, limit = list[Turn](), room  # the same limit for all: a turn must be cut alike when others follow it
    for turn in reversed(conversation.turns):
        (question, num_asked), (answer, num_answered) = (
            layout.measured(text, limit) for text in (turn.question, turn.answer)
        )
        turns.insert(0, Turn(question, answer))
        room -= fixed + num_asked + num_answered
        if room < 0:
            break
    return replace(conversation, turns=tuple(turns))


def fit(layout: PromptLayout, conversation: Conversation, retrieved: Sequence[Sequence[Hit]], room: int) -> Fitted:
    """Lay out the longest prompt of a conversation that fits into `room` tokens.

    retrieved: the hits of each question of the conversation, best first. Anchor, instruction and the last question must
    fit by themselves.
    """
    own = layout.instruction_tokens(conversation.instruction)
    asked = [layout.question_tokens(question) for question in conversation.questions]
    answered = [layout.question_tokens(turn.question, turn.answer) for turn in conversation.turns]
    starts = list(accumulate(map(len, answered), initial=0))
    room -= len(layout.anchor) + len(own)
    placed: list[list[Hit]] = []
    first = 0  # the oldest turn that is left
    for i, hits in enumerate(retrieved):
        end = starts[i] + len(asked[i])
        new = _without(hits, placed)
        if i and end - starts[first] + _size([*placed, new]) > room:
            placed = [[] for _ in placed]
            new = list(hits)
            kept = min(_size([new]), room // 2)
            while first < i and end - starts[first] + kept > room:
                first += 1
        while new and end - starts[first] + _size([*placed, new]) > room:
            new.pop()
        placed.append(new)
    tokens = [*answered[first:], asked[-1]]
    tokens[0] = [*own, *tokens[0]]
    turns = [([hit.chunk.token_ids for hit in hits], t) for hits, t in zip(placed[first:], tokens, strict=True)]
    left_out = {hit.chunk.chunk_hash for hit in _without(retrieved[-1], placed)}
    return Fitted(
        layout.converse(turns),
        [hit for hits in placed for hit in hits],
        [hit for hit in retrieved[-1] if hit.chunk.chunk_hash not in left_out],
        len(left_out),
    )


def _without(hits: Sequence[Hit], placed: Sequence[Sequence[Hit]]) -> list[Hit]:
    present = {hit.chunk.chunk_hash for turn in placed for hit in turn}
    return [hit for hit in hits if hit.chunk.chunk_hash not in present]


def _size(placed: Sequence[Sequence[Hit]]) -> int:
    return sum(len(hit.chunk.token_ids) for turn in placed for hit in turn)


def in_one_turn(layout: PromptLayout, conversation: Conversation, hits: Sequence[Hit], room: int) -> Conversation:
    """Return a conversation as one question, for models whose template can't put turns after each other.

    The oldest turns are left out, as in `fit`. hits: the last question's.
    """
    room -= len(layout.anchor) + len(layout.instruction_tokens(conversation.instruction))
    room -= min(_size([hits]), room // 2)

    def joined(first: int) -> str:
        said = [f"Question: {turn.question}\nAnswer: {turn.answer}" for turn in conversation.turns[first:]]
        return "\n".join([*said, f"Question: {conversation.question}"]) if said else conversation.question

    def fits(first: int) -> bool:
        return len(layout.question_tokens(joined(first))) <= room

    first = bisect_left(range(len(conversation.turns)), True, key=fits)
    return Conversation(joined(first), (), conversation.instruction)
