// The table of shapes: sorted, filtered, and only the rows in sight are in the page.
const ROW = 33, BEYOND = 12, MOST_PRINTED = 400;
const STATES = ["tuned", "skipped", "failed", "running", "pending"];

const ratio = (a, b) => (a && b ? a / b : null);
const fields = [];
function setFields() {
  fields.length = 0;
  const has = (test) => doc.shapes.some(test);
  const add = (name, value, more) => fields.push({ name, value, ...more });
  add("#", (r) => get(r, "id"), { num: true, title: "Number in the shapes file" });
  doc.columns.key.forEach((name, i) => {
    const text = doc.shapes.some((r) => typeof get(r, "key")[i] === "string");
    add(name, (r) => get(r, "key")[i], { num: !text });
  });
  add("State", (r) => get(r, "state"), { show: (r) => stateCell(get(r, "state")) });
  add("Backend", (r) => get(r, "backend"), { show: (r) => backendCell(get(r, "backend")) });
  add("Kernel", (r) => get(r, "kernel") || get(r, "reason"), { kind: "kernel", show: (r) => get(r, "kernel") || why(r) });
  add("µs", (r) => get(r, "us"), { num: true, alias: "us" });
  add("TFLOPS", (r) => get(r, "tflops"), { num: true });
  if (doc.roof) add("Of roof", (r) => get(r, "share"), { num: true, alias: "roof", format: percent });
  add("Spread", (r) => get(r, "spread"), { num: true, format: percent, title: "Half the interquartile range over the median" });
  add("vs median", (r) => ratio(get(r, "median_us"), get(r, "us")), { num: true, alias: "median", format: times, title: "The median candidate's time over the winner's; below 1 the winner is noisy: measured again, it was slower" });
  if (has((r) => get(r, "old_us"))) {
    add("vs table", (r) => ratio(get(r, "old_us"), get(r, "us")), { num: true, alias: "table", format: times, title: "The previous table's time over the winner's" });
  }
  add("Tried", (r) => get(r, "candidates"), { num: true, title: "Candidates measured or refused" });
  add("Where", (r) => (get(r, "node") ? get(r, "node") + "/" + get(r, "slot") : ""));
}
const why = (r) => [get(r, "reason"), get(r, "detail")].filter((t) => t).join(": ");
const stateCell = (s) => el("span", { class: "state" }, el("span", { class: "dot back k-" + s }), s);
const backendCell = (b) => (b ? el("span", { class: "state" }, el("span", { class: "dot back k" + mark(b) }), label(b)) : "");

const table = {
  sort: { by: "#", down: false }, state: "all", backend: "", words: "", rows: [], body: null, first: -1, last: -1, printing: false,

  build() {
    setFields();
    const head = el("tr", null, fields.map((f) => el("th", { scope: "col", class: f.num ? "num" : null, title: f.title, "aria-sort": "none" },
      el("button", { type: "button", "data-field": f.name, onclick: () => table.sortBy(f.name) }, f.name))));
    this.body = el("tbody");
    const grid = $("grid");
    fill(grid, el("table", { "aria-rowcount": doc.shapes.length + 1 }, el("thead", null, head), this.body));
    if (!this.wired) {
      this.wired = true;
      grid.addEventListener("scroll", () => requestAnimationFrame(() => this.paint()), { passive: true });
      new ResizeObserver(() => this.paint()).observe(grid);
      grid.addEventListener("click", (e) => {
        const row = e.target.closest("tr[data-id]");
        if (row && !getSelection().toString()) this.open(Number(row.dataset.id));
      });
      let later = 0;
      $("filter").addEventListener("input", () => {
        clearTimeout(later);
        later = setTimeout(() => { this.words = $("filter").value; this.refresh(true); }, 80);
      });
      $("backend").addEventListener("change", () => { this.backend = $("backend").value; this.refresh(true); });
    }
    this.refresh(false);
  },

  sortBy(name) {
    const same = this.sort.by === name;
    const field = fields.find((f) => f.name === name);
    this.sort = { by: name, down: same ? !this.sort.down : Boolean(field.num) && name !== "#" && !doc.columns.key.includes(name) && name !== "µs" };
    this.refresh(true);
  },

  refresh(top) {
    const test = parse(this.words);
    const field = fields.find((f) => f.name === this.sort.by) || fields[0];
    const sign = this.sort.down ? -1 : 1;
    this.rows = doc.shapes.filter((r) => (this.state === "all" || get(r, "state") === this.state)
      && (!this.backend || get(r, "backend") === this.backend) && test(r));
    const keys = new Map(this.rows.map((r) => [r, field.value(r)]));
    const none = (v) => v === null || v === undefined || v === "";
    this.rows.sort((a, b) => {
      const x = keys.get(a), y = keys.get(b);
      if (none(x) || none(y)) return none(x) - none(y) || get(a, "id") - get(b, "id");
      const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
      return order * sign || get(a, "id") - get(b, "id");
    });
    $("grid").querySelectorAll("th").forEach((th, i) => {
      th.setAttribute("aria-sort", fields[i] === field ? (this.sort.down ? "descending" : "ascending") : "none");
    });
    this.controls();
    $("count").textContent = this.rows.length === doc.shapes.length ? count(doc.shapes.length) + (doc.shapes.length === 1 ? " shape" : " shapes")
      : count(this.rows.length) + " of " + count(doc.shapes.length) + " shapes";
    if (top) $("grid").scrollTop = 0;
    this.first = -1;
    this.paint();
  },

  controls() {
    const by = {};
    for (const r of doc.shapes) by[get(r, "state")] = (by[get(r, "state")] || 0) + 1;
    const chips = [["all", doc.shapes.length], ...STATES.filter((s) => by[s]).map((s) => [s, by[s]])];
    const focused = document.activeElement && document.activeElement.dataset.chip;
    fill($("states"), chips.map(([s, n]) => el("button", { type: "button", "data-chip": s, "aria-pressed": String(this.state === s),
      onclick: () => { this.state = s; this.refresh(true); } }, s + " " + count(n))));
    if (focused) $("states").querySelector('[data-chip="' + focused + '"]')?.focus();
    const wanted = ["", ...doc.backends.map((b) => b.name)].join("\n");
    if (this.offered !== wanted) {
      this.offered = wanted;
      fill($("backend"), el("option", { value: "" }, "all"), doc.backends.map((b) => el("option", { value: b.name }, b.label)));
      $("backend").value = this.backend;
    }
  },

  paint() {
    const grid = $("grid"), n = this.rows.length;
    if (!n) {
      this.first = -1;
      const text = doc.shapes.length ? "No shape fits this filter." : "No shapes were requested.";
      fill(this.body, el("tr", { class: "filler" }, el("td", { colspan: fields.length }, el("p", { class: "empty" }, text))));
      return;
    }
    let first = Math.max(0, Math.floor(grid.scrollTop / ROW) - BEYOND);
    let last = Math.min(n, Math.ceil((grid.scrollTop + grid.clientHeight) / ROW) + BEYOND);
    if (this.printing) { first = 0; last = Math.min(n, MOST_PRINTED); }
    if (first === this.first && last === this.last) return;
    const held = document.activeElement && document.activeElement.dataset.row;
    this.first = first; this.last = last;
    const filler = (rows) => (rows > 0 && !this.printing ? el("tr", { class: "filler", "aria-hidden": "true" }, el("td", { colspan: fields.length, "height-px": rows * ROW })) : null);
    const rows = this.rows.slice(first, last).map((r, i) => this.row(r, first + i));
    fill(this.body, filler(first), rows, filler(n - last));
    if (held) this.body.querySelector('[data-row="' + held + '"]')?.focus({ preventScroll: true });
    $("table-note").textContent = this.printing && last < n ? "The first " + count(last) + " of " + count(n) + " rows; the page itself has them all." : leftOut();
  },

  row(r, i) {
    const id = get(r, "id");
    return el("tr", { "data-id": id, "aria-rowindex": i + 2, class: this.changed && this.changed.has(id) ? "changed" : null }, fields.map((f, j) => {
      if (!j) return el("td", { class: "num" }, el("button", { type: "button", class: "row", "data-row": id, "aria-label": "Details of shape " + shapeName(r) }, String(id)));
      const value = f.value(r);
      const shown = f.show ? f.show(r) : f.format ? f.format(value) : f.num && typeof value === "number" ? (Number.isInteger(value) && f.name !== "µs" && f.name !== "TFLOPS" ? String(value) : fmt(value)) : value ?? "";
      const failed = f.kind === "kernel" && !get(r, "kernel") && get(r, "reason");
      return el("td", { class: [f.num ? "num" : "", f.kind || "", failed ? "why" : ""].join(" ").trim() || null, title: f.kind === "kernel" ? String(shown) : null }, shown);
    }));
  },

  open(id) {
    const r = doc.shapes.find((row) => get(row, "id") === id);
    if (r) showDetails(r);
  },
};

const leftOut = () => (doc.left_out ? count(doc.left_out) + " more shapes were left out to keep the page small; the run's CSV files have all." : "");

// Words must all occur in a row; NAME=5, NAME>5 and NAME<5 compare a column.
function parse(words) {
  const tests = words.trim().split(/\s+/).filter((w) => w).map((word) => {
    const m = /^([^=<>]+)(<=|>=|=|<|>)(-?[\d.]+)%?$/.exec(word);
    const name = m && m[1].toLowerCase();
    const field = m && fields.find((f) => f.name.toLowerCase() === name || f.alias === name);
    if (field) {
      const number = Number(m[3]) / (field.format === percent ? 100 : 1);
      const compare = { "=": (v) => v === number, "<": (v) => v < number, ">": (v) => v > number, "<=": (v) => v <= number, ">=": (v) => v >= number }[m[2]];
      return (r) => { const v = field.value(r); return typeof v === "number" && compare(v); };
    }
    const text = word.toLowerCase();
    return (r) => haystack(r).includes(text);
  });
  return (r) => tests.every((test) => test(r));
}
let hay = new WeakMap();
function haystack(r) {
  let text = hay.get(r);
  if (text === undefined) {
    text = [shapeName(r), ...get(r, "key"), get(r, "state"), get(r, "backend"), label(get(r, "backend")), get(r, "kernel"), get(r, "node") + "/" + get(r, "slot"), get(r, "reason"), get(r, "detail")].join(" ").toLowerCase();
    hay.set(r, text);
  }
  return text;
}

function showDetails(r) {
  const box = $("details"), close = () => box.close();
  const best = get(r, "best"), most = Math.max(...best.map((v) => v || 0), 0);
  const pairs = [
    ...doc.columns.key.map((name, i) => [name, get(r, "key")[i]]),
    ["kernel", get(r, "kernel")], ["time", get(r, "us") && fmt(get(r, "us")) + " µs"], ["rate", get(r, "tflops") && fmt(get(r, "tflops")) + " TFLOPS"],
    ["bandwidth", get(r, "bw") && fmt(get(r, "bw")) + " GB/s"], ["of the roof", percent(get(r, "share"))], ["spread", percent(get(r, "spread"))],
    ["runner-up", get(r, "runner_up_us") && fmt(get(r, "runner_up_us")) + " µs"], ["median candidate", get(r, "median_us") && fmt(get(r, "median_us")) + " µs"],
    ["previous table", get(r, "old_us") && fmt(get(r, "old_us")) + " µs"], ["candidates", get(r, "candidates") && count(get(r, "candidates"))],
    ["where", get(r, "node") && get(r, "node") + " slot " + get(r, "slot")], ["attempt", get(r, "attempt")], ["reason", get(r, "reason")], ["detail", get(r, "detail")],
  ].filter(([, v]) => v !== null && v !== "" && v !== undefined && v !== 0);
  const bars = doc.backends.map((b, i) => [b, best[i]]).filter(([, v]) => v).sort((a, b) => b[1] - a[1]);
  fill(box,
    el("button", { type: "button", class: "quiet close", onclick: close }, "Close"),
    el("h2", { id: "details-title" }, shapeName(r), el("span", { class: "pill", "data-state": get(r, "state") }, get(r, "state"))),
    bars.length ? el("div", { class: "bars" }, bars.map(([b, v]) => [el("span", null, b.label),
      el("span", { class: "rail" }, el("span", { class: "back k" + mark(b.name), "width%": (100 * v) / most })), el("span", { class: "num" }, fmt(v) + " TFLOPS")])) : null,
    el("dl", { class: "pairs" }, pairs.map(([k, v]) => [el("dt", null, k), el("dd", { class: k === "kernel" ? "mono" : null }, String(v))])),
    el("p", { class: "dim small" }, "Its story: ", el("code", null, doc.program + " explain " + doc.name + " " + shapeName(r))));
  if (!box.open) box.showModal();
}
$("details").addEventListener("click", (e) => { if (e.target === $("details")) $("details").close(); });
