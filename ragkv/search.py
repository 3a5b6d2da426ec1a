"""Searches one tenant's documents, and those of other tenants that it may read, as one collection."""

import asyncio
from collections.abc import Sequence

from ragkv.answer import Source
from ragkv.retriever.retriever import Hit, merged
from ragkv.workspace import Workspace


class Search:
    """A tenant's search. corpora: its own documents and those that it may read, by their catalogue's scope."""

    def __init__(self, workspace: Workspace, tenant: str) -> None:
        tenants, settings = workspace.config.tenants, workspace.config.retrieval
        reads = tenants[tenant].reads if tenant in tenants else []
        self._tenant = tenant
        self.corpora = {corpus.catalog.scope: corpus for corpus in map(workspace.corpus, (tenant, *reads))}
        self._retrievers = [workspace.retriever(corpus) for corpus in self.corpora.values()]
        self._by_rank = settings.mode != "vector" or settings.reranker is not None

    async def hits(self, questions: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Return the best chunks for each question of a conversation, with regard to the questions before it."""
        return await asyncio.to_thread(
            lambda: [self._hits(question, top_k, questions[:i]) for i, question in enumerate(questions)]
        )

    def _hits(self, question: str, top_k: int, before: Sequence[str]) -> list[Hit]:
        hits = [retriever.search(question, top_k, before) for retriever in self._retrievers]
        return merged(hits, top_k, by_rank=self._by_rank)

    def sources(self, hits: Sequence[Hit]) -> list[Source]:
        """Name the documents that hits are from."""
        titles = {
            (scope, id): title
            for scope, corpus in self.corpora.items()
            for id, title in corpus.catalog.titles({h.chunk.document_id for h in hits if h.scope == scope}).items()
        }
        return [self._source(hit, titles.get((hit.scope, hit.chunk.document_id), "")) for hit in hits]

    def _source(self, hit: Hit, title: str) -> Source:
        chunk, owner = hit.chunk, self.corpora[hit.scope].tenant
        corpus = owner if owner != self._tenant else None
        return Source(chunk.document_id, title, chunk.id, chunk.ordinal, hit.score, chunk.text, corpus)
