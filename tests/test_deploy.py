"""What is shipped beside the code fits it: metrics, settings, ports, paths and times."""

import configparser
import json
import os
import re
import shlex
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from server_harness import ScriptedPipeline, running
from typer.testing import CliRunner

from ragkv import cli
from ragkv.config import MAIN, Config
from ragkv.server.gate import OPEN
from ragkv.server.run import GRACE_S
from ragkv.settings import load_config, setting_fields, variable

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILES = ("cpu.Dockerfile", "cuda.Dockerfile")
CODE = ("server/metrics.py", "server/tenants.py", "engine/engine.py", "pipeline.py")  # where labels get their values
OF_PROMETHEUS = {"instance", "job"}  # what it adds to every series
EXAMPLES = {"store": {"disk_gib"}, "model": {"max_model_len"}, "server": {"keys"}}  # settings without a default


def panels() -> list[dict]:
    return json.loads((DEPLOY / "grafana" / "ragkv.json").read_text())["panels"]


def queries() -> list[tuple[str, str]]:
    """Of the dashboard, each with its legend."""
    return [(target["expr"], target["legendFormat"]) for panel in panels() for target in panel.get("targets", [])]


def alerts() -> list[dict]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return group["rules"]


EXPRESSIONS = sorted({expression for expression, _ in queries()} | {alert["expr"] for alert in alerts()})


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, set[str]]:
    """The labels of each series that a server shows once it has answered."""
    folder = tmp_path_factory.mktemp("server")
    with running({MAIN: ScriptedPipeline(folder)}, folder) as client:
        client.post("/v1/answer", json={"question": "who?"}).raise_for_status()
        families = list(text_string_to_metric_families(client.get("/metrics").text))
    series = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    return {**series, "up": set()}


def nodes(expression: str) -> list[object]:
    """All that it is made of."""
    found: list[object] = []

    def visit(node: object) -> None:
        found.append(node)
        for name in ("lhs", "rhs", "expr", "vector_selector"):
            if getattr(node, name, None) is not None:
                visit(getattr(node, name))
        for argument in getattr(node, "args", []):
            visit(argument)

    visit(promql_parser.parse(expression.replace("$__rate_interval", "5m")))
    return found


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    return [node for node in nodes(expression) if isinstance(node, promql_parser.VectorSelector)]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_series_and_labels_of_an_expression_exist(expression: str, exported: dict[str, set[str]]) -> None:
    found = selectors(expression)
    assert found
    for selector in found:
        assert selector.name in exported
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched <= exported[selector.name] | OF_PROMETHEUS, selector.name
    for node in nodes(expression):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            below = set.union(*(exported[selector.name] for selector in selectors(node.expr.prettify())))
            assert set(node.modifier.labels) <= below | OF_PROMETHEUS


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_values_of_labels_are_those_that_the_code_gives(expression: str) -> None:
    code = "".join((ROOT / "ragkv" / name).read_text() for name in CODE)
    for selector in selectors(expression):
        for matcher in selector.matchers.matchers:
            if matcher.name not in OF_PROMETHEUS:
                assert f'"{matcher.value.removesuffix(".*")}' in code


def test_legends_name_labels_that_are_left() -> None:
    for expression, legend in queries():
        aggregations = [node for node in nodes(expression) if isinstance(node, promql_parser.AggregateExpr)]
        left = {label for node in aggregations if node.modifier for label in node.modifier.labels}
        assert set(re.findall(r"{{(\w+)}}", legend)) <= left | OF_PROMETHEUS, expression


def test_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RAGKV_")]:
        monkeypatch.delenv(name)


def test_the_settings_file_shows_defaults_that_are_the_defaults(bare_environment: None, tmp_path: Path) -> None:
    file = DEPLOY / "ragkv.toml"
    assert load_config(file).store.disk_gib == 50
    active = tmp_path / "ragkv.toml"
    active.write_text(re.sub(r"^# (?=\w+ = )", "", file.read_text(), flags=re.MULTILINE))
    assert load_config(active).model_dump(exclude=EXAMPLES) == Config().model_dump(exclude=EXAMPLES)


def compose() -> dict:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_compose_keeps_the_server_behind_the_proxy() -> None:
    services = compose()["services"]
    for name in ("ragkv", "ragkv-cuda"):
        assert "ports" not in services[name]
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > GRACE_S
    for name, service in services.items():
        assert name == "caddy" or all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert services["ragkv-cuda"]["networks"]["default"]["aliases"] == ["ragkv"]


def test_compose_mounts_what_is_there() -> None:
    content = compose()
    for service in content["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in content["volumes"] or source.startswith("${") or (DEPLOY / source).exists(), volume
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    dashboards = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/ragkv.yml").read_text())
    folder = dashboards["providers"][0]["options"]["path"]
    assert f"./grafana/ragkv.json:{folder}/ragkv.json:ro" in content["services"]["grafana"]["volumes"]


def test_everybody_names_the_servers_port() -> None:
    address = f"ragkv:{Config().server.port}"
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [address]}]
    assert f"reverse_proxy {{$UPSTREAM:{address}}}" in (DEPLOY / "Caddyfile").read_text()
    assert f"proxy_pass http://127.0.0.1:{Config().server.port};" in (DEPLOY / "nginx.conf").read_text()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles(name: str) -> None:
    text = (DEPLOY / name).read_text()
    known = {variable(*path) for path, _ in setting_fields()}
    given = dict(re.findall(r"\b(RAGKV_\w+)=(\S+)", text))
    assert given.keys() <= known and given["RAGKV_SERVER__PORT"] == str(Config().server.port)
    assert "/readyz" in text and "/readyz" in OPEN
    assert re.search(r"python:(\d+\.\d+)", text)[1] == re.search(r"lib/python(\d+\.\d+)", text)[1]
    assert all((ROOT / lock).is_file() for lock in re.findall(r"requirements/\w+\.txt", text))
    command = [
        part for line in re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*])", text, re.MULTILINE) for part in json.loads(line)
    ]
    check_command(command)


def test_an_image_gets_all_that_the_package_links_to() -> None:
    let_in = (ROOT / ".dockerignore").read_text().splitlines()
    linked = [path.name for path in (ROOT / "ragkv").iterdir() if path.is_symlink()]
    assert linked and all(f"!{name}" in let_in for name in linked)


def test_the_unit_waits_for_answers_and_ends_all_processes() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "ragkv.service")
    service = unit["Service"]
    assert int(service["TimeoutStopSec"].removesuffix("s")) > GRACE_S and service["KillMode"] == "mixed"
    check_command(shlex.split(service["ExecStart"]))


def check_command(command: list[str]) -> None:
    """That the command line takes its arguments."""
    program, *arguments = command
    result = CliRunner().invoke(cli.app, [*arguments, "--help"])
    assert Path(program).name == "ragkv" and result.exit_code == 0, result.output
