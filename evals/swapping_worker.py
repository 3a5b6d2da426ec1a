"""vLLM's worker that is also asked how long it takes to hold a preempted request's KV, and to load it again."""

import time

from ragkv.engine.connector import WorkerExtension, connector
from ragkv.engine.fusion import StepBudget
from ragkv.engine.held import HeldKV
from ragkv.engine.preemption import Hold
from ragkv.engine.task import Job


class SwappingWorker(WorkerExtension):
    """The blocks get back what they had."""

    def ragkv_swap_ms(self, num_blocks: int, num_tokens: int) -> tuple[float, float]:
        """Return what it takes to copy so many tokens' blocks out of vLLM's cache, and what to copy them back.

        num_blocks: that vLLM has.
        """
        worker = connector().worker
        assert worker is not None
        forward = worker.loader.forward
        held, ids = HeldKV(forward, num_blocks), list(range(1, 1 + -(-num_tokens // forward.block_size)))
        begin = time.perf_counter()
        held.hold(Hold("", ids, num_tokens))
        middle = time.perf_counter()
        budget = StepBudget(num_tokens)
        budget.alone = True
        for _ in held.load(Job("", None, [], ids, 0, held=num_tokens), budget):
            pass
        return 1e3 * (middle - begin), 1e3 * (time.perf_counter() - middle)
