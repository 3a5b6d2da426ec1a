"""Starts vLLM's processes as copies of one that has imported vLLM already.

On CPU vLLM spawns two new interpreters for each engine, and importing vLLM in both takes longer than all else that a
small model's engine does before it is ready. What tests start as commands of their own is spawned as ever.
"""

import multiprocessing.context
import os
from multiprocessing import forkserver

_IMPORTED = ["vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker"]


class _Forked(multiprocessing.context.ForkServerProcess):
    """Has the environment of whoever starts it, as a spawned process has. What it spawns itself is forked as well."""

    def start(self):
        server = forkserver._forkserver
        server.ensure_running()
        self._environment, self._address = dict(os.environ), server._forkserver_address
        super().start()

    def run(self):
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        for name, value in self._environment.items():
            if os.environ.get(name) != value:  # the rest stays where it is in memory, or setproctitle gets lost
                os.environ[name] = value
        forkserver._forkserver._forkserver_address = self._address
        forkserver._forkserver.ensure_running = lambda: None  # it is the server that this process comes from
        fork_instead_of_spawn()
        super().run()


class _Forking(multiprocessing.context.ForkServerContext):
    Process = _Forked


CONTEXTS = multiprocessing.context._concrete_contexts  # by their names
SPAWNING = CONTEXTS["spawn"]


def fork_instead_of_spawn():
    """Let this process fork where it was to spawn."""
    forkserver.set_forkserver_preload(_IMPORTED)
    CONTEXTS["spawn"] = _Forking()
