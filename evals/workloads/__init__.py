"""What is measured: a module each, whose `run` yields rows; their parameters are in `ragkv.evals.registry`."""
