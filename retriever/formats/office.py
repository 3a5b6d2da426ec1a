"""Word, PowerPoint and Excel files of today's kinds, which are XML in a ZIP file."""

import io
from collections.abc import Iterable, Iterator
from datetime import datetime, time
from typing import Any
from xml.etree import ElementTree

from ragkv.errors import DocumentError
from ragkv.retriever.formats.archive import open_zip
from ragkv.retriever.formats.text import first_heading, table

_OLD = b"\xd0\xcf\x11\xe0"  # an OLE file: a format before 2007, or what Office wraps an encrypted file in
_ENCRYPTED = "EncryptedPackage".encode("utf-16-le")


def parse_docx(data: bytes) -> tuple[str, str]:
    """Take headings, paragraphs, lists, tables, notes and text boxes, as HTML and from there as Markdown."""
    import mammoth

    from ragkv.retriever.formats.html import read_html

    title = _title(data)
    no_image = mammoth.images.img_element(lambda image: {})
    heading, text = read_html(mammoth.convert_to_html(io.BytesIO(data), convert_image=no_image).value)
    return title or heading, text


def parse_pptx(data: bytes) -> tuple[str, str]:
    """Take each slide's title as a heading, then its text, tables and notes."""
    import pptx

    title = _title(data)
    slides = [_slide(slide) for slide in pptx.Presentation(io.BytesIO(data)).slides]
    text = "\n\n".join(part for slide in slides for part in slide if part.strip())
    return title or first_heading(text), text


def parse_xlsx(data: bytes) -> tuple[str, str]:
    """Take each visible sheet with values, its name as a heading and its rows as a table."""
    from python_calamine import CalamineWorkbook, SheetVisibleEnum

    title = _title(data)
    workbook = CalamineWorkbook.from_filelike(io.BytesIO(data))
    names = [sheet.name for sheet in workbook.sheets_metadata if sheet.visible == SheetVisibleEnum.Visible]
    sheets = ((name, table(_rows(workbook.get_sheet_by_name(name).iter_rows()))) for name in names)
    return title, "\n\n".join(f"## {name}\n\n{text}" for name, text in sheets if text)


def _title(data: bytes) -> str:
    """Return the title that Office keeps beside the content. Raises DocumentError for a file that isn't a ZIP file."""
    if data.startswith(_OLD):
        if _ENCRYPTED in data:
            raise DocumentError("it is encrypted; save it without a password")
        raise DocumentError("it is in a format from before 2007; save it as .docx, .pptx or .xlsx")
    with open_zip(data) as file:
        if "docProps/core.xml" not in file.namelist():
            return ""
        properties = ElementTree.fromstring(file.read("docProps/core.xml"))
    return properties.findtext("{*}title", "")


def _slide(slide: Any) -> Iterator[str]:
    heading = slide.shapes.title
    if heading is not None and heading.has_text_frame:
        yield f"## {' '.join(heading.text_frame.text.split())}".removesuffix("## ")
    yield from _shapes(shape for shape in slide.shapes if heading is None or shape.shape_id != heading.shape_id)
    if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame) is not None:
        yield notes.text


def _shapes(shapes: Iterable[Any]) -> Iterator[str]:
    for shape in shapes:
        if shape.shape_type == 6:  # a group
            yield from _shapes(shape.shapes)
        elif shape.has_text_frame:
            yield shape.text_frame.text.replace("\v", "\n")
        elif shape.has_table:
            yield table([cell.text for cell in row.cells] for row in shape.table.rows)


def _rows(rows: Iterable[Iterable[Any]]) -> Iterator[list[str]]:
    for row in rows:
        yield [_cell(value) for value in row]


def _cell(value: Any) -> str:
    """Write a value as people do: a whole number without a fraction, a date without midnight."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, datetime) and value.time() == time():
        return value.date().isoformat()
    if isinstance(value, datetime):
        return value.isoformat(" ")
    return str(value)
