"""Where chunk KV outlives processes: bytes by key, checked on every read.

Knows nothing about models, vLLM, documents or text: a record is one chunk's K and V of one layer, addressed by hashes.
"""
