"""PDF, by pdfium, as Chromium reads it."""

import pypdfium2
from pypdfium2 import raw

from ragkv.errors import DocumentError

_CUT_WORD = "\ufffe"  # pdfium's mark in the place of a hyphen at a line's end, and of the end


def parse_pdf(data: bytes) -> tuple[str, str]:
    """Take the title of the metadata and the text layer of all pages, a blank line between pages."""
    try:
        with pypdfium2.PdfDocument(data) as document:
            title = document.get_metadata_value("Title")
            pages = [_text(page) for page in document]
    except pypdfium2.PdfiumError as error:
        if getattr(error, "err_code", None) in (raw.FPDF_ERR_PASSWORD, raw.FPDF_ERR_SECURITY):
            raise DocumentError("the PDF is encrypted; save it without a password") from error
        raise DocumentError(f"the PDF is damaged ({error}); export it again") from error
    text = "\n\n".join(pages)
    if not text.strip():
        raise DocumentError(f"the PDF has no text layer ({len(pages)} pages); run OCR on it first")
    return title, text


def _text(page: pypdfium2.PdfPage) -> str:
    layer = page.get_textpage()
    text: str = layer.get_text_range()
    layer.close()
    page.close()
    return text.replace("\r\n", "\n").replace(_CUT_WORD, "")
