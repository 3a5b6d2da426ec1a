"""Measurements: time to first token, and what comes with it. Rows are plain dicts, ready for JSON lines."""
