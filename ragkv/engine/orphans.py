"""Ends an engine whose parent process has ended: nobody can reach it any more, and it would keep its memory."""

import logging
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess

logger = logging.getLogger(__name__)

_GRACE_S = 30.0


def end_with_parent() -> None:
    """End this process, which `multiprocessing` started, and what it started itself, once its parent has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_for, args=(parent,), daemon=True, name="ragkv-parent").start()


def _wait_for(parent: BaseProcess) -> None:
    parent.join()
    logger.warning("process %s, which started this engine, has ended; so it ends too", parent.pid)
    os.kill(os.getpid(), signal.SIGTERM)  # vLLM's own way, which takes its workers along
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
