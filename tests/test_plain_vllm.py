"""The connector of plain vLLM, without an engine."""

from types import SimpleNamespace

import pytest

from ragkv.engine.attached import Attached
from ragkv.engine.own_requests import OwnRequests
from ragkv.engine.scheduler import SchedulerSide
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


@pytest.mark.parametrize("at", ["arrived", "finished"])
def test_a_fault_in_learning_ends_it_and_no_request(connector, caplog, at):
    def fail(*arguments):
        raise ZeroDivisionError

    done = []
    steps = {name: lambda id, *rest, name=name: done.append(name) for name in ("arrived", "finished")}
    connector._learner = SimpleNamespace(**{**steps, at: fail})
    connector._own, connector._scheduler = OwnRequests("a key"), SchedulerSide()
    request = SimpleNamespace(request_id="1", cache_salt=None, kv_transfer_params=None)
    for _ in range(2):
        connector.on_new_request(request)
        assert connector.request_finished(request, []) == (False, None)
    assert connector._learner is None and done == ["arrived"][: at == "finished"]
    assert caplog.text.count("nothing is learnt any more") == 1
