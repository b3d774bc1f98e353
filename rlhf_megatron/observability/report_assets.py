"""Style and script of a report's page."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2430; --faint: #5d6675;
  --line: #d9dde3; --grid: #e6e9ee; --panel: #f6f7f9; --warn: #a33a00; --warn-paper: #fff4ec; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --ink: #e2e5ea; --faint: #9aa3b0;
  --line: #343a44; --grid: #2b3038; --panel: #1c2027; --warn: #ffb380; --warn-paper: #33231a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1320px; padding: 16px 20px 60px; background: var(--paper);
  color: var(--ink); font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 22px; margin: 4px 0 2px; }
h2 { font-size: 18px; margin: 36px 0 10px; border-bottom: 1px solid var(--line);
  padding-bottom: 4px; scroll-margin-top: 44px; }
h3 { font-size: 15px; margin: 0; }
p { margin: 4px 0; }
.faint, figcaption { color: var(--faint); font-size: 13px; }
nav { position: sticky; top: 0; z-index: 5; background: var(--paper); padding: 8px 0;
  border-bottom: 1px solid var(--line); display: flex; gap: 4px 14px; overflow-x: auto;
  white-space: nowrap; font-size: 14px; }
nav a { color: inherit; }
.runs { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0 0; font-weight: 600; }
.dot { display: inline-block; width: 11px; height: 11px; border-radius: 50%; margin-right: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 5px 10px 5px 0;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
th { white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.facts th[scope=row] { width: 175px; color: var(--faint); font-weight: 500; }
.facts.several td { min-width: 190px; }
.split { display: flex; height: 14px; border-radius: 3px; overflow: hidden; margin: 4px 0; }
.warn { background: var(--warn-paper); border-left: 4px solid var(--warn); padding: 8px 12px;
  margin: 12px 0; }
.warn ul, .notes ul { margin: 2px 0; padding-left: 20px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 375px), 1fr));
  gap: 18px 22px; }
figure { margin: 0; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
details { border: 1px solid var(--line); border-radius: 6px; margin: 8px 0; }
summary { cursor: pointer; padding: 9px 12px; font-weight: 600; }
details > div { padding: 0 12px 10px; }
.text { white-space: pre-wrap; font-family: ui-monospace, monospace; font-size: 13px; }
.sample { border-top: 1px solid var(--line); padding: 7px 0; }
.sample .text { padding: 2px 8px; margin-top: 3px; max-height: 260px; overflow-y: auto; }
.sample .response { background: var(--panel); border-radius: 4px; padding: 4px 8px; }
pre { overflow-x: auto; font: 13px/1.4 ui-monospace, monospace; margin: 0; }
@media (max-width: 600px) { body { padding: 10px 12px 50px; }
  .facts.several td { min-width: 160px; }
  .facts.several th[scope=row] { width: 90px; white-space: normal; }
  .facts:not(.several) tr { display: block; border-bottom: 1px solid var(--line);
    padding: 5px 0; }
  .facts:not(.several) th, .facts:not(.several) td { display: block; width: auto; border: 0;
    padding: 0; } }
"""

SCRIPT = """
"use strict";
const errors = [];
function failed(text) {
  errors.push(text);
  document.body.dataset.errors = errors.length;
  const place = document.getElementById("errors");
  place.hidden = false;
  place.append(Object.assign(document.createElement("p"), {textContent: text}));
}
window.addEventListener("error", event => failed("script error: " + event.message));
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
function themed(layout) {
  layout.font.color = color("--ink");
  layout.hoverlabel = {bgcolor: color("--paper"), bordercolor: color("--line"),
    font: {color: color("--ink")}};
  for (const name of Object.keys(layout)) if (/^[xy]axis/.test(name)) {
    Object.assign(layout[name], {gridcolor: color("--grid"), linecolor: color("--line")});
  }
  // A finger that scrolls the page must not zoom a chart.
  if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false;
  return layout;
}
async function drawAll() {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const options = {responsive: true, displayModeBar: false};  // a double click zooms out
  let drawn = 0;
  for (const [id, figure] of Object.entries(figures)) {
    try {
      await Plotly.newPlot(id, figure.data, themed(figure.layout), options);
      drawn += 1;
    } catch (error) {
      failed("chart " + id + ": " + error);
    }
    await new Promise(resolve => setTimeout(resolve));  // lets the page be read meanwhile
  }
  document.body.dataset.drawn = drawn;
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of document.querySelectorAll(".chart"))
    if (chart.layout) Plotly.relayout(chart, themed(chart.layout));
});
drawAll();
"""
