"""The commands that inspect, clean, export and import the KV store. They start no model."""

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from ragkv.cli import output
from ragkv.cli.options import AsJson, Tenant
from ragkv.cli.output import err, out
from ragkv.config import MAIN, Config
from ragkv.errors import StoreError
from ragkv.files import atomic_write

if TYPE_CHECKING:
    from ragkv.store.disk_store import DiskStore

_STREAM = Path("-")


def stats(config: Config, as_json: AsJson = False) -> None:
    """Show how many chunks and records the store holds, their codecs and their size."""
    with _store(config) as kv:
        counts, codecs = kv.admin.stats(), kv.admin.codecs()
    if as_json:
        typer.echo(json.dumps({**asdict(counts), "codecs": codecs}))
    else:
        output.print_stats(counts, codecs)


def verify(config: Config, as_json: AsJson = False) -> None:
    """Read and check every record. Exits with status 1 if something is wrong."""
    with _store(config) as kv, err.status("checking every record"):
        verification = kv.admin.verify()
    if as_json:
        typer.echo(json.dumps(asdict(verification)))
    else:
        output.print_verification(verification)
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

    deletion = delete_documents(Home(config.home), documents, tenant)
    if as_json:
        typer.echo(json.dumps(asdict(deletion)))
    else:
        output.print_deletion(deletion)


def gc(
    config: Config,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete unused KV: that of no document, or of another model, anchor or number of contexts."""
    from ragkv.home import Home
    from ragkv.index.deletion import collect_garbage

    garbage = collect_garbage(Home(config.home), dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps([asdict(part) for part in garbage]))
    else:
        output.print_garbage(garbage, dry_run)


def export_kv(
    config: Config,
    file: Annotated[Path, typer.Argument(help="File to write; - is stdout.")],
) -> None:
    """Write all KV into one file, for `ragkv store import` elsewhere. Exits with status 1 if some was damaged."""
    with _store(config) as kv:
        from ragkv.store.transfer import export_chunks

        total = sum(kv.admin.sizes().values())
        with (
            _os_errors_as_store_errors(file, "write"),
            _open_to_write(file) as target,
            output.ByteBar("Exporting KV", total) as bar,
        ):
            done = export_chunks(kv, target, bar.advance)
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

    target, name = Home(config.home), "stdin" if file == _STREAM else str(file)
    with _os_errors_as_store_errors(file, "read"), _open_to_read(file) as source:
        archive = open_export(source, name)
        total = None if file == _STREAM else file.stat().st_size
        target.make()
        store = target.open_store(**config.store.options())
        with target.indexing(), closing(store) as kv, output.ByteBar("Importing KV", total) as bar:
            done = import_chunks(archive, kv, bar.advance)
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


@contextmanager
def _store(config: Config) -> Iterator["DiskStore"]:
    from ragkv.home import Home

    home = Home(config.home)
    if not home.kv.is_dir():
        raise StoreError(f"there is no KV store in {home.path}; `ragkv index PATH` makes one")
    with closing(home.open_store()) as kv:
        yield kv


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


def _open_to_read(file: Path) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdin.buffer) if file == _STREAM else file.open("rb")


@contextmanager
def _os_errors_as_store_errors(file: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"can't {verb} {file}: {error.strerror}; check the path, its permissions and the free space"
        ) from error
