"""Arms: the ways of answering that `ragkv eval quality` compares."""

from dataclasses import dataclass

from ragkv.errors import ConfigError
from ragkv.policies import Policy

KV_KINDS = {
    "alone": "each chunk precomputed by itself, without the anchor",
    "anchor": "each chunk precomputed once, after the anchor",
    "random": "averaged after the anchor and each of some random other chunks; the first chunk exact",
    "near": "averaged after the anchor and each of its nearest other chunks; the first chunk exact",
    "mixed": "averaged after one to three chunks, its nearest among random ones; the first chunk exact",
}
DEFAULT_KV = "mixed"  # as the product does
CODECS = ("int8", "fp8", "int4")  # in which KV of that kind can be encoded anew


@dataclass(frozen=True)
class Arm:
    """One way of answering to be measured: a policy over chunk KV of one kind.

    codec: in which the KV is encoded anew; empty: as it was precomputed.
    """

    policy: Policy
    kv: str
    codec: str = ""

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Read `query:0.05@anchor` or `query:0.05@mixed/int8`; the kind is `mixed` where none is given.

        Raises ConfigError.
        """
        policy, _, stored = text.partition("@")
        kv, _, codec = stored.partition("/")
        if codec and (codec not in CODECS or kv != DEFAULT_KV):
            raise ConfigError(f"{stored!r} in {text!r}: only {DEFAULT_KV} is encoded anew, in {', '.join(CODECS)}")
        if (kv or DEFAULT_KV) not in KV_KINDS:
            raise ConfigError(f"unknown kind of KV {kv!r} in {text!r}; choose one of {', '.join(KV_KINDS)}")
        return cls(Policy.parse(policy), kv or DEFAULT_KV, codec)

    @property
    def label(self) -> str:
        return f"{self.policy.label}@{self.kv}" + (f"/{self.codec}" if self.codec else "")
