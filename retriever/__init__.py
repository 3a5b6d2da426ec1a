"""From documents to the chunks that answer a question: load, chunk, embed, catalogue, search.

Knows nothing of KV, of the store, of vLLM, or of settings files. SQLite (`catalog`) is the only truth; the vector
index is a copy that `VectorIndex.sync` repairs. Import from the modules: nothing heavy is loaded here.
"""
