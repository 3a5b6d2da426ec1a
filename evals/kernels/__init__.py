"""Benchmarks of the operators of fusion, a module each: `python -m ragkv.evals.kernels.kv_fuse`."""
