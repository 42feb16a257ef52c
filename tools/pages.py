"""Opens the pages of `bertdata inspect --html` and `bertrain plot --html` in Chromium, and uses every control.

    python tools/pages.py --pictures docs/

Makes a small dataset of docstrings and two short runs first, which takes some minutes. A page fails if the browser
reports an error, a control has no effect, the keyboard does not reach a control, two numbers of an axis read the same,
something is wider than the screen, or a text has too little contrast. Needs playwright (pip install playwright) and an
installed Chromium (apt-get install chromium).
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from bertrain.commands import docstrings

ROOT = Path(__file__).parent.parent
WIDTHS = (1280, 390)
THEMES = ("light", "dark")
STEPS = 300
ODD = "<b onclick=alert(1)>odd"
PICTURE_COLORS = 64  # which keep a picture of a page small
CONTROLS = "button, input:not(:disabled), select, summary, [tabindex='0']"
BODY_CONTRAST = 4.5  # WCAG AA, for text of normal size
CONTRASTS = """() => {
  const channel = x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = color => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map(x => channel(x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!/rgba\\(0, 0, 0, 0\\)|transparent/.test(color)) return color;
    }
  };
  const worst = [];
  const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !node.checkVisibility() || node.closest("script, style, :disabled")) continue;
    const style = getComputedStyle(node), color = node.closest("svg") ? style.fill : style.color;
    const [high, low] = [light(color), light(behind(node))].sort((a, b) => b - a);
    worst.push([(high + 0.05) / (low + 0.05), walk.currentNode.data.trim().slice(0, 40)]);
  }
  return worst.sort((a, b) => a[0] - b[0])[0];
}"""


AXES = """() => [...document.querySelectorAll("figure svg[tabindex]")].map(chart => {
  const at = (name, place) => [...chart.querySelectorAll("text")]
    .filter(text => Number(text.getAttribute(name)) === place).map(text => text.textContent);
  return [chart.closest("figure").querySelector("b").textContent, at("x", LEFT - 8), at("y", HEIGHT - 6)];
})"""


def require(holds: Any, said: str) -> None:
    if not holds:
        sys.exit(f"Error: {said}")


@contextmanager
def opened(browser: Browser, path: Path, *, width: int, theme: str) -> Iterator[Page]:
    """A page of the browser. Anything that the browser complains of, and any request, ends the program."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)  # type: ignore[arg-type]
    page, complaints = context.new_page(), list[str]()
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if request.url == path.as_uri() else complaints.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_timeout(100)  # until what is drawn for the width is drawn
    yield page
    require(not complaints, f"{path.name} at {width}, {theme}: {complaints}")
    context.close()


def is_readable(page: Page, name: str) -> None:
    """Nothing is wider than the screen, and every text has contrast."""
    wide, screen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    require(wide <= screen, f"{name}: {wide} pixels wide on a screen of {screen}")
    contrast, text = page.evaluate(CONTRASTS)
    require(contrast >= BODY_CONTRAST, f"{name}: {text!r} has a contrast of {contrast:.2f}")


def keyboard_reaches_all(page: Page, name: str) -> None:
    """Tab alone goes to each control that is shown, in the order of the page."""
    expected = page.evaluate(
        f"""[...document.querySelectorAll("{CONTROLS}")].filter(node => node.checkVisibility())
        .map((node, i) => (node.dataset.number = i))"""
    )
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    reached = []
    for _ in range(len(expected)):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.dataset.number ?? document.activeElement.tagName"))
    require(reached == [str(number) for number in expected], f"{name}: Tab goes to {reached}, not to all in order")


def charts_are_read(page: Page, name: str) -> int:
    """Each chart says what is under the pointer, and what the arrow keys go to. Its numbers are a table."""
    figures = page.locator("figure:visible").all()
    for figure in figures:
        said = figure.locator(".readout")
        chart = figure.locator("svg[tabindex]")
        if chart.count():
            chart.scroll_into_view_if_needed()
            before = said.inner_text()
            chart.hover()
            pointed = said.inner_text()
            require(pointed != before, f"{name}: {before!r} stays under the pointer")
            chart.focus()
            page.keyboard.press("Home")
            first = said.inner_text()
            page.keyboard.press("ArrowRight")
            require(said.inner_text() != first, f"{name}: arrow keys do not read {first!r}")
        if figure.locator("summary").count():
            figure.locator("summary").click()
            require(figure.locator("tbody tr").first.is_visible(), f"{name}: the numbers of a chart stay hidden")
            figure.locator("summary").click()
    return len(figures)


def axes_tell_values_apart(page: Page, name: str) -> None:
    """Each axis of a chart has two numbers or more, and no two that read the same."""
    for title, *axes in page.evaluate(AXES):
        for labels in axes:
            require(len(set(labels)) == len(labels) > 1, f"{name}: {title} has an axis with the numbers {labels}")


def theme_changes(page: Page, name: str) -> None:
    def paper() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    before = paper()
    page.click("#theme")
    require(paper() != before, f"{name}: the button of the theme does nothing")
    is_readable(page, f"{name}, other theme")
    page.click("#theme")
    require(paper() == before, f"{name}: the theme does not go back")


def choices_differ(page: Page, field: str, shown: Locator, name: str) -> None:
    """Each choice of a field shows something else."""
    select, seen = page.locator(field), []
    for value in select.evaluate("node => [...node.options].map(option => option.value)"):
        select.select_option(value)
        page.wait_for_timeout(50)
        seen.append(shown.inner_html())
    require(len(set(seen)) == len(seen) > 1, f"{name}: two choices of {field} show the same")
    select.select_option(index=0)


def use_report(page: Page, name: str) -> None:
    """The controls of the page of a dataset."""
    answer, row = page.locator("#steps"), page.locator("#row")
    for field, value in (("row_length", "64"), ("batch", "8"), ("epochs", "3"), ("rate", "5000")):
        before = answer.inner_text()
        page.fill(f"#calculator [name={field}]", value)
        require(answer.inner_text() != before, f"{name}: {field} changes no steps")
    page.fill("#calculator [name=batch]", "0")
    require("above zero" in answer.inner_text(), f"{name}: rows of a step may be 0")
    page.fill("#calculator [name=batch]", "8")
    for field in ("position", "epoch", "seed", "policy", "show"):
        choices_differ(page, f"#browser [name={field}]", row, name)
    first = row.inner_html()
    page.click("#next")
    require(row.inner_html() != first, f"{name}: Next shows the same sample")
    page.click("#back")
    require(row.inner_html() == first, f"{name}: Back does not go back")


def use_packed(page: Page, name: str) -> None:
    """The page of long packed rows: their number is known for one length, and their first positions are shown."""
    require(page.locator("#calculator [name=row_length]").is_disabled(), f"{name}: a length may be given")
    require("first 512 positions" in page.inner_text("#samples-text"), f"{name}: the rest of a row is not said")


def use_close(page: Page, name: str) -> None:
    """The page with little padding, and frequencies without a power of ten between them: `check` reads its axes."""
    require("0.5 %" in page.inner_text("#rows"), f"{name}: padding is not said to a half percent")


def use_odd(page: Page, name: str) -> None:
    """The page of a run with markup in its name, losses that are not finite and neither evaluation nor run.json."""
    require(ODD in page.inner_text("#name"), f"{name}: the name is {page.inner_text('#name')!r}")
    require("skipped 2 steps" in page.inner_text("#warnings"), f"{name}: skipped steps are not shown")
    for hidden in ("#h-predictions", "#choose", "#evaluations", "#events"):
        require(not page.locator(hidden).is_visible(), f"{name}: {hidden} is shown")


def use_runs(page: Page, name: str) -> None:
    """The controls of the page of runs."""
    charts = page.locator("#charts")

    def has_effect(act: Callable[[], object], shown: Callable[[], str], what: str) -> None:
        before = shown()
        act()
        require(shown() != before, f"{name}: {what} has no effect")

    for field in ("x", "part", "more"):
        choices_differ(page, f"#axes [name={field}]", charts, name)
    for box in page.locator("#choose input").all():
        has_effect(box.uncheck, charts.inner_html, "leaving out a run")
        has_effect(box.check, charts.inner_html, "taking a run again")
    for summary in page.locator("#events summary, #evaluations summary").all():
        rows = summary.locator("xpath=..").locator("tbody tr").first
        summary.click()
        require(rows.is_visible(), f"{name}: {summary.inner_text()} stays hidden")
        summary.click()
    moment, at = page.locator("#moment"), page.locator("#when [name=at]")
    at.focus()
    has_effect(lambda: page.keyboard.press("Home"), moment.inner_text, "Home in the evaluations")
    has_effect(lambda: page.keyboard.press("ArrowRight"), moment.inner_text, "an arrow key in the evaluations")
    predictions = page.locator("#predictions")
    has_effect(lambda: page.select_option("#when [name=run]", index=1), predictions.inner_html, "another run")
    options = page.locator("#options tbody tr")
    has_effect(lambda: page.check("#all"), lambda: str(options.count()), "showing all options")
    page.uncheck("#all")


def check(browser: Browser, path: Path, use: Callable[[Page, str], None], pictures: Path | None) -> None:
    """A page in each width and theme; a picture of each width, light in the wide one and dark in the narrow one."""
    for width in WIDTHS:
        for theme in THEMES:
            name = f"{path.name} at {width}, {theme}"
            with opened(browser, path, width=width, theme=theme) as page:
                is_readable(page, name)
                if pictures and (width, theme) in zip(WIDTHS, THEMES, strict=True):
                    keep(page, pictures / f"{path.stem}-{width}.png")
                keyboard_reaches_all(page, name)
                charts = charts_are_read(page, name)
                axes_tell_values_apart(page, name)
                use(page, name)
                theme_changes(page, name)
                is_readable(page, f"{name}, after its use")
                print(f"{name}: {charts} charts, {path.stat().st_size / 1000:.0f} kB", flush=True)


def keep(page: Page, path: Path) -> None:
    """A picture of the whole page, in few colors."""
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    picture.quantize(PICTURE_COLORS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB", flush=True)


def run(folder: Path, line: str) -> None:
    """A command line in a folder, whose name so is on no page."""
    command = [sys.executable, "-m", *shlex.split(line)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, env=environment)


def make_pages(folder: Path) -> None:
    """Pages of a dataset with duplicates, of two short runs of which one grows, and of odd ones."""
    docstrings.write(folder / "corpus.txt", 2_000_000)
    run(folder, "bertdata train-tokenizer corpus.txt --vocab-size 2000 --out docstrings")
    corpus = folder / "corpus.txt"
    text = corpus.read_text(encoding="utf-8")
    again = "\n\n".join(text.split("\n\n")[:200])
    corpus.write_text(f"{text}\n\n{again}\n\n\u200b\n\nջուր and օդ and [MASK]\n\nհող and ջուր\n", encoding="utf-8")
    run(
        folder,
        "bertdata build corpus.txt --out shards --tokenizer docstrings --validation 0.05 --dedup --sentences line",
    )
    (folder / "grown.toml").write_text("[[phase]]\nshare = 0.4\nlayers = 1\n\n[[phase]]\n", encoding="utf-8")
    often = f"--steps {STEPS} --eval-every {STEPS // 6} --log-every 5 --save-every {STEPS}"
    rows = "--model modernbert-tiny --length 64 --global-batch-size 32"
    for out in ("whole", "grown --config grown.toml"):
        run(folder, f"bertrain pretrain --data shards {rows} {often} --out {out}")
    run(folder, "bertdata inspect shards --html dataset.html")
    run(folder, "bertdata inspect shards --samples packed --length 8192 --html packed.html")
    make_close(folder)
    run(folder, "bertrain plot whole grown --html runs.html")
    odd = folder / ODD
    odd.mkdir()
    losses = [3.0, 2.9, math.nan, math.inf, 2.7, None, 2.5, 2.4, 2.3]
    steps: list[dict[str, Any]] = [
        {"step": number, "loss": loss, "lr": 0.1, "tokens": 64 * number} for number, loss in enumerate(losses, 1)
    ]
    steps[2]["skipped"] = steps[3]["skipped"] = 1
    (odd / "log.jsonl").write_text("\n".join(map(json.dumps, steps)) + '\n{"step": 10, "lo', encoding="utf-8")
    run(folder, f"bertrain plot {shlex.quote(ODD)} --html odd.html")


def make_close(folder: Path) -> None:
    """The page of a dataset with other numbers, which are close together."""
    begin, end = '<script id="data" type="application/json">', "</script>"
    before, rest = (folder / "dataset.html").read_text(encoding="utf-8").split(begin)
    content, rest = rest.split(end, maxsplit=1)
    data = json.loads(content)
    data["rows"] = [
        {"length": 32 << n, "documents": padding, "packed": padding / 9}
        for n, padding in enumerate((0.024, 0.02, 0.01, 0.005))
    ]
    data["tokens"]["ranks"] = [[rank, 70 - 4 * rank] for rank in range(3, 9)]
    changed = json.dumps(data).replace("<", "\\u003c")
    (folder / "close.html").write_text(before + begin + changed + end + rest, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--chromium", default=os.environ.get("CHROMIUM") or shutil.which("chromium"))
    parser.add_argument("--pictures", type=Path, help="directory for pictures of the pages; without it, none are kept")
    options = parser.parse_args()
    require(options.chromium, "no chromium was found; apt-get install chromium, or give --chromium PATH")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary).resolve()
        make_pages(folder)
        browser = playwright.chromium.launch(executable_path=options.chromium)
        check(browser, folder / "dataset.html", use_report, options.pictures)
        check(browser, folder / "packed.html", use_packed, None)
        check(browser, folder / "close.html", use_close, None)
        check(browser, folder / "runs.html", use_runs, options.pictures)
        check(browser, folder / "odd.html", use_odd, None)
        browser.close()


if __name__ == "__main__":
    main()
