"""The bytes of a text, Markdown, HTML or PDF file to (title, text). Knows nothing about paths: callers name the file.

Every parser raises DocumentError where there is nothing to read; the title is "" where the format has none.
"""

import io
import re
from typing import TYPE_CHECKING

from ragkv.errors import DocumentError

if TYPE_CHECKING:
    from bs4.element import Tag

_DROPPED = re.compile(
    r"^(head|script|style|noscript|template|nav|footer|svg|iframe|object|canvas|button|input|select|textarea)$"
)
_BLOCKS = re.compile(
    r"^(address|article|aside|blockquote|body|dd|details|div|dl|dt|fieldset|figcaption|figure|form|h[1-6]|header|hr|"
    r"main|ol|p|pre|section|summary|table|ul)$"
)
_LINES = re.compile(r"^(li|tr|caption)$")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$")
_FENCE = re.compile(r" {0,3}(```|~~~)")
_UNDERLINE = re.compile(r" {0,3}=+[ \t]*$")


def decode(data: bytes) -> str:
    """Decode UTF-8, with or without a byte order mark. Raises DocumentError for anything else."""
    if b"\x00" in data:
        raise DocumentError("it holds binary data, not text; convert it to UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"it isn't UTF-8 (byte {error.start}); convert it to UTF-8 text") from error


def parse_text(data: bytes) -> tuple[str, str]:
    """Plain text has no title."""
    return "", decode(data)


def parse_markdown(data: bytes) -> tuple[str, str]:
    """Take the first heading outside fenced code as the title."""
    text = decode(data)
    fence = previous = ""
    for line in text.splitlines():
        if mark := _FENCE.match(line):
            fence = ("" if fence == mark[1] else fence) if fence else mark[1]
        elif not fence:
            if (heading := _HEADING.match(line)) and heading[1]:
                return heading[1], text
            if _UNDERLINE.match(line) and previous.strip():
                return previous.strip(), text
        previous = line
    return "", text


def parse_html(data: bytes) -> tuple[str, str]:
    """Take <title>, and the text without navigation, scripts and controls; paragraphs end in a blank line."""
    from bs4 import BeautifulSoup
    from bs4.element import NavigableString, PageElement
    from bs4.exceptions import ParserRejectedMarkup

    try:
        soup = BeautifulSoup(_decode_html(data), "html.parser")
    except (ParserRejectedMarkup, RecursionError) as error:
        raise DocumentError(f"its HTML can't be parsed ({error}); save it as text") from error
    title = soup.title.get_text() if soup.title else ""
    # no CSS selectors: under Python 3.11.2 (Debian 12) soupsieve 4.1 refuses even "p"
    for tag in soup.find_all(_is_dropped):
        tag.decompose()
    strings: list[PageElement] = list(soup.find_all(string=True))
    for string in strings:
        # comments and declarations are subclasses: not text, and not to be made text
        if type(string) is NavigableString and string.find_parent("pre") is None:
            string.replace_with(re.sub(r"\s+", " ", string))
    for kinds, space in ((_BLOCKS, "\n\n"), (_LINES, "\n")):
        for tag in soup.find_all(kinds):
            tag.insert_before(space)
            tag.insert_after(space)
    for tag in soup.find_all(["td", "th"]):
        tag.insert_after("\t")
    for tag in soup.find_all("br"):
        tag.replace_with("\n")
    text = re.sub(r"[ \t]+(?=\n)", "", soup.get_text())
    text = re.sub(r"\n (?! )", "\n", text)  # the blank between two tags; `pre` keeps its indents
    return title, re.sub(r"\n{3,}", "\n\n", text)


def parse_pdf(data: bytes) -> tuple[str, str]:
    """Take the title of the metadata and the text layer of all pages, a blank line between pages."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    try:
        reader = PdfReader(io.BytesIO(data))
        text = "\n\n".join(page.extract_text() for page in reader.pages)
        title = reader.metadata.title if reader.metadata else None
    except FileNotDecryptedError as error:
        raise DocumentError("the PDF is encrypted; save it without a password") from error
    except DependencyError as error:
        raise DocumentError(f"the PDF is encrypted ({error}); save it without encryption") from error
    except Exception as error:  # a damaged PDF fails anywhere in pypdf, with KeyError as well as with its own errors
        raise DocumentError(f"the PDF is damaged ({type(error).__name__}: {error}); export it again") from error
    if not text.strip():
        raise DocumentError(f"the PDF has no text layer ({len(reader.pages)} pages); run OCR on it first")
    return title or "", text


def _is_dropped(tag: "Tag") -> bool:
    hidden = tag.has_attr("hidden") or tag.get("aria-hidden") == "true"
    return hidden or tag.get("role") == "navigation" or _DROPPED.match(tag.name) is not None


def _decode_html(data: bytes) -> str:
    """Decode UTF-8, else the encoding that the page declares."""
    from bs4.dammit import EncodingDetector

    try:
        return decode(data)
    except DocumentError:
        declared = EncodingDetector.find_declared_encoding(data, is_html=True)
        if b"\x00" in data or declared is None:
            raise
    try:
        return data.decode(declared)
    except (LookupError, UnicodeDecodeError) as error:
        raise DocumentError(f"it isn't {declared}, which it declares ({error}); convert it to UTF-8") from error
