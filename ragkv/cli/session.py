"""Opens the pipeline for a command: sets the environment before vLLM is imported, and keeps its start stoppable."""

import logging
import os
import signal
import sys
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ragkv.cli import output
from ragkv.cli.output import err
from ragkv.config import MAIN, Config
from ragkv.errors import ModelError, StoreError
from ragkv.processes import end_children

if TYPE_CHECKING:
    from ragkv.pipeline import Pipeline

# Variables that libraries read when they are imported.
ENVIRONMENT = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "TOKENIZERS_PARALLELISM": "false"}
QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}


def prepare(log: Path | None, verbose: bool) -> None:
    """Send the output of libraries and vLLM's processes to `log`, or to stderr. Call it before vLLM is imported."""
    for name, value in {**ENVIRONMENT, **({} if verbose else QUIET)}.items():
        os.environ.setdefault(name, value)
    if not verbose:
        logging.getLogger("vllm").setLevel(logging.ERROR)  # for what it logs before it reads the level
        warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        if log:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.unlink(missing_ok=True)
        output.detach_streams(None if verbose else log)
    except OSError as error:
        raise StoreError(f"can't write {log}: {error.strerror}; choose another --home") from error


def log_file(config: Config) -> Path:
    return config.home / "vllm.log"


@contextmanager
def log_in_errors(config: Config) -> Iterator[None]:
    """Add to a ModelError where vLLM's log, which has the reason, can be read."""
    log = log_file(config)
    try:
        yield
    except ModelError as error:
        if log.is_file() and log.stat().st_size:
            raise ModelError(f"{error}\nthe reason is in vLLM's log, {log}") from error
        raise


@asynccontextmanager
async def opened(
    config: Config, *, for_index_of: Sequence[Path] | None = None, tenant: str = MAIN
) -> AsyncIterator["Pipeline"]:
    """Open a pipeline, and close it at the end, also on SIGTERM. Arguments as of `open_pipeline`."""
    with log_in_errors(config):
        pipeline = await open_pipeline(config, for_index_of, tenant)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield pipeline
    finally:
        await pipeline.close()


async def open_pipeline(config: Config, for_index_of: Sequence[Path] | None = None, tenant: str = MAIN) -> "Pipeline":
    """Open a pipeline. for_index_of: start vLLM only if something in these paths has to be prefilled."""
    from ragkv import models

    for name in (config.model.name, config.index.embedder):
        models.resolve(name, config.home)  # reports a missing one before imports take seconds
    with err.status("starting") as status, stoppable():

        def report(line: str) -> None:
            err.print(line, style="dim", markup=False)
            status.update(line)

        report("loading libraries")
        from ragkv.pipeline import Pipeline

        pipeline = await Pipeline.open(config, report, start=for_index_of is None, tenant=tenant)
        if for_index_of is not None and pipeline.indexer.needs_model(for_index_of):
            await pipeline.start(report)
        return pipeline


@contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process at once, while there is nothing to finish.

    vLLM blocks the event loop while it starts, loses a KeyboardInterrupt in its polls, and then waits ten minutes for
    processes that the same Ctrl-C has ended.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        err.show_cursor()
        if os.getpid() == owner:  # a fork has this handler too
            end_children()
        os._exit(128 + signum)

    owner = os.getpid()
    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
