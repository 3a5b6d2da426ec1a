"""ZIP files, which Office files and books are."""

import io
import zipfile

from ragkv.errors import DocumentError

MOST_BYTES = 512 << 20


def open_zip(data: bytes) -> zipfile.ZipFile:
    """Open a ZIP file; the caller closes it. Raises DocumentError for one that swells when it is read."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    size = sum(entry.file_size for entry in archive.infolist())  # what is read of an entry is no more than it says
    if size > max(MOST_BYTES, 2 * len(data)):
        archive.close()
        raise DocumentError(f"it unpacks to {size >> 20} MiB, more than {MOST_BYTES >> 20}; convert it to plain text")
    return archive
