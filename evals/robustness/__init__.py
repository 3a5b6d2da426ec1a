"""Campaigns that look for what breaks, is lost or grows; their parameters are in `ragkv.evals.registry`."""
