"""How the page looks, and its few keys. Pure text.

Both colour schemes follow the reader's system. Nothing here is loaded from elsewhere. Must never be needed to read
the page: it can be read without its script.
"""

from __future__ import annotations

from swift_agent.ctl.timeline.markup import Markup

STYLE = Markup("""
:root {
  color-scheme: light dark;
  --page: #f7f8fa; --card: #ffffff; --ink: #1b2330; --soft: #566072; --line: #d8dde6; --lane: #edf0f4;
  --trains: #2f6fb3; --waits: #f0d9a8; --waits-ink: #a8741a; --starts: #d9d2f0; --starts-ink: #6a4fb8;
  --spare: #c9d0da; --bad: #bf2c2c; --good: #1f7a4d; --band: rgba(191, 44, 44, .13); --focus: #b45309;
  --area: rgba(47, 111, 179, .18);
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2029; --ink: #e6eaf0; --soft: #9aa6b8; --line: #333c4a; --lane: #232b36;
    --trains: #5b9be0; --waits: #57451f; --waits-ink: #e0ad52; --starts: #3a3160; --starts-ink: #b39df2;
    --spare: #46505f; --bad: #ff7a70; --good: #5fd09a; --band: rgba(255, 122, 112, .17); --focus: #f6b04c;
    --area: rgba(91, 155, 224, .22);
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 10px; }
h3 { font-size: 16.5px; margin: 0; overflow-wrap: anywhere; }
h4 { font-size: 13px; margin: 18px 0 4px; color: var(--soft); font-weight: 600; }
p { margin: 4px 0; overflow-wrap: anywhere; }
.soft, .small { color: var(--soft); }
.state { display: inline-block; padding: 1px 9px; border-radius: 10px; border: 1px solid currentColor; font-size: 13px;
  vertical-align: 4px; margin-left: 8px; font-weight: 600; color: var(--soft); }
.state.training, .state.succeeded { color: var(--good); }
.state.failed, .state.recovering, .state.abandoned { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 18px 0 0;
  padding: 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.tiles dt { font-size: 13px; color: var(--soft); }
.tiles dd { margin: 0; font-size: 18px; font-weight: 600; line-height: 1.3; }
.tiles dd small { display: block; font-size: 12.5px; font-weight: 400; color: var(--soft); line-height: 1.4; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 18px;
  margin: 0 0 16px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 0 0 10px;
  font-size: 13px; }
.legend svg { vertical-align: -1px; }
svg { display: block; max-width: 100%; height: auto; font-family: inherit; }
.legend svg { display: inline-block; }
svg.narrow { display: none; }
svg.defs { position: absolute; }
text { fill: var(--ink); font-size: 13px; }
text.small { fill: var(--soft); font-size: 11.5px; }
text.node, tspan.node { font-weight: 600; }
.lane { fill: var(--lane); }
.piece.trains { fill: var(--trains); }
.piece.waits { fill: url(#waits); }
.piece.starts { fill: url(#starts); }
.piece.spare { fill: var(--spare); }
.ground-waits { fill: var(--waits); } .hatch { stroke: var(--waits-ink); stroke-width: 1.4; }
.ground-starts { fill: var(--starts); } .dot { fill: var(--starts-ink); }
.cross { stroke: var(--bad); stroke-width: 2.6; fill: none; stroke-linecap: round; }
.cross.under { stroke: var(--card); stroke-width: 6; }
.band { fill: var(--band); }
.axis { stroke: var(--soft); } .grid { stroke: var(--line); }
.area { fill: var(--area); } .speed { fill: none; stroke: var(--trains); stroke-width: 1.8; stroke-linejoin: round; }
.mark { stroke-width: 1.6; } .mark.failed { stroke: var(--bad); } .mark.resumed { stroke: var(--good); }
text.failed { fill: var(--bad); } text.resumed { fill: var(--good); }
.flag rect { fill: var(--card); stroke: var(--bad); stroke-width: 1.5; }
.flag text { font-size: 11.5px; font-weight: 600; fill: var(--bad); }
.flag:hover rect, .flag:focus rect { fill: var(--bad); } .flag:hover text, .flag:focus text { fill: var(--card); }
.incident { scroll-margin-top: 12px; }
.incident > header { display: flex; gap: 12px; align-items: baseline; }
.number { flex: none; min-width: 26px; text-align: center; border: 1.5px solid var(--bad); color: var(--bad);
  border-radius: 12px;
  font-size: 13px; font-weight: 600; padding: 0 7px; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 3px 16px; margin: 12px 0; }
.facts dd p { margin: 0; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 600; font-size: 13px; color: var(--soft); }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { white-space: nowrap; } td.wide, td.meaning { white-space: normal; }
td.wide { overflow-wrap: anywhere; min-width: 220px; }
td.right, th.right { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.bar { width: 34%; vertical-align: middle; }
td.bar i { display: block; height: 10px; border-radius: 2px; background: var(--starts-ink); }
.total td { border-bottom: 0; font-weight: 600; } .total i { background: var(--bad) !important; }
ul.plain { padding-left: 20px; margin: 4px 0; } ul.plain li { overflow-wrap: anywhere; }
kbd { border: 1px solid var(--line); border-radius: 4px; padding: 0 5px; font: 12.5px ui-monospace, monospace;
  background: var(--card); }
a { color: var(--trains); }
:focus-visible { outline: 3px solid var(--focus); outline-offset: 2px; border-radius: 4px; }
.flag:focus-visible { outline: none; } .flag:focus-visible rect { stroke: var(--focus); stroke-width: 3; }
.skip { position: absolute; left: -999px; } .skip:focus { left: 12px; top: 8px; background: var(--card);
  padding: 4px 10px; }
@media (max-width: 760px) {
  main { padding: 14px 10px 40px; } .card { padding: 12px 9px; }
  svg.wide { display: none; } svg.narrow { display: block; }
  .facts { grid-template-columns: 1fr; gap: 0; } .facts dd { margin-bottom: 7px; }
  .phases .meaning { display: none; }
  h1 { font-size: 21px; }
}
@media print { .keys { display: none; } .card { break-inside: avoid; } }
""")

SCRIPT = Markup("""
(function () {
  "use strict";
  var incidents = Array.prototype.slice.call(document.querySelectorAll(".incident"));
  function at() {
    var here = document.activeElement, index = -1;
    incidents.forEach(function (one, number) {
      var leads = here && here.getAttribute("href") === "#" + one.id;
      if (leads || one.contains(here)) { index = number; }
    });
    return index;
  }
  document.addEventListener("keydown", function (event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !incidents.length) { return; }
    if (document.activeElement && document.activeElement.classList.contains("scroll")) { return; }
    var now = at(), last = incidents.length - 1;
    var to = { ArrowRight: Math.min(now + 1, last), ArrowLeft: Math.max(now - 1, 0) }[event.key];
    if (to === undefined) { return; }
    event.preventDefault();
    incidents[to].focus();
    incidents[to].scrollIntoView({ block: "start" });
  });
}());
""")
