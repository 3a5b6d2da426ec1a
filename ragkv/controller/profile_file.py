"""The file of a home in which its profiles are kept."""

import hashlib
import json
import logging
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import filelock

from ragkv.controller.cost_model import Profile
from ragkv.errors import ConfigError
from ragkv.files import atomic_write
from ragkv.machine import machine
from ragkv.policies import Policy

logger = logging.getLogger(__name__)


class ProfileFile:
    """The file with a home's profiles: one for each machine, model, policy and codec."""

    def __init__(self, file: Path, fingerprint: str, codec: str, policy: Policy) -> None:
        self._file = file
        facts = (fingerprint, codec, policy.name, machine(), platform.machine(), version("torch"))
        self._key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def load(self) -> Profile | None:
        try:
            return Profile.from_dict(self._profiles()[self._key])
        except (KeyError, TypeError, ConfigError):  # not measured yet, or damaged
            return None

    def save(self, profile: Profile) -> None:
        with filelock.FileLock(f"{self._file}.lock"), atomic_write(self._file) as file:
            profiles = {**self._profiles(), self._key: profile.as_dict()}
            file.write((json.dumps(profiles, indent=1) + "\n").encode())

    def _profiles(self) -> dict[str, Any]:
        try:
            profiles = json.loads(self._file.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("%s can't be read (%s); it is made anew", self._file, error)
            return {}
        return profiles if isinstance(profiles, dict) else {}
