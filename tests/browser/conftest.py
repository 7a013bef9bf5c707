# SPDX-License-Identifier: Apache-2.0
"""A real Chromium without a screen, driven by chromedriver; one for each file of tests."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.conftest import GRACE_S
from tests.support.holdings import Holdings, servers_of_multiprocessing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DESK = (1280, 900)
PHONE = (360, 740)


def missing(reason):
    """Skip, or fail where the browser is required."""
    if os.environ.get("PENSTOCK_REQUIRE_BROWSER") == "1":
        pytest.fail(f"{reason}. PENSTOCK_REQUIRE_BROWSER=1 forbids to skip.")
    pytest.skip(reason)


def program(*names):
    found = next(filter(None, map(shutil.which, names)), None)
    return found or missing(
        f"{names[0]} is not installed: apt-get install chromium chromium-driver"
    )


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The browser. Its processes have ended when the last test of the file has."""
    browser, chromedriver = program(*BROWSERS), program("chromedriver")
    try:
        from selenium import webdriver
    except ModuleNotFoundError:
        missing("selenium is not installed: pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (
        "--headless=new",
        "--no-sandbox",  # tests may run as root
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # nothing outside can be reached
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
        f"--window-size={DESK[0]},{DESK[1]}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    before = set(psutil.Process().children(recursive=True))
    # The path of the driver is given, so that selenium does not look for one on the network.
    service = webdriver.ChromeService(executable_path=chromedriver)
    started = webdriver.Chrome(options=options, service=service)
    yield started
    servers, _ = servers_of_multiprocessing()
    ours = set(psutil.Process().children(recursive=True)) - before
    ours = {process for process in ours if process.pid not in servers}
    started.quit()
    _, left = psutil.wait_procs(ours, timeout=GRACE_S)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=GRACE_S)


@pytest.fixture(autouse=True)
def no_leaks(driver) -> Iterator[None]:
    """As for all tests, but for the browser, which has processes come and go as it likes."""
    before = without_browser(driver)
    yield
    left = without_browser(driver).left_since(before)
    assert not left, "the test left behind:\n  " + "\n  ".join(left)


def without_browser(driver):
    held = Holdings.now()
    started = psutil.Process(driver.service.process.pid)
    its = {started, *started.children(recursive=True)}
    # What chromedriver has left to init, as browsers do with their helpers, is no child of ours.
    sockets = {d for d in held.descriptors if d[1].startswith("socket:")}
    return dataclasses.replace(
        held, children=held.children - its, descriptors=held.descriptors - sockets
    )


class Page:
    """A page that is open, and what the browser said while it was."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, path: Path, *, scheme: str = "light", size: tuple[int, int] = DESK) -> Page:
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.command("Emulation.setEmulatedMedia", features=[_feature(scheme)], media="")
        self.resize(*size)
        self.driver.get(path.as_uri())
        return self

    def command(self, name, **arguments):
        return self.driver.execute_cdp_cmd(name, arguments)

    def resize(self, width, height):
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def wait_until(self, holds):
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 30, poll_frequency=0.05).until(lambda _: holds())

    def js(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def count(self, selector):
        return self.js("return document.querySelectorAll(arguments[0]).length", selector)

    def style(self, selector, name):
        return self.js(
            "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]",
            selector,
            name,
        )

    def console(self):
        """Return what the page has said in the console: warnings and errors."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """Return the addresses that were asked for since the page was opened."""
        messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        return [
            m["params"]["request"]["url"]
            for m in messages
            if m["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path):
        """Take a picture of the whole page, however long."""
        import base64

        taken = self.command("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(taken["data"]))


def _feature(scheme):
    return {"name": "prefers-color-scheme", "value": scheme}


@pytest.fixture
def page(driver) -> Page:
    return Page(driver)
