"""HTML as browsers read it, and EPUB."""

import io
import zipfile

import pytest

from ragkv.errors import DocumentError
from ragkv.retriever.formats.html import parse_epub, parse_html


def text_of(page: str) -> str:
    return parse_html(page.encode())[1].strip()


def test_a_page_keeps_its_text_and_its_structure() -> None:
    title, text = parse_html(b"""<!doctype html><html><head><title> The\n title </title><style>p {}</style></head><body>
        <nav>Home | About</nav><script>var x = "junk";</script><!-- a remark -->
        <header><h1>Heading</h1></header>
        <p>One <b>bold</b>
           word.</p><p> Two &amp; a<br>half.</p>
        <ul><li>first</li><li>second</li></ul>
        <table><tr><th>k</th><td>v</td></tr></table>
        <pre>def f():\n    return 1</pre>
        <noscript>junk</noscript><button type=submit>junk</button><p hidden>junk <button>junk</button></p>
        <select><option>junk</select><textarea>junk</textarea><img alt="junk" src="junk.png">
        <i aria-hidden="true">junk</i><div role=navigation>junk</div><footer>junk</footer></body></html>""")
    assert title.split() == ["The", "title"]
    assert text.strip() == (
        "# Heading\n\nOne bold word.\n\nTwo & a\nhalf.\n\n- first\n- second\n\n| k | v |\n| --- | --- |\n\n"
        "```\ndef f():\n    return 1\n```"
    )


@pytest.mark.parametrize(
    ("page", "title", "text"),
    [
        (
            "<!DOCTYPE html><html><head><meta charset=utf-8><title>Prices</title><p>The Basic plan costs 10 euro.",
            "Prices",
            "The Basic plan costs 10 euro.",
        ),
        ("<title>T</title><p>one<p>two<ul><li>a<li>b</ul>", "T", "one\n\ntwo\n\n- a\n- b"),
        ("<dl><dt>Term<dd>What it means<dt>Other<dd>More</dl>", "", "Term\n\nWhat it means\n\nOther\n\nMore"),
        ("just <i>text</i>", "", "just text"),
        ("<h2>A heading</h2>text", "A heading", "## A heading\n\ntext"),
        ("<p>a</b></div> <b>b", "", "a b"),
        ("<svg><title>icon</title></svg><p>text", "", "text"),
    ],
)
def test_tags_may_be_left_out(page: str, title: str, text: str) -> None:
    assert parse_html(page.encode()) == (title, f"{text}\n")


PLANS = "| Plan | Price |\n| --- | --- |\n| Basic | 10 |\n| Pro | 20 |"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<table><tr><th>Plan<th>Price<tr><td>Basic<td>10<tr><td>Pro<td>20</table>", PLANS),
        ("<table><thead><tr><th>Plan<th>Price<tbody><tr><td>Basic<td>10<tfoot><tr><td>Pro<td>20</table>", PLANS),
        (
            "<table><tr><td><p>Plan</p></td><td><p>Price</p></td></tr><tr><td><p>Basic</p></td><td><div>10</div></td></tr>"
            "<tr><td><ul><li>Pro</ul><td><br>20</table>",
            PLANS,
        ),
        (
            "<table><tr><td colspan=2>wide<td>x<tr><td>1<td>2<td>3</table>",
            "| wide | | x |\n| --- | --- | --- |\n| 1 | 2 | 3 |",
        ),
        ("<table><tr><td rowspan=2>r<td>1<tr><td>2</table>", "| r | 1 |\n| --- | --- |\n|  | 2 |"),
        ("<table><tr><td>a|b<td>c</table>", "| a\\|b | c |\n| --- | --- |"),
        ("<table><tr><td>a<table><tr><td>b<td>c</table><td>d</table>", "| a b c | d |\n| --- | --- |"),
        # tables that only place things on the page
        ("<table><tr><td><h2>H</h2><p>one<p>two</table>", "## H\n\none\n\ntwo"),
        ("<table><tr><td>left<td><table><tr><th>Plan<th>Price<tr><td>Basic<td>10<tr><td>Pro<td>20</table></table>tail",
         f"left\n\n{PLANS}\n\ntail"),
    ],
)  # fmt: skip
def test_cells_of_a_table_stay_apart_in_their_row(page: str, text: str) -> None:
    assert text_of(page) == text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (
            "<h2><button>How do I reset the router?</button></h2><div>Hold the pin for ten seconds.</div>",
            "## How do I reset the router?\n\nHold the pin for ten seconds.",
        ),
        ("<button class=accordion>How?</button><div class=panel>So.</div>", "How?\n\nSo."),
        ("<h3><button aria-controls='x a1'>Q</button></h3><div id=a1 hidden><p>A</div>", "### Q\n\nA"),
        ("<a role=tab aria-controls=t>Q</a><div id=t role=tabpanel aria-hidden=true>A</div>", "Q\n\nA"),
        ("<div hidden=until-found>A</div>", "A"),
        ("<details><summary>Question?</summary>Answer</details>", "**Question?**\n\nAnswer"),
        ("<form><label>Name <input value=x></label><button type=submit>Send</button></form>", "Name"),
        ("<fieldset><legend>Size</legend><label>S</label><label>M</label></fieldset>", "**Size**\n\nS M"),
        ("<button>One</button><button>Two</button>", "One Two"),
        ("<p>a<b>b</b>c 10<sup>2</sup> <a href='https://x.org'>link</a> x<wbr>y", "abc 102 link xy"),
        ("<p>One <i>wrapped</i>\n\n  line.\n<ul>\n<li>a\n b</ul>", "One wrapped line.\n\n- a b"),
        ("<pre>a  b\n\n\n  c</pre>", "```\na  b\n\n\n  c\n```"),
        ("<p>snake_case * [1] # 5 &lt;b&gt;", "snake_case * [1] # 5 <b>"),
    ],
)
def test_what_is_content_and_what_a_control(page: str, text: str) -> None:
    assert text_of(page) == text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (b'<meta charset="iso-8859-1"><p>Price: \x80 10, \x93quoted\x94', "Price: € 10, “quoted”"),
        (b"<meta charset=us-ascii><p>caf\xe9", "café"),
        (b'<meta http-equiv="Content-Type" content="text/html; charset=windows-1251"><p>\xcf\xf0', "Пр"),
        (b'<?xml version="1.0" encoding="iso-8859-15"?><p>10 \xa4', "10 €"),
        ("<meta charset=shift_jis><p>日本語".encode("shift_jis"), "日本語"),
        ("<meta charset=iso-2022-jp><p>日本語".encode("iso-2022-jp"), "日本語"),
        ("<meta charset=utf-16><p>café".encode(), "café"),
        ("<meta charset=iso-8859-1><p>café".encode(), "café"),
        ("\ufeff<meta charset=iso-8859-1><p>café".encode(), "café"),
        ("\ufeff<p>café".encode("utf-16-le"), "café"),
        ("\ufeff<meta charset=utf-8><p>café".encode("utf-16-be"), "café"),
        ("<p>café".encode(), "café"),
    ],
)
def test_encodings_are_what_browsers_take_them_for(page: bytes, text: str) -> None:
    assert parse_html(page)[1].strip() == text


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (b"<p>caf\xe9", "UTF-8"),
        (b"<meta charset=utf-8><p>caf\xe9", "UTF-8"),
        (b"<meta charset=nonsense><p>caf\xe9", "UTF-8"),
        (b"<meta charset=euc-jp><p>caf\xe9", "euc-jp"),
        (b"<meta charset=latin-1>\x00\xff", "binary"),
        (b"<div>" * 2000 + b"text", "depth limit"),
    ],
)
def test_pages_that_cannot_be_read(page: bytes, says: str) -> None:
    with pytest.raises(DocumentError, match=says):
        parse_html(page)


def make_epub(chapters: dict[str, str], encrypted: str = "") -> bytes:
    """Make a book of these files; a nav and a style sheet come along."""
    spine = "".join(f'<itemref idref="{id}"/>' for id in ("n", "s", *(f"c{i}" for i in range(len(chapters)))))
    items = "".join(
        f'<item id="c{i}" href="{name.replace(" ", "%20")}" media-type="application/xhtml+xml"/>'
        for i, name in enumerate(chapters)
    )
    files = {
        "META-INF/container.xml": '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OEBPS/c.opf"/></rootfiles></container>',
        "OEBPS/c.opf": '<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">'
        f'<dc:title>A book</dc:title></metadata><manifest>{items}<item id="n" href="nav.xhtml" properties="nav" '
        'media-type="application/xhtml+xml"/><item id="s" href="s.css" media-type="text/css"/></manifest><spine>'
        f"{spine}</spine></package>",
        **{f"OEBPS/{name}": page for name, page in chapters.items()},
    }
    if encrypted:
        files["META-INF/encryption.xml"] = (
            '<encryption xmlns:enc="http://www.w3.org/2001/04/xmlenc#"><enc:CipherData>'
            f'<enc:CipherReference URI="{encrypted}"/></enc:CipherData></encryption>'
        )
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as book:
            for name, content in files.items():
                book.writestr(name, content)
        return file.getvalue()


CHAPTERS = {
    "b b.xhtml": "<?xml version='1.0'?><html><head><title/></head><body><h1>Second</h1>é</body></html>",
    "a.xhtml": "<html><head><script src='x'/></head><body><table><tr><td>k</td><td>v</td></tr></table></body></html>",
}  # fmt: skip


def test_epub_in_the_order_of_its_spine() -> None:
    title, text = parse_epub(make_epub(CHAPTERS))
    assert title == "A book" and text.split() == ["#", "Second", "é", *"|k|v|", *"|", "---", "|", "---", "|"]


def test_epub_with_copy_protection_is_refused_and_with_obfuscated_fonts_read() -> None:
    with pytest.raises(DocumentError, match="encrypted"):
        parse_epub(make_epub(CHAPTERS, encrypted="OEBPS/b%20b.xhtml"))
    assert "Second" in parse_epub(make_epub(CHAPTERS, encrypted="OEBPS/font.otf"))[1]
