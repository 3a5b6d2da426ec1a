"""HTTP: an open pipeline as an app, and the process that serves it."""

from ragkv.server.app import create_app
from ragkv.server.run import serve

__all__ = ["create_app", "serve"]
