"""Which documents names mean."""

import pytest
from operator_home import DOCUMENTS, hash_of, make_home

from ragkv.errors import ConfigError, UnknownDocumentError
from ragkv.operations.selection import Selection, choose


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("operations") / "home")


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        (["/papers/bees.md"], ["/papers/bees.md"]),
        (["/papers"], ["/papers/bees.md", "/papers/tea.md"]),
        (["/papers/"], ["/papers/bees.md", "/papers/tea.md"]),
        (["all.jsonl"], ["all.jsonl#1", "all.jsonl#2"]),
        (["all.jsonl#2", "/papers/tea.md"], ["all.jsonl#2", "/papers/tea.md"]),
    ],
)
def test_documents_by_name(home, names, meant):
    assert choose(home, Selection(tuple(names))).documents == {"main": meant}


@pytest.mark.parametrize("name", ["", ".", "bees.md", "/pap", "/papers/bees", "all.jsonl#", "x.md", "all"])
def test_names_that_mean_none(home, name):
    with pytest.raises(UnknownDocumentError, match="no document .*; the nearest by name: ") as error:
        choose(home, Selection((name, "/papers/tea.md")))
    assert f"{name!r} in {home.path}" in str(error.value)


def test_of_many_unknown_names_the_first_are_told(home):
    with pytest.raises(UnknownDocumentError) as error:
        choose(home, Selection(tuple(f"no{i}" for i in range(30)) * 2))
    lines = str(error.value).splitlines()
    assert len(lines) == 11 and lines[-1] == "nor 20 other documents"


def test_paths_from_the_current_folder_are_names_only_where_that_is_meant(home, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    assert choose(home, Selection(("papers",), on_disk=True)).num_documents == 2
    assert choose(home, Selection(("all.jsonl",), on_disk=True)).num_documents == 2
    with pytest.raises(UnknownDocumentError):
        choose(home, Selection(("papers",)))


def test_tenants_and_all(home):
    assert choose(home, Selection()).documents == {each: sorted(names) for each, names in DOCUMENTS.items()}
    acme = choose(home, Selection(tenant="acme"))
    assert acme.documents == {"acme": ["x.md"]}
    assert acme.chunk_hashes == {hash_of("wax", "acme"), hash_of("honey", "acme")}
    assert choose(home, Selection(("x.md",), "acme")).documents == {"acme": ["x.md"]}
    with pytest.raises(UnknownDocumentError, match="tenants with documents: main, acme"):
        choose(home, Selection(tenant="zeta"))
    with pytest.raises(ConfigError, match="can't be a tenant's name"):
        choose(home, Selection(tenant="../x"))
    assert home.tenants() == ["main", "acme"]  # to ask made none


def test_what_documents_share(home):
    bees = choose(home, Selection(("/papers/bees.md",)))
    assert bees.shared == {hash_of("shared")}
    assert bees.hashes_of_others == {"/papers/tea.md": {hash_of("shared"), hash_of("flush")}}
    assert choose(home, Selection(("/papers",))).shared == set()
