"""Export the page for use without a server. Input: an explorer. Output: a folder for any web server, or local files.

`data.js` contains the map of blocks, every block and the most used states. The page reads it instead of the routes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlhmm.data.atomic_io import write_atomically

if TYPE_CHECKING:
    from vlhmm.server.app import Server


def export_page(
    server: "Server", folder: str | Path, num_states: int, progress: Callable[[int, int], None] | None = None
) -> int:
    """Write the page and its data, and return the number of files. `progress` is called with (done, total)."""
    from vlhmm.server.app import PAGE, PAGE_FILES

    explorer, folder = server.explorer, Path(folder)
    usage = explorer.inspector.usage
    states = [int(state) for state in usage.argsort(descending=True)[:num_states] if float(usage[state]) > 0]
    block_map = explorer.block_map
    blocks = [entry["block"] for entry in block_map["blocks"]]
    data: dict[str, Any] = {"model": server.card(), "map": block_map, "states": {}, "blocks": {}}
    for kind, numbers, answer in (("states", states, explorer.state), ("blocks", blocks, explorer.block)):
        for number in numbers:
            data[kind][str(number)] = answer(number)
            if progress is not None:
                progress(len(data["states"]) + len(data["blocks"]), len(states) + len(blocks))
    for name in PAGE_FILES:
        content = (PAGE / name).read_bytes()
        if name == "index.html":
            content = content.replace(b"<!-- data -->", b'<script defer src="data.js"></script>')
        write_atomically(folder / name, content)
    written = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    write_atomically(folder / "data.js", f"window.VLHMM_DATA = {written};\n".encode())
    return len(PAGE_FILES) + 1
