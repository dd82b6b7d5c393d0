"""The page without a server. Input: a server's explorer. Output: a folder with the page and its answers as one file.

`data.json` holds the summary, the map of blocks, every block and the most used states; the page asks it instead of a
server when it is there.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlhmm.data.atomic_io import write_atomically

if TYPE_CHECKING:
    from vlhmm.server.app import Server


def export_page(server: "Server", folder: str | Path, num_states: int) -> int:
    """Write the page and its data; return how many files."""
    from vlhmm.server.app import PAGE, PAGE_FILES

    explorer, folder = server.explorer, Path(folder)
    usage = explorer.inspector.usage
    states = [int(state) for state in usage.argsort(descending=True)[:num_states] if float(usage[state]) > 0]
    block_map = explorer.block_map
    data: dict[str, Any] = {
        "model": server.name,
        "summary": explorer.summary(20),
        "map": block_map,
        "states": {str(state): explorer.state(state) for state in states},
        "blocks": {str(entry["block"]): explorer.block(entry["block"]) for entry in block_map["blocks"]},
    }
    for name in PAGE_FILES:
        content = (PAGE / name).read_bytes()
        if name == "index.html":
            content = content.replace(b'data-export=""', b'data-export="data.json"')
        write_atomically(folder / name, content)
    write_atomically(folder / "data.json", json.dumps(data, separators=(",", ":")).encode())
    return len(PAGE_FILES) + 1
