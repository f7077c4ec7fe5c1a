"""A trace as one page of HTML, `timeline.html` with its data: it needs no viewer and no network."""

from __future__ import annotations

import html
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any


def page(title: str, events: Sequence[dict[str, Any]], dropped: int) -> str:
    """Return the page of events in Chrome's format; ``dropped``: how many more there were."""
    spans = [e for e in events if e["ph"] == "X"]
    end = max((e["ts"] + e.get("dur", 0.0) for e in events if "ts" in e), default=0.0)
    tasks = sum(e["args"]["tasks"] for e in spans)
    facts = f"{end * 1e-6:.2f} s, {tasks} tasks"
    if dropped:
        facts += f"; {dropped} events had no room"
    data = {
        "end": max(end, 1.0),
        "rows": [e["args"]["name"] for e in events if e.get("name") == "thread_name"],
        "spans": [[e["tid"], e["ts"], e["dur"], e["name"], e["args"]["tasks"]] for e in spans],
        "moments": [
            [e["tid"] if e["s"] == "t" else -1, e["ts"], e["name"]]
            for e in events
            if e["ph"] == "i"
        ],
    }
    # Escape it, since "</script>" in the name of a task would end the data.
    text = json.dumps(data).replace("<", "\\u003c")
    template = importlib.resources.files(__package__).joinpath("timeline.html")
    return (
        template.read_text(encoding="utf-8")
        .replace("@TITLE@", html.escape(title))
        .replace("@FACTS@", html.escape(facts))
        .replace("@DATA@", text)
    )
