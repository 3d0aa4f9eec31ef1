// Text: the summary, the failures, what happened to nodes, where the numbers come from.
function drawSummary() {
  fill($("sentences"), doc.sentences.map((s) => el("p", null, s)));
  const pill = $("state");
  pill.textContent = doc.state;
  pill.dataset.state = doc.state;
  $("made").textContent = doc.made;
  const c = doc.counts, parts = STATES.map((s) => [s, c[s]]).filter(([s, n]) => n || s === "tuned" || s === "failed");
  const words = parts.map(([s, n]) => count(n) + " " + s).join(", ");
  fill($("stats"),
    c.total ? el("div", { class: "meter", role: "img", "aria-label": words }, parts.filter(([, n]) => n).map(([s, n]) => el("span", { class: "back k-" + s, flex: n + " 1 0" }))) : null,
    el("dl", { class: "figures" }, el("div", null, el("dt", null, "requested"), el("dd", null, count(c.total))),
      parts.map(([s, n]) => el("div", null, el("dt", null, el("span", { class: "dot back k-" + s }), s), el("dd", null, count(n)))),
      doc.eta_s ? el("div", null, el("dt", null, "left"), el("dd", null, lasting(doc.eta_s))) : null));
  document.title = (doc.going ? count(c.tuned + c.skipped + c.failed) + "/" + count(c.total) + " · " : "") + doc.run + " · gemmfleet";
}

const story = (steps) => el("ul", { class: "story" }, steps.map(([t, text]) => el("li", null, el("span", { class: "dim" }, clock(t)), el("span", { class: "text" }, text))));
// A command at the end of a sentence is set apart.
const withCommand = (text) => { const at = text.indexOf(": " + doc.program + " "); return at < 0 ? text : [text.slice(0, at + 2), el("code", null, text.slice(at + 2))]; };
const SHOWN = 12;
const opened = new Set();

function drawFailures() {
  if (!doc.failures.length) {
    fill($("failed"), empty(doc.going ? "No shape has failed so far." : doc.counts.total ? "No shape failed." : "There was nothing to fail."));
  } else {
    fill($("failed"), doc.failures.map((f) => {
      const list = el("div");
      const show = (all) => fill(list, f.shapes.slice(0, all ? undefined : SHOWN).map((s) => failedShape(f, s)),
        !all && f.shapes.length > SHOWN ? el("p", null, el("button", { type: "button", class: "quiet", onclick: () => { opened.add(f.reason); show(true); } }, "Show " + count(f.shapes.length - SHOWN) + " more")) : null,
        f.count > f.shapes.length && (all || f.shapes.length <= SHOWN) ? el("p", { class: "dim small" }, count(f.count - f.shapes.length) + " more are in the table above: filter for " + f.reason) : null);
      show(opened.has(f.reason));
      return el("article", { class: "card" }, el("h3", null, el("span", { class: "pill", "data-state": "failed" }, f.reason), count(f.count) + (f.count === 1 ? " shape: " : " shapes: ") + f.message),
        el("ul", null, f.advice.map((text) => el("li", { class: "text" }, withCommand(text)))), list);
    }));
  }
  const list = doc.incidents;
  fill($("incidents"), list.length ? el("article", { class: "card" }, el("h3", null, "Nodes and slots: what kept them from work"),
    (() => {
      const by = new Map();
      for (const i of list) by.set(i.kind, [...(by.get(i.kind) || []), i]);
      return [...by].map(([kind, items]) => el("details", { open: items.length <= 4 && by.size <= 4 }, el("summary", null, el("span", { class: "dot back k-" + kind }), " ", el("strong", null, (AWAY[kind] || "canary failed") + ", " + (items.length === 1 ? "once" : count(items.length) + " times")), ". ", items[0].advice),
        story(items.map((i) => [i.t, i.text + (i.end === null ? " (to the end)" : i.end > i.t ? " (for " + lasting(i.end - i.t) + ")" : "")]))));
    })()) : null);
}

function failedShape(f, s) {
  const sure = s.verdict ? "" : s.confirmed ? "confirmed" : "unconfirmed";
  const tail = [s.where, s.attempts + (s.attempts === 1 ? " attempt" : " attempts"), sure].filter((x) => x).join(", ");
  return el("details", null, el("summary", null, el("strong", null, s.shape), " ", s.detail || f.message, " ", el("span", { class: "dim" }, "(" + tail + ")")),
    s.story.length ? story(s.story) : null, el("p", { class: "small" }, el("code", null, doc.program + " explain " + doc.name + " " + s.shape)));
}

function drawOrigin() {
  const same = Object.entries(doc.columns.same);
  const sections = same.length ? [...doc.origin, { title: "The same for all shapes", pairs: same }] : doc.origin;
  fill($("provenance"), el("div", { class: "origin" }, sections.map((s) => el("div", null, el("h3", null, s.title),
    el("dl", { class: "pairs" }, s.pairs.map(([k, v]) => [el("dt", null, k), el("dd", null, v)]))))));
}
