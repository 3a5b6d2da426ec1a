"""Rewrite the table of settings in configuration.md from ragkv/config.py, as `ragkv config --reference` prints it."""

from pathlib import Path

from ragkv.cli.settings import reference

PAGE = Path(__file__).with_name("configuration.md")
BEGIN, END = "<!-- begin: ragkv config --reference -->\n", "\n<!-- end -->"


def renewed(page: str) -> str:
    """The page, with the table as it is now. Raises ValueError where a marker is missing."""
    begin = page.index(BEGIN) + len(BEGIN)
    return page[:begin] + reference() + page[page.index(END, begin) :]


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
