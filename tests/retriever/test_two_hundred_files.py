"""Two hundred files of all kinds, whole, broken and malicious: each is read or refused with a reason, within bounds."""

import io
import json
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import docx
import openpyxl
import pptx
import pytest
from fpdf import FPDF

from ragkv.retriever.documents import SUFFIXES, Document
from ragkv.retriever.parse import MEMORY_BYTES

WORDS = ["the", "Größe", "of", "日本", "is", "10", "€", "مرحبا", "😀", "naïve"]
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "cp1252", "shift_jis", "koi8-r"]
TEXTS = [suffix for suffix in SUFFIXES if suffix not in (".pdf", ".docx", ".pptx", ".xlsx", ".epub")]

# In a process whose only children are the readers: those of a process that runs other tests are engines too.
READ = """
import pickle, resource, sys
from pathlib import Path
from ragkv.retriever.parse import Reader
with Reader() as reader:
    results = {path.name: list(reader.read(path)) for path in sorted(Path(sys.argv[1]).iterdir())}
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
pickle.dump((results, peak), sys.stdout.buffer)
"""


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def text(rng: random.Random, suffix: str, size: int) -> str:
    """Make a document of about `size` characters that its kind can hold."""
    count = max(1, size // 6)
    if suffix == ".csv":
        return "\n".join(",".join(rng.choices(WORDS, k=5)) for _ in range(count // 5 + 1))
    if suffix == ".json":
        return json.dumps([{"title": words(rng, 3), "text": words(rng, 20)} for _ in range(count // 23 + 1)])
    if suffix == ".jsonl":
        return "\n".join(json.dumps({"id": i, "text": words(rng, 20)}) for i in range(count // 20 + 1))
    if suffix in (".html", ".htm"):
        return "<title>A page</title><table>" + "".join(
            f"<tr><td>{words(rng, 4)}<td>{words(rng, 4)}" for _ in range(count // 8 + 1)
        )
    return "# A title\n\n" + "\n\n".join(words(rng, 20) for _ in range(count // 20 + 1))


def saved(document) -> bytes:
    with io.BytesIO() as file:
        document.save(file)
        return file.getvalue()


def zipped(**files: bytes | str) -> bytes:
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name.replace("__", "/"), content)
        return file.getvalue()


def make_docx(rng: random.Random) -> bytes:
    document = docx.Document()
    for _ in range(20):
        document.add_heading(words(rng, 3))
        document.add_paragraph(words(rng, 30))
    return saved(document)


def make_pptx(rng: random.Random) -> bytes:
    deck = pptx.Presentation()
    deck.slides.add_slide(deck.slide_layouts[0]).shapes.title.text = words(rng, 5)
    return saved(deck)


def make_xlsx(rng: random.Random) -> bytes:
    book = openpyxl.Workbook()
    for _ in range(50):
        book.active.append(rng.choices([*WORDS, 1, 0.5, None], k=5))
    return saved(book)


def make_epub(rng: random.Random) -> bytes:
    return zipped(
        **{
            "META-INF__container.xml": '<a><rootfile full-path="c.opf"/></a>',
            "c.opf": '<a><item id="a" href="a.html" media-type="application/xhtml+xml"/><itemref idref="a"/></a>',
            "a.html": f"<p>{words(rng, 50)}",
        },
    )


def make_pdf(rng: random.Random) -> bytes:
    pdf = FPDF()
    pdf.set_font("helvetica", size=12)
    pdf.add_page()
    pdf.multi_cell(0, text="A page of text. " * rng.randrange(1, 99))
    return bytes(pdf.output())


PACKED: dict[str, Callable[[random.Random], bytes]] = {
    ".docx": make_docx, ".pptx": make_pptx, ".xlsx": make_xlsx, ".epub": make_epub, ".pdf": make_pdf,
}  # fmt: skip


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Cut it off, or change some of its bytes."""
    if rng.random() < 0.5:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(20):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def deep(name: str, opening: str, closing: str = "", *, depth: int = 3000, around: str = "{}") -> tuple[str, bytes]:
    return name, around.format(f"{opening * depth}x{closing * depth}").encode()


def sparse() -> bytes:
    book = openpyxl.Workbook()
    book.active["A1"] = book.active["XFD1048576"] = 1
    return saved(book)


def malicious() -> Iterator[tuple[str, bytes]]:
    """Yield files that were made to take time or memory, or to reach outside."""
    word = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    lol = '<!DOCTYPE a [<!ENTITY a "lol">' + "".join(
        f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefghi", "bcdefghij", strict=True)
    )
    yield deep("div.html", "<div>")
    yield deep("ul.html", "<ul><li>")
    yield deep("table.html", "<table><tr><td>")
    yield deep("b.html", "<b><p>", depth=1000)
    yield deep("list.json", "[", "]", depth=100_000)
    yield deep("object.json", '{"a":', "}", depth=900)
    yield deep("quote.md", "> ")
    yield deep("yaml.md", "[", "]", around="---\ntitle: {}\n---\ntext")
    yield "deep.docx", zipped(**{"word__document.xml": f"<w:document {word}><w:body>{'<w:p>' * 5000}"})
    yield "entities.docx", zipped(**{"word__document.xml": f"{lol}]><w:document {word}>&j;</w:document>"})
    yield "entities.epub", zipped(**{"META-INF__container.xml": f"{lol}]><a>&j;</a>"})
    passwords = '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
    yield "outside.docx", zipped(**{"word__document.xml": f"{passwords}<w:document {word}>&x;</w:document>"})
    yield "bomb.docx", zipped(**{"word__document.xml": bytes(600 << 20)})
    yield "bomb.xlsx", sparse()
    yield "wide.csv", b"," * (1 << 20)
    yield "line.txt", ",".join(str(i * 7919) for i in range(30_000)).encode()
    yield "quote.csv", b'"' + b"a,b\n" * 100_000
    yield "rows.html", b"<table>" + b"".join(b"<tr><td>%d<td>b" % i for i in range(30_000))
    yield "attributes.html", b"<p " + b" ".join(b"a%d=1" % i for i in range(20_000)) + b">text"
    yield "spaces.html", b"<p>a" + b" " * (1 << 20) + b"b"
    yield "comment.html", b"<!--" * 100_000
    yield "pre.html", b"<p title='<pre'>x" * 10_000
    yield "aliases.md", b"---\na: &a [x]\n" + b"".join(b"b%d: &b%d [*a, *a]\n" % (i, i) for i in range(999)) + b"---\nx"
    yield "int.json", b"1" * 100_000
    yield "elements.html", b"<p>a" * (5 << 20)  # 3 GiB as a tree
    yield "big.txt", b"word " * (6 << 20)


def files() -> Iterator[tuple[str, bytes]]:
    rng = random.Random(25)
    yield from malicious()
    for suffix in TEXTS:
        yield f"nothing{suffix}", b""
        yield f"blank{suffix}", " \n\u200b".encode()
        yield f"binary{suffix}", rng.randbytes(1000)
        for encoding in ENCODINGS:
            yield f"{encoding}{suffix}", text(rng, suffix, rng.choice([10, 1000, 100_000])).encode(encoding, "replace")
        yield f"large{suffix}", text(rng, suffix, 1 << 20).encode()
    for suffix, make in PACKED.items():
        yield f"nothing{suffix}", b""
        yield f"binary{suffix}", rng.randbytes(1000)
        yield f"zip{suffix}", zipped(a="b")
        yield f"whole{suffix}", make(rng)
        for i in range(10):
            yield f"damaged{i}{suffix}", damaged(rng, make(rng))


@pytest.fixture(scope="module")
def read(tmp_path_factory) -> tuple[dict[str, list], int]:
    """Return what each file has, and the bytes of the largest of the processes that read them."""
    folder = tmp_path_factory.mktemp("files")
    for name, data in files():
        Path(folder, name).write_bytes(data)
    done = subprocess.run([sys.executable, "-P", "-c", READ, folder], stdout=subprocess.PIPE, check=True)
    shutil.rmtree(folder)
    return pickle.loads(done.stdout)


@pytest.fixture
def results(read) -> dict[str, list]:
    return read[0]


def test_each_is_read_or_refused_with_a_reason(results) -> None:
    assert len(results) >= 200
    for name, documents in results.items():
        assert documents, name
        for document in documents:
            if isinstance(document, Document):
                assert document.text.strip() and "root:x:0" not in document.text, name
            else:
                assert name in str(document) and ";" in str(document) and len(str(document)) < 1000, name


def test_what_is_whole_is_read(results) -> None:
    for name, documents in results.items():
        if name.startswith(("whole", "large", "utf-8", "utf-16.", "utf-32", "rows", "big", "line", "spaces")):
            assert all(isinstance(document, Document) for document in documents), (name, documents[:3])


def test_within_the_bounds(read) -> None:
    assert MEMORY_BYTES / 2 < read[1] < MEMORY_BYTES  # elements.html came far
