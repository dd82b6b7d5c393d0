"""Screenshots of the explorer page. Input: a run. Output: PNG files in docs/explorer/.

    python docs/screenshots.py runs/demo [--out docs/explorer]

Needs playwright and a Chromium (CHROMIUM names it; by default the one on the PATH).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

VIEWS = {
    "read": "read?text=the+state+of+our+union+is+strong+.",
    "inside": "inside?kind=word&of=peace",
    "fill": "fill?template=the+people+of+the+[MASK:1-3]+have+the+right+to+[MASK]+.&must_contain=united",
    "next": "next?context=the+people+of+the+united+",
    "map": "map",
}
SIZES = {"wide": (1280, 900), "phone": (390, 844)}
PICTURES = [("read", "wide", "light"), ("fill", "wide", "dark"), ("map", "wide", "light"), ("read", "phone", "light"),
            ("inside", "phone", "dark")]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run of vlhmm train")
    parser.add_argument("--out", default=str(Path(__file__).parent / "explorer"))
    parser.add_argument("--all", action="store_true", help="every view at both sizes, light and dark")
    parser.add_argument("--full", action="store_true", help="the whole page, not only what fits the window")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "vlhmm", "explore", args.run, "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        if address is None:
            raise SystemExit("the server did not start")
        with sync_playwright() as playwright:
            chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            wanted = PICTURES
            if args.all:
                wanted = [(name, size, theme) for name in VIEWS for size in SIZES for theme in ("light", "dark")]
            for name, size, theme in wanted:
                width, height = SIZES[size]
                page = browser.new_page(
                    viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
                )
                page.goto(f"{address[0]}#{VIEWS[name]}")
                page.locator(".answer[aria-busy=false] > *").first.wait_for(timeout=120_000)
                page.screenshot(path=out / f"{name}-{size}-{theme}.png", full_page=args.full)
                page.close()
            browser.close()
    finally:
        server.terminate()
        server.wait(20)
    print(f"{len(list(out.glob('*.png')))} pictures in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
