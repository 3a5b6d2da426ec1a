"""Prints what operators asked for."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ragkv.cli.output import MIB, out, print_unreached

if TYPE_CHECKING:
    from ragkv.operations.changes import Clearing, Demotion, Pinning, Recoding, Warming
    from ragkv.operations.health import Health
    from ragkv.operations.lookup import DocumentKV

_NUM_NAMED = 3
_TIERS = {"page_cache": "the page cache", "memory": "memory"}


def size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB"


def count(number: int, what: str) -> str:
    return f"{number:,} {'entry' if what == 'entries' and number == 1 else what[:-1] if number == 1 else what}"


def print_lookup(found: Sequence["DocumentKV"]) -> None:
    if not found:
        out.print("nothing is indexed")
        return
    many = len({each.tenant for each in found}) > 1
    table = Table(*(["tenant"] if many else []), "document", box=None, padding=(0, 1))
    for name in ("with KV", "disk", "in page cache", "uses"):
        table.add_column(name, justify="right")
    for name in ("last use", "codec", "hint"):
        table.add_column(name)
    for each in found:
        table.add_row(
            *([each.tenant] if many else []),
            Text(each.name, overflow="fold"),
            f"{each.tiers.disk.num_chunks:,} of {each.num_chunks:,}",
            size(each.tiers.disk.size_bytes),
            size(each.tiers.page_cache.size_bytes),
            f"{each.uses:,}",
            _when(each.used_at),
            ", ".join(sorted(each.codecs)) or "-",
            ", ".join(name if n == each.num_chunks else f"{name} {n}" for name, n in each.hints.items()) or "-",
        )
    out.print(table)


def _when(at: float | None) -> str:
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def print_pinning(verb: str, done: "Pinning") -> None:
    missing = f"; {count(done.num_without_kv, 'chunks')} have no KV yet" if done.num_without_kv else ""
    out.print(f"{verb} {count(done.num_chunks, 'chunks')} of {count(done.num_documents, 'documents')}{missing}")
    if done.kept:
        names = ", ".join(done.kept[:_NUM_NAMED]) + ", …" * (len(done.kept) > _NUM_NAMED)
        out.print(f"what they share with pinned documents stays pinned: {names}", markup=False, soft_wrap=True)
    budget = "no budget (store.disk_gib)" if done.disk_bytes is None else f"of {size(done.disk_bytes)} (store.disk_gib)"
    out.print(f"pinned now   {size(done.pinned_bytes)}, {budget}")


def print_warming(done: "Warming") -> None:
    where = _TIERS[done.tier]
    documents = count(done.num_documents, "documents")
    out.print(f"in {where}: {count(done.num_entries, 'entries')} of {documents}, {size(done.size_bytes)}")
    if done.num_left_out:
        left_out = count(done.num_left_out, "entries")
        out.print(f"no room: {left_out}, {size(done.left_out_bytes)}", style="yellow")


def print_demotion(done: "Demotion") -> None:
    out.print(f"dropped from the page cache: {size(done.page_cache_bytes)} of {count(done.num_documents, 'documents')}")


def print_recoding(done: "Recoding") -> None:
    for problem in done.problems:
        out.print(problem, style="red", markup=False, soft_wrap=True)
    same = f", {done.num_same:,} had it already" if done.num_same else ""
    joined = f", the two entries of {count(done.num_joined, 'chunks')} joined" if done.num_joined else ""
    out.print(f"{count(done.num_recoded, 'entries')} encoded as {done.codec}{joined}{same}")
    out.print(f"{size(done.bytes_before)} before, {size(done.bytes_after)} after")
    if done.num_no_smaller:
        stay = f"{count(done.num_no_smaller, 'entries')} stay: they would get no smaller, and lose once more"
        out.print(stay, style="yellow", soft_wrap=True)


def print_clearing(done: "Clearing") -> None:
    shared = f"; {done.num_shared:,} kept, other documents share them" if done.num_shared else ""
    verb = "would be cleared" if done.dry_run else "cleared"
    out.print(f"KV of {count(done.num_chunks, 'chunks')} {verb}, {size(done.size_bytes)}{shared}")
    if done.remote is not None:
        out.print(f"what {done.remote} has of it {verb} too", markup=False, soft_wrap=True)
    if done.num_unreached:
        print_unreached(done.num_unreached)


def print_health(found: "Health") -> None:
    out.print(f"readable     {_yes(found.readable)}")
    out.print(f"writable     {_yes(found.writable)}")
    out.print(f"disk         {size(found.free_bytes)} free")
    if found.used_bytes is not None and found.pinned_bytes is not None:
        budget = "" if found.disk_bytes is None else f" of {size(found.disk_bytes)} (store.disk_gib)"
        out.print(f"KV           {size(found.used_bytes)}{budget}, {size(found.pinned_bytes)} pinned")
    if found.prefix_bytes:
        out.print(f"prefixes     {size(found.prefix_bytes)} (at most store.prefix_gib)")
    if found.verified is None:
        out.print("verified     never (`ragkv store verify`)")
    else:
        problems = count(found.verified.num_problems, "problems") if found.verified.num_problems else "no problems"
        out.print(f"verified     {_when(found.verified.at)}: {found.verified.num_records:,} records, {problems}")
    for text, style in (*((each, "red") for each in found.problems), *((each, "yellow") for each in found.warnings)):
        out.print(text, style=style, markup=False, soft_wrap=True)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
