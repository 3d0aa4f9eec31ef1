// Puts the page together, keeps it true for a run that goes on, and makes it fit for paper.
const root = document.documentElement;
const PARTS = [
  [["sentences", "counts", "state", "eta_s", "made"], drawSummary], [["shapes", "backends", "roof"], drawBackends], [["shapes", "roof"], drawRoofline],
  [["shapes", "earlier"], drawGain], [["noise"], drawNoise], [["gpus"], drawGpus], [["fleet"], drawFleet], [["failures", "incidents", "state"], drawFailures], [["origin", "columns"], drawOrigin],
];

const THEMES = ["auto", "light", "dark"];
function setTheme(name) {
  if (name === "auto") delete root.dataset.theme; else root.dataset.theme = name;
  const button = $("theme");
  button.textContent = name[0].toUpperCase() + name.slice(1);
  button.setAttribute("aria-label", "Colours: " + (name === "auto" ? "as the system has them" : name));
}
let theme = "auto";
try { theme = localStorage.getItem("gemmfleet-theme") || "auto"; } catch { /* a page from a file may keep nothing */ }
setTheme(THEMES.includes(theme) ? theme : "auto");
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  setTheme(theme);
  try { localStorage.setItem("gemmfleet-theme", theme); } catch { /* the same */ }
});

drawSummary();
table.build();
$("table-note").textContent = leftOut();
root.dataset.table = String(Math.round(performance.now()));
for (const [, draw] of PARTS.slice(1)) draw();
root.dataset.ready = String(Math.round(performance.now()));

// Live: the server sends the parts that changed, and of the table the rows.
function take(change) {
  if (change.full) doc = change.full;
  else {
    Object.assign(doc, change.parts);
    table.changed = new Set();
    for (const [i, row] of change.rows) { doc.shapes[i] = row; table.changed.add(get(row, "id")); }
  }
  named();
  const parts = new Set(change.full ? Object.keys(doc) : Object.keys(change.parts));
  if (change.full || change.rows.length) parts.add("shapes");
  if (parts.has("shapes") || parts.has("backends") || parts.has("columns")) {
    const names = fields.map((f) => f.name).join();
    setFields();
    if (names !== fields.map((f) => f.name).join()) table.build(); else table.refresh(false);
  }
  for (const [needs, draw] of PARTS) if (needs.some((name) => parts.has(name))) draw();
  clearTimeout(take.later);
  take.later = setTimeout(() => { table.changed = null; }, 1600);
  root.dataset.changes = String(Number(root.dataset.changes || 0) + 1);
}
function say(at, text) {
  const light = $("live");
  light.hidden = false;
  light.dataset.at = at;
  if (light.textContent !== text) light.textContent = text;
}
if (root.dataset.events) {
  const source = new EventSource(root.dataset.events);
  const well = () => say(doc.going ? "on" : "over", doc.going ? "live" : "the run is " + doc.state);
  source.addEventListener("open", well);
  source.addEventListener("change", (e) => { take(JSON.parse(e.data)); well(); });
  source.addEventListener("error", () => say("off", source.readyState === EventSource.CLOSED ? "the server has ended" : "no connection, trying again"));
}

let closed = [];
addEventListener("beforeprint", () => {
  table.printing = true;
  table.first = -1;
  table.paint();
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((d) => { d.open = true; });
});
addEventListener("afterprint", () => {
  table.printing = false;
  table.first = -1;
  table.paint();
  closed.forEach((d) => { d.open = false; });
});
