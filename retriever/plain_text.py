"""Text that people wrote, as the generator's tokens. Knows nothing about chunks or prompts."""

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ragkv.errors import ModelError

# Added tokens that are text: words, and runs of blanks, which tokenizers for code have. Whatever else a vocabulary adds
# stands for something that text can't say (a turn's beginning, a tool's call), flagged "special" or not: DeepSeek-R1's
# distilled models, for one, don't flag the tokens of their roles.
_CONTENT = re.compile(r"[\w\s]+")


class PlainTokenizer:
    """A model's tokenizer for documents and questions: control tokens spelt out in them ("<|im_end|>") become ordinary
    text, so that nobody can open or end a turn of the chat from there.

    folder: holds tokenizer.json. without_control: the tokenizer without its control tokens, for a library that counts
    tokens. Raises ModelError if it can't be loaded.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            described: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            added = described.get("added_tokens", [])
            control = [each for each in added if each["special"] or not _CONTENT.fullmatch(each["content"])]
            described["added_tokens"] = [each for each in added if each not in control]
            self.without_control: Tokenizer = Tokenizer.from_str(json.dumps(described))
        except Exception as error:  # `tokenizers` raises bare Exception for a damaged file
            message = f"can't load {str(path)!r} ({error}); give a folder with a valid tokenizer.json"
            raise ModelError(message) from error
        self.without_control.no_truncation()
        self.without_control.no_padding()
        unknown = _unknown(described["model"])
        self._control = {each["id"] for each in control if each["content"] != unknown}

    def encode(self, text: str) -> list[int]:
        """Return the text's tokens; none of them is a control token."""
        # As a batch, which lets other threads run meanwhile.
        (encoded,) = self.without_control.encode_batch([text], add_special_tokens=False)
        token_ids: list[int] = encoded.ids
        if self._control.isdisjoint(token_ids):
            return token_ids
        # Vocabularies of whole pieces (Unigram) have control tokens as pieces too: nobody finds half of one.
        found = [span for id, span in zip(token_ids, encoded.offsets, strict=True) if id in self._control]
        cuts = [start + 1 for start, end in found if end - start > 1 and start + 1 < len(text)]
        if not cuts:  # the spelling is a single character
            return [id for id in token_ids if id not in self._control]
        parts = (text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))
        return [id for part in parts for id in self.encode(part)]


def _unknown(model: dict[str, Any]) -> str | None:
    """Return the token for what isn't in the vocabulary, which text may contain."""
    if model.get("unk_id") is not None:  # Unigram
        return str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")
