"""From documents to the chunks that answer a question: load, chunk, embed, catalogue, search.

Knows nothing of KV, of the store, of vLLM, or of settings files. SQLite (`catalog`) is the only truth; the
indexes are copies in memory that `sync` brings up to date. Import from the modules: nothing heavy is loaded here.
"""
