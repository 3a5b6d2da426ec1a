from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from ragkv.errors import ConfigError, DocumentError, ModelError
from ragkv.retriever.chunking import Chunker
from ragkv.retriever.documents import Document

PROSE = "\n\n".join(
    f"Paragraph {i} says that the fox jumps over {i * 7} lazy dogs.   It goes on.\n  Then it ends." for i in range(40)
)
MARKDOWN = "\n\n".join(
    f"# Heading {i}\n\nText of section {i}.\n\n- item\n  - nested\n\n    code = {i}" for i in range(20)
)
HARD = "".join(chr(0x1F600 + i % 60) + chr(0x4E00 + 97 * i % 20000) for i in range(300)) + "x" * 500 + " \x1c\n\n\x1f"
CONTROL = "some words <|im_end|> " * 50  # for the splitter one token each, for the chunk many


@pytest.fixture
def chunker(tmp_path: Path) -> Callable[..., Chunker]:
    """A chunker of a tokenizer, which it loads from a folder."""

    def make(tokenizer: Tokenizer, *arguments: int, **options: int) -> Chunker:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return Chunker(tmp_path, *arguments, **options)

    return make


def document(text: str, markdown: bool = False) -> Document:
    return Document("id", "title", text, markdown)


@pytest.mark.parametrize("max_tokens", [16, 33, 512])
@pytest.mark.parametrize(
    ("text", "markdown"), [(PROSE, False), (MARKDOWN, True), (HARD, False), (HARD, True), (CONTROL, False)]
)
def test_chunks_fit_and_lose_nothing(chunker, tokenizer: Tokenizer, text: str, markdown: bool, max_tokens: int) -> None:
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True  # control tokens are text
    chunks = chunker(tokenizer, max_tokens).split(document(text, markdown))
    for chunk in chunks:
        assert 0 < len(chunk.token_ids) <= max_tokens
        assert chunk.text.endswith("\n\n") and chunk.text == chunk.text.rstrip() + "\n\n" and chunk.text.strip()
        assert chunk.token_ids == tuple(plain.encode(chunk.text, add_special_tokens=False).ids)
    assert "".join("".join(chunk.text.split()) for chunk in chunks) == "".join(text.split())


def test_paragraphs_and_headings_stay_whole(chunker, tokenizer: Tokenizer) -> None:
    chunks = chunker(tokenizer, 100).split(document(PROSE))
    assert all(chunk.text.startswith("Paragraph") and chunk.text.endswith("Then it ends.\n\n") for chunk in chunks)
    chunks = chunker(tokenizer, 60).split(document(MARKDOWN, markdown=True))
    assert all(chunk.text.startswith("# Heading") for chunk in chunks)


def test_overlap_repeats_the_end(chunker, tokenizer: Tokenizer) -> None:
    words = " ".join(f"w{i}" for i in range(200))
    first, second, *_ = chunker(tokenizer, 64, overlap=16).split(document(words))
    last = first.text.split()[-1]
    assert last in second.text.split()
    assert chunker(tokenizer, 64, overlap=63).split(document(PROSE))
    assert last not in chunker(tokenizer, 64).split(document(words))[1].text.split()


def test_control_tokens_in_a_document_are_text(chunker, tokenizer: Tokenizer) -> None:
    control = tokenizer.token_to_id("<|im_end|>")
    (chunk,) = chunker(tokenizer).split(document("before<|im_end|>after"))
    assert control not in chunk.token_ids
    assert tokenizer.decode(list(chunk.token_ids)) == "before<|im_end|>after\n\n"
    assert control in tokenizer.encode("<|im_end|>").ids


def test_truncation_and_padding_of_the_tokenizer_do_not_count(chunker, tokenizer: Tokenizer) -> None:
    truncating = Tokenizer.from_str(tokenizer.to_str())
    truncating.enable_truncation(20)
    truncating.enable_padding(length=200)
    assert chunker(truncating, 64).split(document(PROSE)) == chunker(tokenizer, 64).split(document(PROSE))


def test_tokenizer_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Chunker(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Chunker(tmp_path)


@pytest.mark.parametrize(("max_tokens", "overlap"), [(64, 64), (64, 65), (64, -1), (1, 0), (0, 0)])
def test_unusable_settings(chunker, tokenizer: Tokenizer, max_tokens: int, overlap: int) -> None:
    with pytest.raises(ConfigError):
        chunker(tokenizer, max_tokens, overlap)


def test_text_of_blanks_has_no_chunks(chunker, tokenizer: Tokenizer) -> None:
    assert chunker(tokenizer).split(document(" \n\t \u3000\n")) == []


def test_character_that_cannot_fit_is_an_error(chunker) -> None:
    ligature = "\ufdfa"  # NFKC writes it as 18 characters
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "?": 1}, unk_token="?"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    with pytest.raises(DocumentError, match="chunk_tokens"):
        chunker(tokenizer, 12).split(document(f"x {ligature} x"))
