"""The page of the server in a browser: a prompt is answered, canvas and tiers are shown, and no other host is asked."""

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from serving import Served, serving

import tiered

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
PAGE = Path(tiered.__file__).parent / "serving" / "page.html"
# Values of the page once it is done, or has failed.
SHOWN = """({
  state: document.body.dataset.state, answer: at("answer").textContent, error: at("error").textContent,
  status: at("status").textContent, tiers: at("tiers").textContent, canvas: at("canvas").textContent,
  columns: at("canvas").childElementCount, ahead: document.querySelectorAll(".ahead").length,
  open: document.querySelectorAll(".open").length, model: at("model").textContent, policy: at("policy").textContent,
  example: at("example").textContent, prompt: (at("example").click(), at("prompt").value),
})"""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with tiered.from_pretrained("embedded", policy="fast_dllm_dual") as runtime, serving(runtime) as served:
        yield served


@pytest.fixture
def devtools(tmp_path: Path) -> Iterator[str]:
    """Host and port of a browser's DevTools."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        if os.environ.get("TIERED_REQUIRE_BROWSER"):
            pytest.fail(f"none of {', '.join(BROWSERS)} is installed")
        pytest.skip("no browser")
    command = [browser, *FLAGS, f"--user-data-dir={tmp_path}", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            yield next(found[1] for line in lines if (found := re.search(r"listening on ws://([^/]+)/", line)))
        finally:
            process.kill()


async def shown(devtools: str, url: str) -> tuple[dict[str, Any], list[str], list[str]]:
    """The page's last values, the URLs that it asked for, and its errors."""
    asked: list[str] = []
    wrong: list[str] = []
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{devtools}/json") as listed:
            page = next(each for each in await listed.json() if each["type"] == "page")
        async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as browser:
            numbers = iter(range(10_000))

            async def tell(method: str, **params: Any) -> dict[str, Any]:
                number = next(numbers)
                await browser.send_json({"id": number, "method": method, "params": params})
                while True:
                    heard = json.loads(await browser.receive_str(timeout=60))
                    if heard.get("method") == "Network.requestWillBeSent":
                        asked.append(heard["params"]["request"]["url"])
                    elif heard.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                        wrong.append(json.dumps(heard["params"]))
                    elif heard.get("id") == number:
                        return heard["result"]

            for domain in ("Network", "Runtime", "Log", "Page"):
                await tell(f"{domain}.enable")
            await tell("Page.navigate", url=url)
            for _ in range(600):
                found = await tell(
                    "Runtime.evaluate", expression=f"typeof at === 'function' && {SHOWN}", returnByValue=True
                )
                value = found["result"].get("value")
                if value and value.get("state") in ("done", "failed"):
                    return value, asked, wrong
                await asyncio.sleep(0.1)
    raise AssertionError("the page never ended")


def test_the_page_shows_the_answer_to_a_prompt(served: Served, devtools: str):
    url = f"{served.url}/?prompt=sort:%20Nora%20Ben%20Ivan%20Cleo"
    page, asked, wrong = asyncio.run(shown(devtools, url))
    assert (page["state"], page["answer"], page["error"]) == ("done", "Ben Cleo Ivan Nora", "")
    assert page["canvas"].startswith("Ben Cleo Ivan Nora·") and page["columns"] == 64 and page["ahead"] == 32
    assert re.fullmatch(r"4 tokens, \d+ forwards, [\d.]+ s", page["status"])
    assert re.search(r"device\s+weights\s7\.\d\sMiB .*[\d.]+ MiB, most [\d.]+ MiB, no cap", page["tiers"])
    assert (page["model"], page["policy"], page["example"]) == ("embedded", "fast_dllm_dual", page["prompt"])
    own = [each.removeprefix(served.url) for each in asked]
    assert {*own} <= {"/?prompt=sort:%20Nora%20Ben%20Ivan%20Cleo", "/v1/chat/completions", "/favicon.ico"}
    assert not [each for each in wrong if "favicon" not in each]


def test_blocks_of_the_models_own_length(devtools: str):
    with tiered.from_pretrained("embedded-blocks") as runtime, serving(runtime) as served:
        page, _, _ = asyncio.run(shown(devtools, f"{served.url}/?prompt=sort:%20Nora%20Ben%20Ivan%20Cleo"))
        # Its last block has more columns than the answer.
        long, _, _ = asyncio.run(shown(devtools, f"{served.url}/?prompt=reverse:{'%20Nora%20Ben%20Ivan' * 30}"))
    assert (page["state"], page["answer"], page["error"]) == ("done", "Ben Cleo Ivan Nora", "")
    assert (long["state"], long["error"], long["status"].split(",")[0]) == ("done", "", "64 tokens")


def test_an_error_is_shown(served: Served, devtools: str):
    page, _, _ = asyncio.run(shown(devtools, f"{served.url}/?prompt={'0' * 5000}"))
    assert page["state"] == "failed" and "positions" in page["error"]


def test_the_page_is_one_file_that_names_no_other():
    text = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href|url)\s*[=(]|https?://|@import|import\s*\(""", text)
