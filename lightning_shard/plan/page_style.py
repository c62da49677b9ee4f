"""How the page of a plan looks, by day and by night."""

STYLE = """
:root { color-scheme: light dark; --back: #fbfbfd; --card: #fff; --ink: #1c2330; --soft: #5d6778; --line: #e2e5ec;
  --track: #f0f2f6; --accent: #1f6feb; --good: #1a7f47; --good-back: #e6f5ec; --bad: #b3372b; --bad-back: #fceceb;
  --limit: #d0342c; --idle: #eceff4;
  --parameters: #3a6fd8; --gradients: #e08a2e; --master: #7a5cc4; --optimizer: #b0a2e0; --activations: #2b9d8f;
  --gathered: #8fbcf0; --buffers: #9aa3b2; --temporaries: #d2d7e0; --payload: #a9c5f2; --sent: #3a6fd8;
  --F: #4c86e8; --F2: #2f64bd; --I: #2fa58f; --I2: #1f7d6c; --W: #eda13c; --W2: #c9801c; --on: #fff; }
@media (prefers-color-scheme: dark) { :root { --back: #10141b; --card: #181e27; --ink: #e6eaf1; --soft: #97a2b4;
  --line: #2a323f; --track: #222a36; --accent: #6ea8ff; --good: #5dd39a; --good-back: #16301f; --bad: #ff8d82;
  --bad-back: #381b1a; --limit: #ff6b60; --idle: #232b37;
  --parameters: #5b8df0; --gradients: #e39a4a; --master: #8f74da; --optimizer: #655a94; --activations: #3fb5a6;
  --gathered: #38608f; --buffers: #6d7788; --temporaries: #424c5b; --payload: #36527e; --sent: #6ea0f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 20px 56px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 10px; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 0 0 2px; } h3 { font-size: 15px; margin: 0; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px 22px;
  margin-top: 18px; }
ul { margin: 0; } .facts, .legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 6px 16px; }
.facts { gap: 8px; } .facts li { background: var(--track); border-radius: 99px; padding: 2px 12px; font-size: 13px; }
.verdict { margin: 16px 0 0; padding: 12px 16px; border-radius: 10px; }
.verdict.yes { background: var(--good-back); border-left: 4px solid var(--good); }
.verdict.no { background: var(--bad-back); border-left: 4px solid var(--bad); }
.caption { margin: 0 0 12px; color: var(--soft); font-size: 13px; }
.legend { margin: 0 0 12px; font-size: 13px; color: var(--soft); }
.legend li { display: flex; align-items: center; gap: 6px; }
.legend i { width: 12px; height: 12px; border-radius: 3px; }
.legend u { width: 0; height: 14px; border-left: 2px dashed var(--limit); }
.row { display: grid; grid-template-columns: minmax(170px, 24%) 1fr minmax(170px, 18%); gap: 14px;
  align-items: center; padding: 3px 8px; border-radius: 7px; }
.row.chosen { background: var(--good-back); } .row.not .name, .row.not .words { color: var(--bad); }
.name { font-weight: 550; overflow-wrap: anywhere; } .chosen .name::after { content: " \\2713"; color: var(--good); }
.words { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
small { color: var(--soft); font-size: 12px; font-weight: 400; } th small { display: block; }
.bar { position: relative; display: flex; height: 20px; background: var(--track); border-radius: 4px; }
.bar > i { height: 100%; } .bar > i:first-child { border-radius: 4px 0 0 4px; }
.bar u { position: absolute; top: -5px; bottom: -5px; border-left: 2px dashed var(--limit); }
.beyond { position: absolute; right: 6px; line-height: 20px; color: var(--on); }
.pair { display: flex; flex-direction: column; gap: 2px; width: 100%; }
.pair i { height: 9px; border-radius: 3px; min-width: 1px; }
.parameters { background: var(--parameters); } .gradients { background: var(--gradients); }
.master { background: var(--master); } .optimizer { background: var(--optimizer); }
.activations { background: var(--activations); } .gathered { background: var(--gathered); }
.buffers { background: var(--buffers); } .temporaries { background: var(--temporaries); }
.compute { background: var(--parameters); } .exposed_communication { background: var(--gradients); }
.bubble { background: var(--buffers); }
.payload { background: var(--payload); } .sent { background: var(--sent); }
i.F { background: var(--F); } i.I { background: var(--I); } i.W { background: var(--W); }
i.idle { background: var(--idle); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 8px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { color: var(--soft); font-weight: 550; } th:first-child, .why, th:last-child { text-align: left; }
.why { white-space: normal; min-width: 200px; color: var(--soft); } tr.chosen { background: var(--good-back); }
.schedule { margin-top: 14px; } .schedule .caption { margin: 0 0 6px; }
svg { display: block; } svg text { fill: var(--on); font: 10px/1 ui-monospace, "DejaVu Sans Mono", monospace;
  text-anchor: middle; } svg text.rank { fill: var(--soft); text-anchor: end; font-size: 11px; }
path.F { fill: var(--F); } path.F.odd { fill: var(--F2); } path.I { fill: var(--I); } path.I.odd { fill: var(--I2); }
path.W { fill: var(--W); } path.W.odd { fill: var(--W2); } path.idle { fill: var(--idle); }
path.cut { fill: var(--card); }
@media (max-width: 640px) { .row { grid-template-columns: 1fr auto; gap: 2px 14px; padding: 5px 8px; }
  .bar { grid-column: 1 / -1; grid-row: 2; }
  section { padding: 16px 14px; } }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""
"""One style sheet; a class for each kind of bytes and of work."""
