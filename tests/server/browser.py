"""Headless Chromium on the page of a scripted server, with checks of its logs."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

TIMEOUT_S = 10


@contextmanager
def chromium() -> Iterator[Chrome]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("Chromium isn't installed; apt install chromium chromium-driver")
    options = ChromeOptions()
    options.binary_location = program
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1280,900"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with Chrome(options, ChromeService(driver)) as chrome:
        yield chrome


class Page:
    """The page of the server at `url`, by the ids of its elements."""

    def __init__(self, chrome: Chrome, url: str) -> None:
        self.chrome, self.url = chrome, url
        self.expected = set()  # statuses of answers that the browser may complain of
        chrome.get_log("browser"), chrome.get_log("performance")

    def open(self) -> "Page":
        self.chrome.get(self.url)
        return self

    def __getitem__(self, id: str) -> WebElement:
        return self.chrome.find_element(By.ID, id)

    def all(self, selector: str) -> list[WebElement]:
        return self.chrome.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """Return the texts of elements, visible or not."""
        return [element.get_property("textContent") for element in self.all(selector)]

    def run(self, script: str, *arguments):
        """Run the body of an async function in the page, and return its result."""
        call = "const done = arguments[arguments.length - 1]; (async () => {%s})().then(done, (e) => done(String(e)))"
        return self.chrome.execute_async_script(call % script, *arguments)

    def until(self, what: Callable[[], object]):
        """Wait until `what` returns something true, and return that."""
        end = time.monotonic() + TIMEOUT_S
        while True:
            try:
                found = what()
            except StaleElementReferenceException:
                found = None
            if found:
                return found
            assert time.monotonic() < end, f"it didn't happen within {TIMEOUT_S} s: the page shows\n{self.shown}"
            time.sleep(0.02)

    @property
    def shown(self) -> str:
        return self.chrome.find_element(By.TAG_NAME, "body").text

    def ask(self, question: str = "who?") -> None:
        self["question"].clear()
        self["question"].send_keys(question, "\n")

    def leave(self) -> None:
        """Leave the page; fail if it sent anything elsewhere, violated the policy, or had an error in a script."""
        self.chrome.get("about:blank")
        for entry in self.chrome.get_log("browser"):
            status = entry["message"].partition("responded with a status of ")[2][:3]
            assert status in map(str, self.expected), entry
        events = [json.loads(entry["message"])["message"] for entry in self.chrome.get_log("performance")]
        urls = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
        assert any(url.startswith(self.url) for url in urls)
        assert all(url.startswith((self.url, "about:", "data:")) for url in urls), urls
