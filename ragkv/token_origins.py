"""Where the KV of each token of a prompt came from, by a worker's report: as counts, or as runs of tokens."""

from collections.abc import Sequence
from itertools import groupby

from ragkv.answer import Kind, Run, Usage
from ragkv.engine.engine import EngineOutput
from ragkv.prompt import Prompt


def usage_of(prompt: Prompt, output: EngineOutput, num_completion_tokens: int) -> Usage:
    """Count the tokens of a request. vLLM itself computes the prompt's last one, whatever was fused before it."""
    num_tokens, report = len(prompt.token_ids), output.report
    if report is None or report.failed:
        prefix = 0 if report else output.num_cached_tokens
        return Usage(num_tokens, prefix, 0, num_tokens - prefix, num_completion_tokens)
    memory = sum(end - start for start, end, in_memory in report.tokens.loaded if in_memory)
    recomputed = report.tokens.recomputed + 1
    return Usage(num_tokens, report.tokens.prefix, report.tokens.reused, recomputed, num_completion_tokens, memory)


def runs_of(prompt: Prompt, output: EngineOutput, sources: Sequence[int | None]) -> list[Run]:
    """Return runs that cover the prompt. sources: for each of its chunks, the index in the answer's sources."""
    num_tokens, report = len(prompt.token_ids), output.report
    kinds: list[Kind] = ["computed"] * num_tokens
    belongs: list[int | None] = [None] * num_tokens
    for (start, end), source in zip(prompt.chunk_ranges, sources, strict=True):
        belongs[start:end] = [source] * (end - start)
    num_prefix = output.num_cached_tokens
    if report is not None:
        num_prefix = 0 if report.failed else report.tokens.prefix
        for start, end, in_memory in () if report.failed else report.tokens.loaded:
            kinds[start:end] = ["memory" if in_memory else "disk"] * (end - start)
        for start, end in () if report.failed else report.tokens.recomputed_runs:
            kinds[start:end] = ["recomputed"] * (end - start)
    kinds[:num_prefix] = ["prefix"] * num_prefix
    kinds[-1] = "computed"
    runs, start = [], 0
    for (kind, source), tokens in groupby(zip(kinds, belongs, strict=True)):
        end = start + len(list(tokens))
        runs.append(Run(start, end, kind, source))
        start = end
    return runs
