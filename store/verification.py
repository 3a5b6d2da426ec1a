"""Checks a whole store, record by record, in key order: what `ragkv store verify` runs."""

from collections.abc import Iterable
from itertools import groupby

from ragkv.store.base import Verification
from ragkv.store.record import CorruptRecordError, decode

HASH_BYTES = 16
_LAYER_BYTES = 2


def verify_records(records: Iterable[tuple[bytes, bytes | memoryview]]) -> Verification:
    """Decode every record, and check that each entry's layers are numbered from 0 without a gap and are of one shape.

    An entry whose last layers are missing is noticed if another entry of the same model has more.
    """
    num_records, problems = 0, []
    model_to_chunks: dict[bytes, list[tuple[bytes, int]]] = {}
    for prefix, group in groupby(records, key=lambda record: record[0][:-_LAYER_BYTES]):
        shapes, layers = set(), []
        for key, value in group:
            num_records += 1
            layers.append(int.from_bytes(key[-_LAYER_BYTES:], "big"))
            try:
                kv = decode(key, value)
                shapes.add((tuple(kv.k.shape), kv.k.dtype, kv.base_position))
            except CorruptRecordError as error:
                problems.append(f"{_name(prefix)} layer {layers[-1]}: {error}")
        if layers != list(range(len(layers))):
            problems.append(f"{_name(prefix)}: layers are missing, found {layers}")
        if len(shapes) > 1:
            problems.append(f"{_name(prefix)}: layers differ in shape: {sorted(map(str, shapes))}")
        model_to_chunks.setdefault(prefix[2 * HASH_BYTES :], []).append((prefix, len(layers)))
    for chunks in model_to_chunks.values():
        num_layers = max(count for _, count in chunks)
        problems += [f"{_name(p)}: {count} of {num_layers} layers" for p, count in chunks if count < num_layers]
    return Verification(num_records, problems)


def _name(prefix: bytes) -> str:
    return f"chunk {prefix[:HASH_BYTES].hex()}"
