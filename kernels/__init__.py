"""The operators of fusion: rotation of keys and scores of the question, as pure functions of tensors.

Knows nothing about stores, requests or vLLM. Today they are torch; Triton kernels come beside these references.
"""
