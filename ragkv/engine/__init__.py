"""vLLM, and what ragkv does inside it. The only package that imports vllm."""
