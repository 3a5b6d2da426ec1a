"""The connector of plain vLLM, without an engine."""

from types import SimpleNamespace

import pytest

from ragkv.engine.attached import Attached
from ragkv.engine.task import Span
from ragkv.plain_vllm import RagKV

SPAN = Span(3, 200, "c" * 32, "m" * 32)


@pytest.fixture
def connector():
    connector = object.__new__(RagKV)
    connector._chunks = SimpleNamespace(find=lambda token_ids, salt: (SPAN,))
    return connector


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        ([], ()),
        ([Attached(None)], (SPAN,)),
        ([Attached(None), Attached("its layers share KV")], ()),
        ([Attached("vLLM's runner has no model")], ()),
    ],
)
def test_nothing_is_found_unless_all_workers_can_fuse(connector, workers, found):
    """For a request that waits for a worker that can't would wait forever."""
    connector.set_xfer_handshake_metadata_pp_aware({(0, rank): each for rank, each in enumerate(workers)})
    assert connector._find(list(range(300)), None) == found
