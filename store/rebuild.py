"""Finds entries by the headers of their records, when the index is missing."""

import logging
from collections.abc import Iterator

from ragkv.store.record import CorruptRecordError, decode, identify
from ragkv.store.segments import ALIGNMENT, SegmentFiles, padded

logger = logging.getLogger(__name__)

_LAYER_BYTES = 2
_Record = tuple[bytes, int, int, int]  # key, segment, offset, length


def find_chunks(files: SegmentFiles) -> Iterator[tuple[bytes, int, int, tuple[int, ...]]]:
    """Yield the key (without the layer), segment, offset and records' lengths of each entry with all its layers.

    All layers: from 0 on without a gap, and as many as the entry of that model that has the most.
    """
    runs: list[list[_Record]] = []
    for record in _records(files):
        if runs and _follows(runs[-1][-1], record):
            runs[-1].append(record)
        elif _layer(record) == 0:
            runs.append([record])
    num_layers: dict[bytes, int] = {}
    for run in runs:
        model = _model(run[0])
        num_layers[model] = max(len(run), num_layers.get(model, 0))
    for run in runs:
        key, segment, offset, _ = run[0]
        if len(run) == num_layers[_model(run[0])]:
            yield key[:-_LAYER_BYTES], segment, offset, tuple(length for *_, length in run)


def _records(files: SegmentFiles) -> Iterator[_Record]:
    """Yield the records that verify, in order."""
    for extent in files.data():
        offset = extent.offset
        while offset < extent.end:
            try:
                key, length = identify(files.read(extent.segment, offset, ALIGNMENT) or b"")
                decode(key, files.read(extent.segment, offset, length) or b"")
            except CorruptRecordError:
                offset += ALIGNMENT
            else:
                yield key, extent.segment, offset, length
                offset += padded(length)


def _layer(record: _Record) -> int:
    return int.from_bytes(record[0][-_LAYER_BYTES:], "big")


def _model(record: _Record) -> bytes:
    """Return what follows the hashes of chunk and anchor: fingerprint and heads."""
    return record[0][32:-_LAYER_BYTES]


def _follows(before: _Record, record: _Record) -> bool:
    return (
        record[0][:-_LAYER_BYTES] == before[0][:-_LAYER_BYTES]
        and _layer(record) == _layer(before) + 1
        and record[1:3] == (before[1], before[2] + padded(before[3]))
    )
