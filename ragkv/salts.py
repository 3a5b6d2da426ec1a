"""Remembers under which salts the KV of conversations is found, so that a next turn may build upon it."""

import hashlib
import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragkv.answer import Turn
from ragkv.files import Database

logger = logging.getLogger(__name__)


class ConversationSalts:
    """The salts under which vLLM caches the KV of conversations that may continue, and under which it is stored.

    Fused KV was made for one question, so that only the conversation that asked it may build upon it: the first that
    continues takes the salt with it. Losing one costs time only. They are in a file of hashes, since stored KV outlives
    the process (`ragkv.store.prefixes`).
    """

    def __init__(self, file: Path | None = None, size: int = 4096) -> None:
        """file: of SQLite; what is no such file is replaced. None: memory. size: how many conversations to remember."""
        self._size = size
        try:
            self._db = self._opened(file)
        except sqlite3.DatabaseError as error:
            logger.warning("%s is made anew, earlier conversations are computed again: %s", file, error)
            assert file is not None
            for damaged in file.parent.glob(f"{file.name}*"):
                damaged.unlink()
            self._db = self._opened(file)

    def _opened(self, file: Path | None) -> Database:
        database = Database(file or ":memory:")
        try:
            database.make_durable()
            database.run("PRAGMA synchronous = OFF")  # a power cut may lose or damage it, which costs time
            # turns: the hash of what was said when it was kept, NULL from when it is taken until it is kept again
            database.run(
                "CREATE TABLE IF NOT EXISTS salts "
                "(salt TEXT PRIMARY KEY, turns TEXT, is_taken INTEGER NOT NULL, at INTEGER NOT NULL)"
            )
            database.run("CREATE INDEX IF NOT EXISTS by_turns ON salts (turns)")
        except BaseException:
            database.close()
            raise
        return database

    def take(self, turns: Sequence[Turn], *context: object) -> str | None:
        """Take out the salt of the conversation that came to these turns in this context."""
        rows = self._run(
            "UPDATE salts SET turns = NULL, is_taken = 1 "
            "WHERE salt = (SELECT salt FROM salts WHERE turns = ? ORDER BY at DESC LIMIT 1) RETURNING salt",
            _key(turns, context),
        )
        return str(rows[0][0]) if rows else None

    def find(self, turns: Sequence[Turn], *context: object) -> str | None:
        """Return what `take` would, and leave it there."""
        rows = self._run("SELECT salt FROM salts WHERE turns = ? ORDER BY at DESC LIMIT 1", _key(turns, context))
        return str(rows[0][0]) if rows else None

    def keep(self, salt: str, turns: Sequence[Turn], *context: object, inherited: bool) -> None:
        """Keep the salt of a conversation for its next turn. inherited: whether `take` gave it to this conversation.

        Whoever asks a first question again gets the salt of the conversation that continued from it, and must not
        continue under it.
        """
        self._run(
            "INSERT INTO salts VALUES (?, ?, 0, (SELECT coalesce(max(at), 0) + 1 FROM salts)) "
            "ON CONFLICT (salt) DO UPDATE SET turns = excluded.turns, at = excluded.at WHERE NOT is_taken OR ?",
            salt,
            _key(turns, context),
            inherited,
        )
        # that one was taken is remembered longer
        self._run("DELETE FROM salts WHERE at <= (SELECT max(at) FROM salts) - ? * (1 + 3 * is_taken)", self._size)

    def _run(self, statement: str, *values: object) -> list[Any]:
        try:
            return self._db.run(statement, *values)
        except sqlite3.Error as error:  # a full disk, say
            logger.warning("a conversation may be computed again: %s", error)
            return []

    def close(self) -> None:
        self._db.close()


def _key(turns: Sequence[Turn], context: Sequence[object]) -> str:
    # Clients may strip the answers that they were given.
    said = [(turn.question.strip(), turn.answer.strip()) for turn in turns]
    return hashlib.blake2b(repr((said, context)).encode(), digest_size=16).hexdigest()
