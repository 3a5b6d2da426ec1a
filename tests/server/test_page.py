"""The page in a real browser, over real sockets."""

import asyncio
import shutil
import subprocess
import tarfile
from dataclasses import asdict, replace
from importlib import resources

import pytest
from browser import Page, chromium
from scripted_api import ScriptedApi, app_with
from selenium.webdriver.common.keys import Keys
from server_harness import ANSWER, CONFIG, SCRIPT, SOURCE, ScriptedPipeline, running

from ragkv import server
from ragkv.answer import AnswerOptions, Delta, Reasoning, Retrieved, Run, Timings, TokenOrigins, Usage
from ragkv.config import MAIN, Config, ServerConfig
from ragkv.errors import ContextTooLongError, StoreError
from ragkv.policies import Policy
from ragkv.server.gate import hash_of

HOSTILE = '<img src=x onerror="document.title=document.URL">.md'
MAX_BYTES = 71_680
AXE = "axe-core@4.14.1"
LENGTHS = {"prefix": 5, "memory": 9, "disk": 11, "recomputed": 2, "computed": 3}  # as ANSWER's usage has it


def explained(lengths: dict[str, int]) -> TokenOrigins:
    """A prompt with runs of these lengths, all of one source but the first and the last."""
    runs, start = [], 0
    for kind, length in lengths.items():
        source = None if kind in ("prefix", "computed") else 0
        runs.append(Run(start, start + length, kind, source))
        start += length
    return TokenOrigins([f" t{i}" for i in range(start)], runs)


@pytest.fixture(scope="module")
def chrome():
    with chromium() as chrome:
        yield chrome


@pytest.fixture
def pipeline(tmp_path):
    pipeline = ScriptedPipeline(tmp_path)
    pipeline.origins = explained(LENGTHS)
    return pipeline


@pytest.fixture
def api():
    return ScriptedApi()


@pytest.fixture
def url(pipeline, api, tmp_path):
    with running({MAIN: pipeline}, tmp_path, wrap=app_with(api)) as client:
        yield str(client.base_url)


@pytest.fixture
def page(chrome, url):
    page = Page(chrome, url)
    yield page.open()
    page.leave()


def test_its_files_are_small_typed_and_sent_once(client) -> None:
    sizes = {file.name: len(file.read_bytes()) for file in resources.files(server).joinpath("page").iterdir()}
    assert sum(sizes.values()) < MAX_BYTES
    for name in sizes:
        assert client.get(f"/page/{name}").status_code == 200
    index = client.get("/")
    assert "default-src 'none'" in index.headers["content-security-policy"]
    assert "unsafe" not in index.headers["content-security-policy"]
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    types = {"main.js": "text/javascript; charset=utf-8", "page.css": "text/css; charset=utf-8"}
    for name, media_type in types.items():
        response = client.get(f"/page/{name}")
        assert (response.headers["content-type"], response.headers["cache-control"]) == (media_type, "no-cache")
        again = client.get(f"/page/{name}", headers={"If-None-Match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for name in ("nothing.js", "..%2fpage.py", "%2e%2e/page.py", "../app.py"):
        assert client.get(f"/page/{name}").status_code == 404


def test_an_answer_comes_in_pieces_with_its_sources(pipeline, page) -> None:
    pipeline.script = [*SCRIPT[:2], asyncio.Event()]
    page["question"].send_keys("who?", Keys.SHIFT, "\n", Keys.NULL, "and why?\n")
    page.until(lambda: page["answer"].text == "Grüße,")  # found before the end: the pipeline waits
    assert page["answer"].get_attribute("aria-busy") == "true"
    pipeline.script = SCRIPT
    page.ask()
    page.until(lambda: page["answer"].text == "Grüße,\n world")
    page.until(lambda: page["answer"].get_attribute("aria-busy") == "false")
    assert [question for question, _ in pipeline.asked] == ["who?\nand why?", "who?"]
    assert page.texts("#sources .title") == ["A [b]"] and page.texts("#sources .text") == [SOURCE.text]
    assert page.texts("#sources .meta") == ["a.md · chunk 3 · score 0.500"]
    assert ANSWER.fallback in page.texts("#answer-facts li")
    assert not page["stop"].is_displayed()


def test_options_are_sent_only_where_they_are_chosen(pipeline, page) -> None:
    page.ask()
    page.until(lambda: page["answer-facts"].text)
    page.all("#ask-form summary")[0].click()
    for id, value in {"policy": "none", "budget": "7", "top-k": "9", "max-tokens": "11"}.items():
        page[id].send_keys(value)
    page.ask()
    page.until(lambda: len(pipeline.asked) == 2)
    (_, plain), (_, chosen) = pipeline.asked
    assert plain == AnswerOptions(Policy("query", 0.2), top_k=3, max_tokens=40, explain=True)
    assert chosen == AnswerOptions(Policy("none", 0.07), top_k=9, max_tokens=11, explain=True)


def test_an_option_that_cannot_be_used_is_brought_to_light(pipeline, page) -> None:
    options = page.all("#ask-form summary")[0]
    options.click()
    page["budget"].send_keys("101")
    options.click()
    assert not page["budget"].is_displayed()
    page.ask()
    page.until(lambda: page["budget"].is_displayed() and page.chrome.switch_to.active_element == page["budget"])
    assert not pipeline.asked


def test_untrusted_names_and_texts_stay_text(pipeline, api, page) -> None:
    source = replace(SOURCE, document=HOSTILE, title=HOSTILE, text=HOSTILE)
    pipeline.script = [Retrieved([source]), Delta(HOSTILE), replace(ANSWER, fallback=HOSTILE)]
    pipeline.counters = {HOSTILE: 1}
    pipeline.origins = replace(pipeline.origins, tokens=[HOSTILE] * len(pipeline.origins.tokens))
    api.documents = {HOSTILE: HOSTILE}
    page.open().ask()
    page.until(lambda: page["answer-facts"].text)
    page.until(lambda: page.texts("#kv-events th") == [HOSTILE])
    page.all("#documents summary")[0].click()
    page.until(lambda: page.texts("#documents .text") == [HOSTILE])
    page.all("#documents button")[0].click()
    assert page["deletion-name"].text == HOSTILE
    for place in ("#answer", "#sources .title", "#sources .text", "#token", "#documents .name"):
        assert page.texts(place) == [HOSTILE], place
    assert page.chrome.title == "ragkv" and not page.all("img")


MARKDOWN = """# Teas *here*

Two **kinds**, see [the list](https://example.org/a_(b)) or https://example.org/c.
Not `<b>` nor a_b_c:

1. green
   - Sencha
2. black

| Tea | Price |
|---|--:|
| Assam | 10 \\| 12 |

> quoted

```html
<script>alert(1)</script>
```
"""
NO_LINKS = [
    "[a](javascript:alert(1)) ",
    "[b](data:text/html,x) ",
    "[c](/v1/documents) ",
    "[d](//example.org) ",
    "<javascript:alert(1)> ",
    '<a href="https://example.org" onclick="alert(1)">e</a> ',
]


def test_markdown_is_shown_as_elements_while_it_comes(pipeline, page) -> None:
    half = MARKDOWN.index("| Assam")
    pipeline.script = [SCRIPT[0], Delta(MARKDOWN[:half]), asyncio.Event()]
    page.ask()
    page.until(lambda: page.texts("#answer th") == ["Tea", "Price"])
    page.run("document.querySelector('#answer > ol').dataset.same = 'yes'")
    pieces = [Delta(MARKDOWN[i : i + 3]) for i in range(0, len(MARKDOWN), 3)]
    pipeline.script = [SCRIPT[0], *pieces, replace(ANSWER, text=MARKDOWN)]
    page.ask()
    page.until(lambda: page["answer-facts"].text)
    assert page.texts("#answer h3") == ["Teas here"] and page.texts("#answer em") == ["here"]
    assert page.texts("#answer strong") == ["kinds"] and page.texts("#answer p code") == ["<b>"]
    assert page.texts("#answer > ol > li") == ["greenSencha", "black"] and page.texts("#answer ul > li") == ["Sencha"]
    assert page.texts("#answer td") == ["Assam", "10 | 12"] and page.texts("#answer blockquote") == ["quoted"]
    assert page.texts("#answer pre") == ["<script>alert(1)</script>"]
    links = [(a.get_attribute("href"), a.get_attribute("rel")) for a in page.all("#answer a")]
    safe = "noopener noreferrer"
    assert links == [("https://example.org/a_(b)", safe), ("https://example.org/c", safe)]


def test_blocks_of_an_answer_that_are_finished_stay_as_they_are(page) -> None:
    script = r"""
        const { showMarkdown } = await import("/page/markdown.js");
        const place = document.createElement("div"), text = "# One\n\ntwo **b**\n\n- three\n- fo";
        for (let i = 1; i <= text.length; i += 1) showMarkdown(place, text.slice(0, i));
        const before = [...place.childNodes];
        showMarkdown(place, text + "ur\n\nfive");
        return [...place.childNodes].map((node, i) => node === before[i]);
    """
    assert page.run(script) == [True, True, False, False]


def test_only_addresses_of_the_web_become_links(pipeline, page) -> None:
    pipeline.script = [SCRIPT[0], *map(Delta, NO_LINKS), ANSWER]
    page.ask()
    page.until(lambda: page["answer-facts"].text)
    (link,) = page.all("#answer a")  # of the last: the address alone
    assert link.get_attribute("href") == "https://example.org/" and link.get_attribute("onclick") is None
    assert page.texts("#answer") == ["".join(NO_LINKS)]


def test_what_the_model_thought_is_folded_away(pipeline, page) -> None:
    pipeline.script = [SCRIPT[0], Reasoning("Hm. "), Reasoning(HOSTILE), Delta("Tea."), ANSWER]
    page.ask()
    page.until(lambda: page["answer-facts"].text)
    assert page["answer"].text == "Tea." and not page["reasoning-text"].is_displayed()
    page.all("#reasoning summary")[0].click()
    assert page["reasoning-text"].text == f"Hm. {HOSTILE}"
    pipeline.script = SCRIPT
    page.ask()
    page.until(lambda: "world" in page["answer"].text)
    assert not page["reasoning"].is_displayed()


def test_documents_are_named_as_briefly_as_tells_them_apart(pipeline, api, page) -> None:
    names = ["/srv/docs/a/readme.md", "/srv/docs/b/readme.md", "/srv/docs/faq.jsonl#1/2", "/srv/docs/tea.md"]
    shorts = ["a/readme.md", "b/readme.md", "faq.jsonl#1/2", "tea.md"]
    api.documents = {name: f"Text of {name}" for name in names}
    pipeline.script = [Retrieved([replace(SOURCE, document=name, title="") for name in names]), *SCRIPT[1:]]
    page.open().ask()
    page.until(lambda: page["answer-facts"].text and len(page.all("#documents li")) == 4)
    assert page.texts("#documents .name") == shorts and page.texts("#sources .title") == shorts
    for place in ("#documents .name", "#sources bdi"):
        assert [each.get_attribute("title") for each in page.all(place)] == names
    page["filter"].send_keys("/b/")
    page.until(lambda: page.texts("#documents .name") == ["readme.md"])  # the only one that is shown


def test_token_origins_count_what_usage_counts(page) -> None:
    page.ask()
    page.until(lambda: page["prompt-card"].is_displayed())
    counts = [int(text) for text in page.texts("#kinds td:nth-child(2)")]
    prefix, stored, memory, disk, recomputed, computed = counts
    usage = ANSWER.usage
    assert (prefix + stored, memory + disk, recomputed + computed) == (
        *(usage.prefix_tokens, usage.reused_tokens, usage.recomputed_tokens),
    )
    assert page["prompt-summary"].text == "30 tokens, of which 25 (83.3%) were not computed."
    assert page.texts("#origins .label") == ["Instruction 5", "1 A [b] 22", "Question 3"]
    (of_source,) = page.texts("#by-source tr:nth-child(2)")
    assert of_source == "1 A [b]22" + "0091120"


def test_the_keyboard_and_the_pointer_go_through_all_tokens(page) -> None:
    page.ask()
    page.until(lambda: page["prompt-card"].is_displayed())
    origins = page["origins"]
    origins.send_keys(Keys.END)
    assert origins.get_attribute("aria-valuetext") == "Token 30 of 30: “ t29”, Computed, Question"
    assert origins.get_attribute("aria-valuenow") == origins.get_attribute("aria-valuemax") == "30"
    origins.send_keys(Keys.PAGE_UP, Keys.PAGE_UP, Keys.ARROW_RIGHT)
    assert page["token-facts"].text == "Token 27 of 30 · Recomputed · 1 A [b]"
    assert page.texts("#token") == [" t26"] and page.texts("#token-after") == [" t27 t28 t29"]
    origins.send_keys(Keys.HOME, Keys.ARROW_LEFT)
    assert page["token-facts"].text.startswith("Token 1 of 30 · Prefix cache")
    page.run("""
        const canvas = document.querySelectorAll("#origins canvas")[1], box = canvas.getBoundingClientRect();
        const at = { clientX: box.left + 6 * 9 + 2, clientY: box.top + 5, bubbles: true };
        canvas.dispatchEvent(new PointerEvent("pointermove", at));
    """)
    assert page["token-facts"].text == "Token 15 of 30 · Reused, disk · 1 A [b]"


def test_cells_are_drawn_in_the_colours_and_heights_of_their_kinds(page) -> None:
    page.ask()
    page.until(lambda: page["prompt-card"].is_displayed())
    heights = page.run("""
        const canvas = document.querySelectorAll("#origins canvas")[1], { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
        const pixel = (x, y) => data.slice(4 * (y * width + x), 4 * (y * width + x + 1)).join();
        return [5, 9, 20].map((token) => {
          const column = [...Array(14).keys()].map((y) => pixel(token * 6 + 2, 1 + y));
          return [column.filter((colour) => colour !== pixel(2, 2)).length, column.at(-1)];
        });
    """)
    assert [height for height, _ in heights] == [7, 10, 11]  # the last, recomputed, is striped
    assert len({colour for _, colour in heights}) == 3


def test_eight_thousand_tokens_are_drawn_at_once(pipeline, page) -> None:
    pipeline.origins = explained(
        {"prefix": 30, "stored": 600, "memory": 3000, "disk": 4500, "recomputed": 400, "computed": 70}
    )
    page.ask()
    page.until(lambda: page["prompt-card"].is_displayed())
    assert page.texts("#kinds td:nth-child(2)") == ["30", "600", "3,000", "4,500", "400", "70"]
    took_ms = page.run(
        """
        const { drawOrigins, clearOrigins } = await import("/page/origins.js"), [prompt] = arguments;
        clearOrigins();
        const begin = performance.now();
        drawOrigins(prompt, [{ name: "1", start: 0, end: prompt.tokens.length, runs: prompt.runs }]);
        document.querySelector("#origins canvas").getContext("2d").getImageData(0, 0, 1, 1);
        return performance.now() - begin;
    """,
        asdict(pipeline.origins),
    )
    assert took_ms < 500


def test_stop_cancels_the_request_at_the_server(pipeline, page) -> None:
    pipeline.script = [*SCRIPT[:2], asyncio.Event()]
    page.ask()
    page.until(lambda: page["answer"].text)
    assert not pipeline.cancelled.is_set()
    page["stop"].click()
    assert pipeline.cancelled.wait(5)
    page.until(lambda: page["answer-state"].text == "Stopped.")
    assert page["answer"].text == "Grüße," and not page["answer-problem"].is_displayed()
    pipeline.script = SCRIPT
    page.ask()
    page.until(lambda: page["answer"].text == "Grüße,\n world")


@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        ([ContextTooLongError("the question has 9000 tokens", 9000, 8192)], 413, "the question has 9000 tokens"),
        ([*SCRIPT[:2], StoreError("no space is left")], 200, "no space is left"),
        ([*SCRIPT[:2], KeyError("secret")], 200, "something went wrong; see the server's log"),
    ],
)
def test_errors_are_shown_where_they_happen(pipeline, page, script, status, message) -> None:
    page.expected = {413}
    pipeline.script = script
    page.ask()
    page.until(lambda: page["answer-problem"].is_displayed())
    assert page["answer-problem"].text == message
    assert page["answer"].text == ("Grüße," if status == 200 else "")
    pipeline.script = SCRIPT
    page.ask()
    page.until(lambda: page["answer-facts"].text)
    assert not page["answer-problem"].is_displayed()


def test_times_are_compared_with_a_full_prefill_expected_then_measured(pipeline, page) -> None:
    timings = Timings(retrieve_ms=10, load_ms=100, probe_ms=50, recompute_ms=30, ttft_ms=200, total_ms=1210)
    pipeline.script = [*SCRIPT[:3], replace(ANSWER, timings=timings, plan=replace(ANSWER.plan, prefill_ms=900))]
    page.ask()
    page.until(lambda: page["times-card"].is_displayed())
    assert page.texts("#stages td:nth-child(2)") == [f"{ms} ms" for ms in (10, 100, 50, 30, 20, "1,000", "1,210")]
    shares = "return [...document.querySelectorAll('#times span')].map((part) => Number(part.style.flexGrow))"
    assert page.run(shares) == [10, 100, 50, 30, 20, 1000]
    assert page["full-name"].text == "Full prefill, expected" and page["full-ms"].text == "900 ms"
    assert page["ratio"].text.startswith("The first token came 4.5 times as fast as a full prefill is expected to be.")
    full = Timings(retrieve_ms=10, recompute_ms=590, ttft_ms=600, total_ms=620)
    pipeline.script = [Retrieved([]), replace(ANSWER, timings=full, usage=Usage(30, 0, 0, 30, 1))]
    page["measure"].click()
    page.until(lambda: page["full-name"].text == "Full prefill, measured")
    assert page["full-ms"].text == "600 ms" and page["answer"].text == "Grüße,\n world"
    assert page["ratio"].text == (
        "The first token came 3 times as fast as full prefill. 5 tokens came from vLLM's prefix cache."
    )
    question, options = pipeline.asked[-1]
    assert (question, options.policy.name, options.max_tokens) == ("who?", "full", 1) and options.fresh


def upload(page, tmp_path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    page["files"].send_keys("\n".join(str(tmp_path / name) for name in contents))


def test_uploads_go_each_its_own_way_into_the_list(api, page, tmp_path) -> None:
    page.expected = {422, 429}
    page.until(lambda: page["no-documents"].is_displayed())
    api.refusals.append((429, "too many uploads wait", {"Retry-After": "1"}))
    files = {f"{i}.md": b"# Title\ntext" for i in range(4)}
    upload(page, tmp_path, {"bad.bin": b"\0", **files})
    page.until(lambda: "Prefilling 3 of 4" in page["uploads"].text)
    page.until(lambda: page.texts("#documents .name") == sorted(files))
    page.until(lambda: page["uploads"].text.count("Indexed, 1 chunk prefilled") == 4)
    assert page.texts("#uploads .problem") == ["bad.bin can't be read: it is binary"]
    assert api.most_at_once == 2
    page["clear-uploads"].click()
    assert not page.all("#uploads li")
    page.all("#documents summary")[1].click()
    page.until(lambda: page.texts("#documents .text") == ["# Title\ntext"])
    assert page.texts("#documents details details summary") == ["Chunk 1 · 3 tokens · KV stored"]


def test_documents_of_a_real_catalogue(chrome, pipeline, tmp_path) -> None:
    """The same against the endpoints as they are."""
    with running({MAIN: pipeline}, tmp_path) as client:
        page = Page(chrome, str(client.base_url)).open()
        page.expected = {422}
        upload(page, tmp_path, {"tea.md": b"# Tea\n\nDrink it.", "bad.txt": b"\xff"})
        page.until(lambda: page.texts("#documents .name") == ["tea.md"])
        page.until(lambda: "it isn't UTF-8" in page.texts("#uploads .problem")[0])
        page.all("#documents summary")[0].click()
        page.until(lambda: page.texts("#documents .text") == ["# Tea", "Drink it."])
        page.all("#documents button")[0].click()
        page.all("#deletion .danger")[0].click()
        page.until(lambda: page["no-documents"].is_displayed())
        assert client.get("/v1/documents").json()["documents"] == []
        page.leave()


def test_files_can_be_dropped(api, page) -> None:
    page.run("""
        const dropped = new DataTransfer();
        dropped.items.add(new File(["text"], "dropped.md"));
        const event = new DragEvent("drop", { dataTransfer: dropped, cancelable: true });
        document.getElementById("drop").dispatchEvent(event);
    """)
    page.until(lambda: page.texts("#documents .name") == ["dropped.md"])


def test_jobs_of_before_are_followed(api, page) -> None:
    api._new_job("early.md", "text")
    page.open()
    page.until(lambda: "early.md" in page["uploads"].text)
    page.until(lambda: page.texts("#documents .name") == ["early.md"])


def test_the_list_is_paged_and_the_filter_looks_through_all_pages(api, page) -> None:
    api.documents = {f"folder/{i:03}.md": "text" for i in range(250)}
    page.open()
    page.until(lambda: page["num-documents"].text == "100 documents, and more")
    page["more"].click()
    page.until(lambda: page["num-documents"].text == "200 documents, and more")
    page["filter"].send_keys("49.MD")
    page.until(lambda: page.texts("#documents .name") == ["049.md", "149.md", "249.md"])
    assert page["num-documents"].text == "3 documents found" and not page["more"].is_displayed()


def test_deleting_asks_first(api, page) -> None:
    api.documents = {"folder/a b#%.md": "text", "b.md": "text"}
    page.open()
    page.until(lambda: len(page.all("#documents li")) == 2)
    (button,) = page.all('button[aria-label="Delete folder/a b#%.md"]')
    button.click()
    assert page["deletion-name"].text == "folder/a b#%.md" and "1 chunk (1 token)" in page["deletion-what"].text
    assert page.chrome.switch_to.active_element.text == "Keep it"
    page.chrome.switch_to.active_element.send_keys("\n")
    assert not page["deletion"].is_displayed() and len(api.documents) == 2
    page.expected = {409}
    api.refusals.append((409, "the home is being changed by another process"))
    button.click()
    page.all("#deletion .danger")[0].click()
    page.until(lambda: "the home is being changed by another process" in page["documents"].text)
    assert len(api.documents) == 2
    button.click()
    page.all("#deletion .danger")[0].click()
    page.until(lambda: page.texts("#documents .name") == ["b.md"])
    assert page["documents-state"].text == "Deleted folder/a b#%.md: 1 chunk, 3 MiB of KV freed."
    assert list(api.documents) == ["b.md"]


def test_a_key_is_asked_for_where_the_server_has_keys(chrome, pipeline, api, tmp_path) -> None:
    api.documents = {"a.md": "text"}
    guarded = ServerConfig(keys={"ann": hash_of("ragkv-right")})
    config = CONFIG.model_copy(update={"server": guarded})
    with running({MAIN: pipeline}, tmp_path, config, app_with(api)) as client:
        page = Page(chrome, str(client.base_url)).open()
        page.expected = {401}
        page.until(lambda: page["key-dialog"].is_displayed())
        assert page["key"].get_attribute("type") == "password" and not page["key-problem"].text
        page["key"].send_keys("ragkv-wrong\n")
        page.until(lambda: "missing or unknown" in page["key-problem"].text)
        assert not page["documents"].text
        page["key"].send_keys("ragkv-right\n")
        page.until(lambda: page.texts("#documents .name") == ["a.md"])
        page.until(lambda: page["status"].text == "Ready")
        page.ask()
        page.until(lambda: page["answer-facts"].text)
        page.open()
        page.until(lambda: page["documents"].text)
        assert not page["key-dialog"].is_displayed()
        page.run("sessionStorage.clear()")
        page.open().until(lambda: page["key-dialog"].is_displayed())
        page.all("#key-dialog .plain")[0].click()
        page.until(lambda: page["documents-problem"].is_displayed())
        page.until(lambda: page["status"].text == "Needs a key")
        page.leave()


def test_a_tenants_page_has_no_gauges(chrome, pipeline, api, tmp_path) -> None:
    keys = {"server": ServerConfig(keys={"ann": hash_of("ragkv-right")})}
    config = Config(**keys, tenants={"acme": {"keys": {"bob": hash_of("ragkv-acme")}}})
    pipelines = {MAIN: pipeline, "acme": ScriptedPipeline(tmp_path / "acme", tenant="acme")}
    with running(pipelines, tmp_path, config, app_with(api)) as client:
        for key, shown in (("ragkv-right", True), ("ragkv-acme", False)):
            page = Page(chrome, str(client.base_url)).open()
            page.expected = {401, 403}
            page.until(lambda page=page: page["key-dialog"].is_displayed())
            page["key"].send_keys(f"{key}\n")
            page.until(lambda page=page: page["status"].text == "Ready")
            page.until(lambda page=page, shown=shown: page["gauges"].is_displayed() is shown)
            page.ask()
            page.until(lambda page=page: page["answer-facts"].text)
            page.run("sessionStorage.clear()")
        page.leave()


def test_gauges_follow_the_metrics(pipeline, page) -> None:
    assert page["share-reused"].text == "–" and page["no-ttft"].is_displayed()
    page.until(lambda: page["in-progress"].text == "0" and page.texts("#kv-events td") == ["1", "0", "0"])
    page.ask()
    page.until(lambda: page.texts("#ttft tr") == ["full20 ms1 answer"])
    assert page["share-reused"].text == "66.7%"
    assert page.texts("#prompt-tokens tr") == ["prefix cache516.7%", "reused2066.7%", "computed516.7%"]
    assert page["inter-token"].text.endswith(" ms") and page["model"].text == "smollm2-135m-instruct"
    pipeline.is_ready = False
    page.expected = {503}
    page.until(
        lambda: (
            page["status"].text
            == "the engine is not running; if it has ended it is being started again, see the server's log"
        )
    )


def test_counters_that_begin_again_are_not_taken_for_less(page) -> None:
    found = page.run("""
        const { parse, increase, mean, labelled } = await import("/page/prometheus.js");
        const [start, number, sum] = ["process_start_time_seconds", 'a_count{p="x\\\\"y"}', 'a_sum{p="x\\\\"y"}'];
        const lines = (...values) =>
          parse(`# HELP a\\n${start} ${values[0]}\\n${number} ${values[1]}\\n${sum} ${values[2]}\\n`);
        const history = [lines(1, 10, 100), lines(1, 13, 130), lines(2, 20, 40), lines(3, 1, 2)];
        const series = labelled(history[0], "a_count").get('x"y');
        return [increase(history, series), mean(history, "a", '{p="x\\\\"y"}'), increase(history.slice(0, 1), series)];
    """)
    assert found == [3 + 20 + 1, (30 + 40 + 2) / 24, 0]


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 640, 360, 320])  # 640: 1280 at 200%; 320: 1280 at 400%
def test_nothing_bars_anybody(pipeline, api, page, axe, colours, width) -> None:
    """axe-core's rules of WCAG 2.2 A and AA, and no need to scroll sideways, with everything shown that can be."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": colours}]}
    page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    api.documents = {f"{'long' * 40}.md": "text", "b.md": "text"}
    wide = f"\n| {'wide | ' * 30}\n|{'-|' * 30}\n\n    {'x' * 300}\n"
    pipeline.script = [SCRIPT[0], Reasoning("Hm."), Delta(MARKDOWN + wide), ANSWER]
    page.open().ask()
    page.until(lambda: page["prompt-card"].is_displayed() and len(page.all("#documents li")) == 2)
    page.run("for (const details of document.querySelectorAll('details')) details.open = true")
    page.until(lambda: page.texts("#documents .text"))
    assert page.run("return document.documentElement.scrollWidth") <= width
    page.chrome.execute_script(axe)
    rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    check = "const { violations } = await axe.run({ runOnly: arguments[0] }); return violations"
    assert [rule["id"] + str(rule["nodes"]) for rule in page.run(check, rules)] == []
    page.all("#documents button")[0].click()
    assert [rule["id"] + str(rule["nodes"]) for rule in page.run(check, rules)] == []


@pytest.fixture(scope="session")
def axe(tmp_path_factory) -> str:
    """axe-core's script, from npm."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if npm is None:
        pytest.skip("npm isn't installed; axe-core comes with it: apt install npm")
    done = subprocess.run([npm, "pack", AXE], cwd=folder, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"npm can't get {AXE}: {done.stderr.strip()[-200:]}")
    (packed,) = folder.glob("*.tgz")
    with tarfile.open(packed) as package:
        return package.extractfile("package/axe.min.js").read().decode()


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_colours_have_contrast(page, colours) -> None:
    """WCAG 1.4.11: what carries meaning has a contrast of three to its background; axe checks only text."""
    media = {"features": [{"name": "prefers-color-scheme", "value": colours}]}
    page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    kinds = [
        "prefix",
        "stored",
        "memory",
        "disk",
        "recomputed",
        "computed",
        "probe",
        "decode",
        "edge",
        "accent",
        "danger",
    ]
    read = """
        const style = getComputedStyle(document.documentElement);
        const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
        return arguments[0].map((name) => {
          context.fillStyle = style.getPropertyValue(`--${name}`).trim();
          context.fillRect(0, 0, 1, 1);
          return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
        });
    """
    card, track, *found = map(luminance, page.run(read, ["card", "track", *kinds]))
    assert [kind for kind, own in zip(kinds, found, strict=True) if contrast(own, card) < 3] == []
    assert [kind for kind, own in zip(kinds[:5], found, strict=False) if contrast(own, track) < 3] == []


def luminance(rgb: list[int]) -> float:
    """WCAG's relative luminance."""
    shares = [value / 255 for value in rgb]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
