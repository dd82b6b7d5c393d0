"""The explorer page in headless Chromium: its six activities at two widths, by keyboard, without a server."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the page; pip install playwright")

from vlhmm.cli.main import main  # noqa: E402

pytestmark = pytest.mark.slow
WIDTHS = {"phone": (390, 844), "wide": (1280, 900)}


@pytest.fixture(scope="module")
def browser():
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium on the PATH; set CHROMIUM")
    with playwright_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


class Page:
    """A page whose console and requests are watched."""

    def __init__(self, browser, address, size, theme):
        width, height = WIDTHS[size]
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        if address.startswith("http"):
            self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address)
        self.page, self.address, self.width = self.context.new_page(), address, width
        self.problems, self.urls = [], []
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))

    def open(self, view):
        self.page.goto(f"{self.address}#{view}")
        self.ready()
        return self.page

    def ready(self):
        self.page.locator(".answer[aria-busy=false] > *").first.wait_for(timeout=60_000)

    def until(self, condition):
        for _ in range(200):  # the page's policy forbids the evaluation that wait_for_function needs
            if condition():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("it did not come about within ten seconds")

    def copied(self, kind):
        self.page.locator(f"[data-copy={kind}]").click()
        self.page.get_by_text("Copied.").wait_for()
        return self.page.evaluate("navigator.clipboard.readText()")

    def check(self):
        """No console message, no request elsewhere, nothing wider than the window, no serious finding of axe."""
        assert self.problems == []
        assert all(url.startswith((self.address.rsplit("/", 1)[0], "blob:", "data:")) for url in self.urls), self.urls
        assert self.page.evaluate("document.documentElement.scrollWidth") <= self.width
        axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
        violations = axe.Axe().run(self.page).response["violations"]
        serious = [(v["id"], v["nodes"][0]["html"]) for v in violations if v["impact"] in ("serious", "critical")]
        assert serious == []


@pytest.fixture(params=[("phone", "light"), ("phone", "dark"), ("wide", "light"), ("wide", "dark")], ids="-".join)
def page(request, browser, served):
    opened = Page(browser, served.address + "/", *request.param)
    yield opened
    opened.context.close()


def test_reading_a_sentence(page):
    here = page.open("read?text=the+big+dogs+runs+.")
    words = here.locator(".word")
    assert words.all_inner_texts()[3].startswith("runs")
    bits = [float(text.split()[-1]) for text in words.all_inner_texts()]
    assert max(bits) == bits[3], "the verb that does not agree is the surprise"
    words.nth(3).hover()
    assert here.locator(".answer .bars li .name").first.inner_text() == "run"
    assert here.locator(".heat .best").count() == 5 and here.locator(".heat polyline").count() == 4
    here.get_by_label("Sentence").fill("the cat")
    here.keyboard.press("Enter")
    here.locator(".word").nth(1).filter(has_text="cat").wait_for()
    assert "the+cat" in here.url
    page.check()


def test_looking_inside(page):
    here = page.open("inside?kind=word&of=dogs")
    here.locator(".answer a").filter(has_text=re.compile("^state ")).first.click()
    here.get_by_role("heading", name="Emits").wait_for()
    here.locator(".facts a").filter(has_text="block").click()
    here.get_by_role("heading", name="Its states").wait_for()
    assert here.locator(".examples mark").count() > 0
    here.get_by_label("Number or word").fill("9999")
    here.keyboard.press("Enter")
    here.locator(".error").filter(has_text="9999").wait_for()
    assert here.get_by_label("Number or word").get_attribute("aria-invalid") == "true"
    page.problems[:] = [text for text in page.problems if "404" not in text]  # the browser's own note of the answer
    page.check()


def test_filling_gaps_under_a_constraint(page):
    here = page.open("fill?template=the+[MASK:1-2]+run+.&must_contain=small")
    here.get_by_text("24 of 24 draws").wait_for(timeout=60_000)
    assert all("small" in text for text in here.locator(".bars .name").all_inner_texts())
    assert "%" in here.locator("#constraint b").inner_text()
    here.get_by_label("Answer").select_option("marginals")
    here.get_by_role("button", name="Ask").click()
    here.get_by_role("heading", name="Gap 1, word 1 of 1").wait_for()
    page.check()


def test_the_next_word_changes_with_every_key(page):
    here = page.open("next?context=the+big+")
    field = here.get_by_label("Words so far")
    field.press("End")
    field.press_sequentially("dogs ", delay=30)
    here.locator(".bars .name").first.filter(has_text=re.compile("^run$")).wait_for()
    here.locator(".bars .name a").first.click()
    page.until(lambda: here.get_by_label("Words so far").input_value() == "the big dogs run ")
    page.ready()
    page.check()


def test_the_map_by_keyboard(page):
    here = page.open("map")
    canvas = here.locator("canvas")
    wide = canvas.bounding_box()["width"]
    canvas.focus()
    before = here.locator(".told").inner_text()
    here.keyboard.press("ArrowDown")
    here.keyboard.press("ArrowUp")
    here.keyboard.press("ArrowUp")
    here.keyboard.press("ArrowRight")
    assert here.locator(".told").inner_text() != before
    here.keyboard.press("+")
    page.until(lambda: (here.locator("canvas").bounding_box() or {"width": 0})["width"] > wide)
    page.check()
    here.keyboard.press("Enter")
    here.get_by_role("heading", name="Its states").wait_for()


def test_copies_of_a_view(page):
    page.open("next?context=the+big+dogs")
    assert page.copied("link") == page.page.url
    answer = json.loads(page.copied("json"))
    assert answer["words"][0]["word"] == "run"
    for kind in ("curl", "python"):
        text = page.copied(kind)
        command = ["sh", "-c", text.replace("curl", "curl -s")] if kind == "curl" else [sys.executable, "-c", text]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        again = json.loads(printed) if kind == "curl" else eval(printed)
        assert again["words"] == answer["words"]
    page.check()


def test_keys_choose_the_activity_and_the_first_field(page):
    here = page.open("read?text=the+dog")
    here.locator("h1").click()
    for key, title in (("4", "Next word"), ("5", "Map of blocks"), ("1", "Read a sentence")):
        here.keyboard.press(key)
        here.get_by_role("heading", name=title, level=1).wait_for()
    page.ready()
    here.keyboard.press("/")
    assert here.evaluate("document.activeElement.name") == "text"
    page.check()


@pytest.mark.parametrize("size", WIDTHS)
def test_an_exported_page_needs_no_server(browser, run_folder, tmp_path, size):
    site = tmp_path / "site"
    assert main(["explore", str(run_folder), "--export", str(site), "--top-states", "20", "--quiet"]) == 0
    page = Page(browser, (Path(site) / "index.html").as_uri(), size, "light")
    here = page.open("map")
    here.locator(".beside a").filter(has_text="block").first.click()
    here.get_by_role("heading", name="Its states").wait_for()
    here.locator(".answer a").filter(has_text=re.compile("^state ")).first.click()
    here.get_by_role("heading", name="Emits").wait_for()
    assert here.locator("nav a").all_inner_texts() == ["Look inside", "Map"]
    page.check()
    page.context.close()
