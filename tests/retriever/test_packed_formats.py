"""PDF and Office files."""

import io
import zipfile
from datetime import date, datetime

import docx
import openpyxl
import pptx
import pytest
from fpdf import FPDF
from fpdf.encryption import AccessPermission
from pptx.util import Inches

from ragkv.errors import DocumentError
from ragkv.retriever.formats.html import parse_epub
from ragkv.retriever.formats.office import parse_docx, parse_pptx, parse_xlsx
from ragkv.retriever.formats.pdf import parse_pdf

PLANS = [["Plan", "Price"], ["Basic", "10 | 12"]]
TABLE = "| Plan | Price |\n| --- | --- |\n| Basic | 10 \\| 12 |"


def saved(document) -> bytes:
    with io.BytesIO() as file:
        document.save(file)
        return file.getvalue()


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


def test_pdf_joins_a_word_that_is_cut_at_the_end_of_a_line() -> None:
    assert parse_pdf(make_pdf("structures man-\nagement\nof 3-\n4 days"))[1] == "structures management\nof 3-\n4 days"


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


def make_docx(title: str = "") -> bytes:
    document = docx.Document()
    document.core_properties.title = title
    document.add_heading("Heading", 1)
    document.add_paragraph("Some ").add_run("bold").bold = True
    document.add_paragraph("a tab\tand\na line")
    for item in ("one", "two"):
        document.add_paragraph(item, style="List Bullet")
    table = document.add_table(2, 2)
    for i, row in enumerate(PLANS):
        for j, cell in enumerate(row):
            table.cell(i, j).text = cell
    return saved(document)


def test_docx() -> None:
    title, text = parse_docx(make_docx(title="A letter"))
    assert title == "A letter"
    assert text.strip() == f"# Heading\n\nSome bold\n\na tab and\na line\n\n- one\n- two\n\n{TABLE}"
    assert parse_docx(make_docx())[0] == "Heading"


def test_pptx() -> None:
    deck = pptx.Presentation()
    deck.core_properties.title = "A deck"
    slide = deck.slides.add_slide(deck.slide_layouts[1])
    slide.shapes.title.text, slide.placeholders[1].text = "First", "a point\nanother"
    slide.notes_slide.notes_text_frame.text = "What to say"
    slide = deck.slides.add_slide(deck.slide_layouts[6])
    table = slide.shapes.add_table(2, 2, 0, 0, Inches(4), Inches(2)).table
    for i, row in enumerate(PLANS):
        for j, cell in enumerate(row):
            table.cell(i, j).text = cell
    box = slide.shapes.add_group_shape().shapes.add_group_shape().shapes.add_textbox(0, 0, Inches(1), Inches(1))
    box.text_frame.text = "in a group"
    assert parse_pptx(saved(deck)) == (
        "A deck",
        f"## First\n\na point\nanother\n\nWhat to say\n\n{TABLE}\n\nin a group",
    )


def test_xlsx() -> None:
    book = openpyxl.Workbook()
    book.properties.title = "A book"
    sheet = book.active
    sheet.title = "Plans"
    for row in (
        *PLANS,
        [None, None],
        [1.0, 0.1],
        [date(2024, 3, 1), datetime(2024, 3, 1, 12, 30)],
        [True, 12345678901],
    ):
        sheet.append(row)
    book.create_sheet("Empty")
    hidden = book.create_sheet("Hidden")
    hidden["A1"], hidden.sheet_state = "secret", "hidden"
    book.create_sheet("Other")["C5"] = "alone"
    assert parse_xlsx(saved(book)) == (
        "A book",
        f"## Plans\n\n{TABLE}\n| 1 | 0.1 |\n| 2024-03-01 | 2024-03-01 12:30:00 |\n| True | 12345678901 |"
        "\n\n## Other\n\n| alone |\n| --- |",
    )


PARSERS = [parse_docx, parse_pptx, parse_xlsx]


@pytest.mark.parametrize("parse", PARSERS)
def test_encrypted_and_old_office_files_are_refused(parse) -> None:
    old = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(500)
    with pytest.raises(DocumentError, match="before 2007"):
        parse(old)
    with pytest.raises(DocumentError, match="encrypted"):
        parse(old + "EncryptedPackage".encode("utf-16-le"))


def test_office_files_may_lack_properties() -> None:
    with io.BytesIO() as file:
        with zipfile.ZipFile(io.BytesIO(make_docx("A letter"))) as letter, zipfile.ZipFile(file, "w") as without:
            for name in letter.namelist():
                if name != "docProps/core.xml":
                    without.writestr(name, letter.read(name))
        assert parse_docx(file.getvalue())[0] == "Heading"


@pytest.mark.parametrize("parse", [*PARSERS, parse_epub])
def test_zip_bombs_are_refused_before_they_are_read(parse) -> None:
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("word/document.xml", bytes(520 << 20))
        with pytest.raises(DocumentError, match=r"unpacks to 520 MiB, more than 512"):
            parse(file.getvalue())
