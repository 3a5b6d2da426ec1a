"""Measurements and campaigns, next to the product: `ragkv eval`. The product imports nothing of this."""
