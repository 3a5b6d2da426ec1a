import pytest
from fpdf import FPDF
from fpdf.encryption import AccessPermission

from ragkv.errors import DocumentError
from ragkv.retriever.formats import parse_html, parse_markdown, parse_pdf


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("text\n\n## The `title` ##\n\n# Later\n", "The `title`"),
        ("```sh\n# a comment\n```\n# Title\n", "Title"),
        ("~~~\n```\n# a comment\n~~~\n# Title\n", "Title"),
        ("Title\n=====\n\n# Later\n", "Title"),
        ("#hashtag\n\n#\n\ntext", ""),
        ("    # code\n", ""),
    ],
)
def test_markdown_title_is_the_first_heading(text: str, title: str) -> None:
    assert parse_markdown(text.encode()) == (title, text)


def test_html_keeps_the_text_and_its_paragraphs() -> None:
    title, text = parse_html(b"""<!doctype html><html><head><title> The\n title </title><style>p {}</style></head><body>
        <nav>Home | About</nav><script>var x = "junk";</script><!-- a remark -->
        <header><h1>Heading</h1></header>
        <p>One <b>bold</b>
           word.</p><p> Two &amp; a<br>half.</p>
        <ul><li>first</li><li>second</li></ul>
        <table><tr><th>k</th><td>v</td></tr></table>
        <pre>def f():\n    return 1</pre>
        <noscript>junk</noscript><button>junk</button><p hidden>junk <button>junk</button></p>
        <i aria-hidden="true">junk</i><div role=navigation>junk</div><footer>junk</footer></body></html>""")
    assert title.split() == ["The", "title"]
    assert text.strip() == (
        "Heading\n\nOne bold word.\n\nTwo & a\nhalf.\n\nfirst\n\nsecond\n\nk\tv\n\ndef f():\n    return 1"
    )


def test_html_needs_no_body_or_title() -> None:
    title, text = parse_html(b"just <i>text</i>")
    assert (title, text.strip()) == ("", "just text")


def test_html_in_the_encoding_that_it_declares() -> None:
    page = '<meta charset="iso-8859-1"><p>café</p>'
    assert parse_html(page.encode("latin-1"))[1].strip() == "café"
    assert parse_html(page.encode())[1].strip() == "café"
    with pytest.raises(DocumentError, match="UTF-8"):
        parse_html("<p>café</p>".encode("latin-1"))
    with pytest.raises(DocumentError, match="binary"):
        parse_html(b"<meta charset=latin-1>\x00\xff")


def make_pdf(*pages: str, title: str = "", password: str | None = None) -> bytes:
    pdf = FPDF()
    pdf.set_font("helvetica", size=12)
    pdf.set_title(title)
    for page in pages:
        pdf.add_page()
        pdf.multi_cell(0, text=page)
    if password is not None:
        pdf.set_encryption("owner", password, permissions=AccessPermission.all())
    return bytes(pdf.output())


def test_pdf_text_of_all_pages_and_title() -> None:
    title, text = parse_pdf(make_pdf("The first page.", "The second page.", title="A paper"))
    assert (title, text) == ("A paper", "The first page.\n\nThe second page.")


def test_pdf_encrypted_without_a_password_is_read() -> None:
    assert parse_pdf(make_pdf("Open to all.", password=""))[1] == "Open to all."


def test_pdf_with_a_password_is_refused() -> None:
    with pytest.raises(DocumentError, match="encrypted"):
        parse_pdf(make_pdf("Secret.", password="user"))


def test_pdf_without_text_needs_ocr() -> None:
    with pytest.raises(DocumentError, match="OCR"):
        parse_pdf(make_pdf("", ""))


@pytest.mark.parametrize("damage", [lambda pdf: b"", lambda pdf: b"junk" * 99, lambda pdf: pdf[: len(pdf) // 3]])
def test_damaged_pdf_is_refused(damage) -> None:
    with pytest.raises(DocumentError, match=r"damaged|OCR"):
        parse_pdf(damage(make_pdf("Some text.")))
