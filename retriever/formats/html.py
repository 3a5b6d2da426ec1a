"""HTML, read as browsers do, and EPUB, which is HTML in a ZIP file.

lexbor parses by the rules of HTML5, so that tags that may be left out are there; what isn't read is taken out of its
tree, and html-to-markdown writes what is left.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePosixPath
from posixpath import normpath
from urllib.parse import unquote
from xml.etree import ElementTree

import webencodings
from html_to_markdown import ConversionOptions, PreprocessingOptions, convert
from selectolax.lexbor import LexborHTMLParser, LexborNode

from ragkv.errors import DocumentError
from ragkv.retriever.formats.archive import open_zip
from ragkv.retriever.formats.text import decode, first_heading, mark_of

_OPTIONS = ConversionOptions(
    compact_tables=True,
    skip_images=True,
    autolinks=False,
    bullets="-",
    extract_metadata=False,
    hidden_content="all",  # what is hidden is taken out here, but what a button shows
    preprocessing=PreprocessingOptions(enabled=False),
)
_DROPPED = (
    "head, script, style, noscript, template, nav, footer, svg, iframe, object, canvas, audio, video, input, select, "
    "textarea, datalist, button[type=submit], button[type=reset], [role=navigation]"
)
_HIDDEN = "[hidden]:not([hidden=until-found]):not([role=tabpanel]), [aria-hidden=true]:not([role=tabpanel])"
_CONTROLS = "button, label, legend, option"  # which stand apart though nothing is written between them
_INLINE = [  # what is written without a mark of its own
    *("a", "abbr", "b", "big", "bdi", "bdo", "button", "cite", "data", "del", "dfn", "em", "font", "i", "img", "ins"),
    *("kbd", "label", "mark", "s", "samp", "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u", "var"),
    "wbr",
]
_SPACE = re.compile(r"(?P<pre><pre\b.*?</pre>)|[ \t\n\f\r]{2,}|[\t\n\f\r]", re.S)  # as one blank, but in `pre`
_DECLARATION = re.compile(rb"""<(?:meta|\?xml)\b[^>]*?\b(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.I)
_DECLARED_WITHIN = 4096  # bytes; browsers look at 1024
_CLOSED_IN_ITSELF = re.compile(r"<(title|script|style|textarea|iframe|noscript)\b([^<>]*)/>", re.I)


def parse_html(data: bytes) -> tuple[str, str]:
    """Take <title> or the first heading, and the text as Markdown, without navigation, scripts, controls and images."""
    return read_html(_decode(data))


def read_html(html: str) -> tuple[str, str]:
    """Return the title and the Markdown of a page."""
    title, body = _content(html)
    done = convert(_SPACE.sub(lambda space: space["pre"] or " ", body), _OPTIONS)
    if done.warnings:
        raise DocumentError(f"its HTML can't be read ({done.warnings[0].message}); save it as text")
    text = re.sub(r"[ \t]+$", "", done.content or "", flags=re.M)
    return title.strip() or first_heading(text), text


def _content(html: str) -> tuple[str, str]:
    """Return the title, and as HTML what of the page is text; the tree, which takes much memory, is gone by then."""
    tree = LexborHTMLParser(html)
    heading = tree.css_first("title:not(svg title)")
    title = heading.text() if heading else ""
    controlled = {id for node in tree.css("[aria-controls]") for id in (node.attributes["aria-controls"] or "").split()}
    for node in tree.css(_DROPPED):
        node.decompose()
    for node in tree.css(_HIDDEN):
        if node.id not in controlled:
            node.decompose()
    for node in tree.css(_CONTROLS):
        node.insert_before(" ")
        node.insert_after(" ")
    tree.unwrap_tags(_INLINE, delete_empty=True)
    for table in _layout_tables(tree):
        _unwrap_table(tree, table)
    return title, (tree.body.html if tree.body else None) or ""


def _layout_tables(tree: LexborHTMLParser) -> list[LexborNode]:
    """Return the tables that are there for the look of the page: of one column, or around a table of several rows."""
    tables, around = tree.css("table"), set[int]()
    for table in tables:
        node = table.parent if len(_rows(table)) > 1 else None
        while node is not None and node.mem_id not in around:
            around.add(node.mem_id)
            node = node.parent
    return [
        table for table in tables if table.mem_id in around or all(len(list(row.iter())) < 2 for row in _rows(table))
    ]


def _unwrap_table(tree: LexborHTMLParser, table: LexborNode) -> None:
    """Make paragraphs of the cells."""
    rows = _rows(table)
    cells = [cell for row in rows for cell in row.iter()]
    for node in (*cells, *rows, *table.iter(), table):
        node.insert_before(tree.create_node("p"))
        node.insert_after(tree.create_node("p"))
        node.unwrap(delete_empty=True)


def _rows(table: LexborNode) -> list[LexborNode]:
    return [row for part in table.iter() for row in part.iter() if row.tag == "tr"]


def _decode(data: bytes) -> str:
    """Decode what a byte order mark says, else UTF-8, else what the page declares, as browsers understand the label."""
    declared = _declared(data)
    if declared is None or b"\x00" in data:
        return decode(data)
    if declared.name != "iso-2022-jp":  # whose bytes are ASCII's, too
        with suppress(DocumentError):
            return decode(data)
    try:
        return str(declared.codec_info.decode(data)[0])
    except UnicodeDecodeError as error:
        raise DocumentError(f"it isn't {declared.name}, which it declares ({error}); convert it to UTF-8") from error


def _declared(data: bytes) -> webencodings.Encoding | None:
    """Return the encoding that the page declares, if another than UTF-8: what can be read isn't UTF-16, whatever it
    says."""
    match = _DECLARATION.search(data, 0, _DECLARED_WITHIN)
    encoding = webencodings.lookup(match[1].decode("ascii")) if match and mark_of(data) is None else None
    return None if encoding is None or encoding.name.startswith("utf") else encoding


def parse_epub(data: bytes) -> tuple[str, str]:
    """Take the title of the package, and the chapters in the order in which they are read."""
    with open_zip(data) as book:
        container = ElementTree.fromstring(book.read("META-INF/container.xml"))
        package = container.findall(".//{*}rootfile")[0].attrib["full-path"]
        content = ElementTree.fromstring(book.read(package))
        names = [normpath(str(PurePosixPath(package).parent / unquote(href))) for href in _chapters(content)]
        if "META-INF/encryption.xml" in book.namelist():  # fonts alone may be, too
            encryption = ElementTree.fromstring(book.read("META-INF/encryption.xml"))
            encrypted = {unquote(node.get("URI", "")) for node in encryption.iterfind(".//{*}CipherReference")}
            if not encrypted.isdisjoint(names):
                raise DocumentError("the book is encrypted; get it without copy protection")
        pages = [_CLOSED_IN_ITSELF.sub(r"<\1\2></\1>", _decode(book.read(name))) for name in names]
    return content.findtext(".//{*}title", ""), "\n\n".join(read_html(page)[1] for page in pages)


def _chapters(package: ElementTree.Element) -> Iterator[str]:
    items = {node.get("id"): node for node in package.iterfind(".//{*}item")}
    for reference in package.iterfind(".//{*}itemref"):
        item = items[reference.get("idref")]
        if "html" in item.get("media-type", "") and "nav" not in item.get("properties", "").split():
            yield item.get("href", "")
