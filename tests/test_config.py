"""Where settings come from, and what is said of those that can't be used."""

import os
from pathlib import Path

import pytest

from ragkv.answer import Sampling
from ragkv.config import EMBEDDED_MODEL, Config
from ragkv.errors import ConfigError
from ragkv.settings import load_config


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RAGKV_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def settings(tmp_path: Path):
    def write(text: str) -> Path:
        file = tmp_path / "ragkv.toml"
        file.write_text(text)
        return file

    return write


def test_defaults() -> None:
    config = load_config()
    assert config == Config()
    assert config.model.name == EMBEDDED_MODEL
    assert config.home == Path.home() / ".ragkv"


def test_flags_win_over_environment_over_file_over_defaults(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    file = settings('[model]\nname = "file"\ndtype = "float16"\nkv_cache_gib = 3\n[answer]\ntop_k = 2\n')
    monkeypatch.setenv("RAGKV_MODEL__NAME", "environment")
    monkeypatch.setenv("RAGKV_MODEL__DTYPE", "float32")
    config = load_config(file, model={"name": "flag"})
    assert (config.model.name, config.model.dtype, config.model.kv_cache_gib) == ("flag", "float32", 3)
    assert config.model.max_model_len is None
    assert (config.answer.top_k, config.answer.policy) == (2, Config().answer.policy)


def test_flags_that_are_none_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGKV_SERVER__PORT", "1234")
    config = load_config(None, home=None, server={"host": None, "port": None}, model={"name": None})
    assert config.server.port == 1234
    assert config.model == Config().model


def test_a_flag_of_zero_counts() -> None:
    assert load_config(answer={"budget": 0.0}).answer.budget == 0


def test_the_environment_names_the_file_unless_a_flag_does(settings, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGKV_CONFIG", str(settings("[server]\nport = 1\n")))
    other = tmp_path / "other.toml"
    other.write_text("[server]\nport = 2\n")
    assert load_config().server.port == 1
    assert load_config(other).server.port == 2


def test_home_is_expanded_wherever_it_is_set(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config(settings('home = "~/file"')).home == Path.home() / "file"
    assert load_config(home=Path("~/flag")).home == Path.home() / "flag"
    monkeypatch.setenv("RAGKV_HOME", "~/environment")
    assert load_config().home == Config().home == Path.home() / "environment"


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGKV_HOME", "")
    monkeypatch.setenv("RAGKV_CONFIG", "")
    assert load_config().home == Path.home() / ".ragkv"


def problems(*args, **flags) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_config(*args, **flags)
    return str(raised.value).splitlines()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert problems(tmp_path / "no.toml") == [
        f"can't read the settings file {tmp_path}/no.toml: No such file or directory"
    ]


@pytest.mark.parametrize("text", ["[model", "model: {name: x}", "home = /x"])
def test_a_file_that_is_not_toml_is_named(settings, text: str) -> None:
    file = settings(text)
    (line,) = problems(file)
    assert line.startswith(f"the settings file {file} is not TOML: ")


def test_a_binary_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    assert "x.toml is not TOML" in problems(tmp_path / "x.toml")[0]


def test_unknown_settings_in_the_file(settings) -> None:
    file = settings("nonsense = 1\n[server]\nprot = 1\n[modle]\nname = 'x'\n")
    sections = "home, model, index, store, retrieval, answer, canary, learning, server, front, tenants"
    assert sorted(problems(file)) == [
        f"unknown setting modle in {file}; choose from {sections}",
        f"unknown setting nonsense in {file}; choose from {sections}",
        f"unknown setting server.prot in {file}; choose from host, port, keys, operator_keys, max_requests, log, "
        "max_upload_mib, max_pause_s, indexing_patience_s",
    ]


@pytest.mark.parametrize(
    ("variable", "remedy"),
    [
        ("RAGKV_SERVER__PROT", "did you mean RAGKV_SERVER__PORT?"),
        ("RAGKV_SERVER_PORT", "did you mean RAGKV_SERVER__PORT?"),
        ("ragkv_server__prot", "did you mean RAGKV_SERVER__PORT?"),
        ("RAGKV_HOME__X", "did you mean RAGKV_HOME?"),
        ("RAGKV_XYZZY_QUUX_FROB", "unset it; settings are RAGKV_ANSWER, "),
    ],
)
def test_unknown_settings_in_the_environment(variable: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    (line,) = problems()
    assert line.startswith(f"{variable} in the environment is not a setting; {remedy}")


def test_variables_that_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGKV_DEVICE", "cpu")
    for name, value in {
        "RAGKV_SERVICE_HOST": "10.0.0.1",
        "RAGKV_SERVICE_PORT": "8090",
        "RAGKV_PORT": "tcp://10.0.0.1:8090",
        "RAGKV_PORT_8090_TCP_ADDR": "10.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    assert load_config() == Config()
    monkeypatch.setenv("RAGKV_PORT", "8090")  # a user's mistake, not Kubernetes
    assert "RAGKV_PORT in the environment is not a setting" in problems()[0]


def test_bad_values_name_setting_value_and_place(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    file = settings("[server]\nport = 70000\n[model]\ndtype = 'float32'\n")
    monkeypatch.setenv("RAGKV_MODEL__DTYPE", "int3")
    assert sorted(problems(file, answer={"budget": 2.0, "top_k": 0})) == [
        "answer.budget = 2.0 on the command line: Input should be less than or equal to 1",
        "answer.top_k = 0 on the command line: Input should be greater than or equal to 1",
        "model.dtype = 'int3' in the environment: Input should be 'auto', 'bfloat16', 'float16' or 'float32'",
        f"server.port = 70000 in {file}: Input should be less than or equal to 65535",
    ]


def test_a_section_that_is_no_section(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    file = settings("model = 'x'\n")
    assert "model = 'x'" in problems(file)[0]
    monkeypatch.setenv("RAGKV_MODEL", "x")
    assert "RAGKV_MODEL" in problems()[0] or '"model"' in problems()[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tenants.Acme]\n", "tenants.Acme"),
        ("[tenants.acme]\nreads = ['zeta']\n", "acme reads 'zeta'; the other tenants are main"),
        ("[tenants.acme]\nreads = ['acme']\n", "acme reads 'acme'"),
        ("[tenants.acme]\nreads = 'main'\n", "tenants.acme.reads = 'main'"),
        ("[tenants.acme]\nrequests_per_minute = 0\n", "tenants.acme.requests_per_minute = 0"),
        ("[tenants.acme.keys]\nann = 'secret'\n", "tenants.acme.keys.ann"),
    ],
)
def test_tenants_that_cannot_be(settings, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(settings(text))


def test_whose_a_key_is(settings) -> None:
    a, b, c = (letter * 64 for letter in "abc")
    text = f"[server.keys]\nann = '{a}'\n[tenants.main.keys]\nbob = '{b}'\n[tenants.acme.keys]\ncid = '{c}'\n"
    assert load_config(settings(text)).holders() == {a: "main", b: "main", c: "acme"}
    with pytest.raises(ConfigError, match="dan's key of zeta is also a key of acme"):
        load_config(settings(f"{text}[tenants.zeta.keys]\ndan = '{c}'\n")).holders()


@pytest.mark.parametrize(
    ("model", "configured", "expected"),
    [(EMBEDDED_MODEL, None, 1.0), (EMBEDDED_MODEL, 0.0, 0.0), ("org/name", None, 0.0), ("org/name", 0.3, 0.3)],
)
def test_the_embedded_model_alone_is_kept_from_repeating_itself(model, configured, expected):
    config = Config(model={"name": model}, answer={"frequency_penalty": configured, "top_k": 3})
    assert config.answer_defaults.frequency_penalty == expected and config.answer_defaults.top_k == 3
    assert Sampling.of(config.answer_defaults) == Sampling(frequency_penalty=expected)
    assert Sampling.of(config.answer_defaults, frequency_penalty=0.0) == Sampling()
