"""A trace as one page of HTML: it needs neither a viewer nor the network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any


def page(title: str, events: Sequence[dict[str, Any]], dropped: int) -> str:
    """Return the page.

    Args:
        title: of the page.
        events: in Chrome's trace event format; ``tid`` is the number of a worker.
        dropped: events that had no room in the trace.
    """
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
    # "</script>" in the name of a task would end the data.
    text = json.dumps(data).replace("<", "\\u003c")
    return (
        _PAGE.replace("@TITLE@", html.escape(title))
        .replace("@FACTS@", html.escape(facts))
        .replace("@DATA@", text)
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>@TITLE@</title>
<style>
  :root { color-scheme: light dark; --ink: #222; --page: #fff; --line: #ddd; }
  @media (prefers-color-scheme: dark) { :root { --ink: #ddd; --page: #1b1b1b; --line: #444; } }
  body { font: 14px system-ui, sans-serif; color: var(--ink); background: var(--page);
         margin: 16px; }
  h1 { font-size: 18px; margin: 0; }
  p { margin: 4px 0 12px; }
  canvas { width: 100%; display: block; cursor: grab; }
  #tip { position: fixed; display: none; max-width: 60ch; padding: 4px 8px; pointer-events: none;
         color: var(--ink); background: var(--page); border: 1px solid var(--line); }
</style>
<h1>@TITLE@</h1>
<p>@FACTS@. Wheel: zoom. Drag: move. Double click: all of it.</p>
<canvas></canvas>
<div id="tip"></div>
<script id="data" type="application/json">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.querySelector("canvas"), tip = document.getElementById("tip");
const LEFT = 90, TOP = 24, ROW = 26, BAR = 18;
let from = 0, to = data.end, drag = null;

function colour(name) {
  let hash = 0;
  for (const letter of name.replace(/\\d+|and .* more/g, "")) {  // one colour for a function
    hash = (hash * 31 + letter.codePointAt(0)) % 360;
  }
  return `hsl(${hash} 55% 55%)`;
}
function width() { return canvas.clientWidth - LEFT; }
function x(time) { return LEFT + (time - from) / (to - from) * width(); }
function time(x) { return from + (x - LEFT) / width() * (to - from); }
function written(micros) {
  if (micros === 0) return "0";
  const [unit, size] = micros >= 1e6 ? ["s", 1e6] : micros >= 1e3 ? ["ms", 1e3] : ["us", 1];
  return Number((micros / size).toPrecision(4)) + " " + unit;
}
function draw() {
  const scale = window.devicePixelRatio || 1;
  const height = TOP + ROW * data.rows.length + 8;
  canvas.style.height = height + "px";
  canvas.width = canvas.clientWidth * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink"), line = style.getPropertyValue("--line");
  pen.scale(scale, scale);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  let step = 10 ** Math.floor(Math.log10((to - from) / 5));
  while ((to - from) / step > 8) step *= step.toExponential()[0] === "2" ? 2.5 : 2;
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
    pen.fillStyle = line;
    pen.fillRect(x(at), TOP - 6, 1, height);
    pen.fillStyle = ink;
    const text = written(at), room = canvas.clientWidth - x(at) - 3;
    if (pen.measureText(text).width < room) pen.fillText(text, x(at) + 3, TOP - 14);
  }
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, width(), height);
  pen.clip();
  for (const [row, start, length, name] of data.spans) {
    if (start > to || start + length < from) continue;
    pen.fillStyle = colour(name);
    pen.fillRect(x(start), TOP + ROW * row + 4, Math.max(1, x(start + length) - x(start) - 1), BAR);
  }
  pen.fillStyle = "#d22";
  for (const [row, at] of data.moments) {
    const top = row < 0 ? TOP : TOP + ROW * row, tall = row < 0 ? height : ROW;
    pen.fillRect(x(at) - 1, top, 2, tall);
  }
  pen.restore();
  pen.fillStyle = ink;
  data.rows.forEach((name, row) => pen.fillText(name, 0, TOP + ROW * row + ROW / 2));
}
function under(event) {
  const box = canvas.getBoundingClientRect();
  const at = event.clientX - box.left, row = Math.floor((event.clientY - box.top - TOP) / ROW);
  for (const [where, when, what] of data.moments) {
    if ((where < 0 || where === row) && Math.abs(x(when) - at) < 4) return what;
  }
  for (const [where, start, length, name, tasks] of data.spans) {
    if (where === row && x(start) - 1 <= at && at <= Math.max(x(start + length), x(start) + 2)) {
      const many = tasks === 1 ? "" : `, ${tasks} tasks`;
      return `${name}: ${written(length)} from ${written(start)}${many}`;
    }
  }
  return "";
}
function show(start, stop) {
  const span = Math.min(Math.max(stop - start, 1), data.end);
  from = Math.min(Math.max(0, start), data.end - span);
  to = from + span;
  draw();
}
canvas.addEventListener("wheel", event => {
  event.preventDefault();
  const at = time(event.clientX - canvas.getBoundingClientRect().left);
  const factor = event.deltaY > 0 ? 1.25 : 0.8;
  show(at - (at - from) * factor, at + (to - at) * factor);
}, { passive: false });
canvas.addEventListener("pointerdown", event => {
  drag = [event.clientX, from, to];
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointerup", () => { drag = null; });
canvas.addEventListener("pointermove", event => {
  if (drag) {
    const moved = (event.clientX - drag[0]) / width() * (drag[2] - drag[1]);
    show(drag[1] - moved, drag[2] - moved);
  }
  const text = under(event);
  tip.textContent = text;
  tip.style.display = text ? "block" : "none";
  tip.style.left = Math.min(event.clientX + 12, window.innerWidth - 320) + "px";
  tip.style.top = event.clientY + 16 + "px";
});
canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
canvas.addEventListener("dblclick", () => show(0, data.end));
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
</script>
</html>
"""
