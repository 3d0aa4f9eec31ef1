// TFLOPS by backend, the roofline, and histograms.
const MARKS = [
  (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
  (x, y, r) => `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (x, y, r) => `M${x} ${y - 1.3 * r}l${1.2 * r} ${2.1 * r}h${-2.4 * r}z`,
  (x, y, r) => `M${x} ${y - 1.4 * r}l${1.4 * r} ${1.4 * r}l${-1.4 * r} ${1.4 * r}l${-1.4 * r} ${-1.4 * r}z`,
  (x, y, r) => `M${x} ${y + 1.3 * r}l${1.2 * r} ${-2.1 * r}h${-2.4 * r}z`,
  (x, y, r) => `M${x - r} ${y - 0.35 * r}h${0.65 * r}v${-0.65 * r}h${0.7 * r}v${0.65 * r}h${0.65 * r}v${0.7 * r}h${-0.65 * r}v${0.65 * r}h${-0.7 * r}v${-0.65 * r}h${-0.65 * r}z`,
  (x, y, r) => `M${x - 1.1 * r} ${y - 0.5 * r}h${2.2 * r}v${r}h${-2.2 * r}z`,
  (x, y, r) => `M${x - 0.5 * r} ${y - 1.1 * r}h${r}v${2.2 * r}h${-r}z`,
];
const markPath = (name, x, y, r) => MARKS[mark(name)](Math.round(x * 10) / 10, Math.round(y * 10) / 10, r);
const legend = (entries) => el("ul", { class: "legend" }, entries.map(([kind, text, path]) =>
  el("li", null, path ? sv("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, sv("path", { class: "fill " + kind, d: path })) : el("span", { class: "dot back " + kind }), text)));
const picture = (width, height, name, ...children) => sv("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": name, tabindex: 0 }, ...children);

function drawBackends() {
  const box = $("chart-backends"), all = doc.backends.filter((b) => b.n && b.min > 0);
  if (!all.length) { fill(box, empty("Nothing is measured yet.")); return; }
  chart(box, (width) => {
    const left = 78, right = width < 460 ? 62 : 96, step = Math.max(44, Math.min(64, 280 / all.length)), bottom = 30, height = all.length * step + bottom;
    const x = logScale(Math.min(...all.map((b) => b.min)), Math.max(...all.map((b) => b.max)), left, width - right);
    const won = all.reduce((n, b) => n + b.won, 0);
    const items = all.map((b, i) => ({ x: x(b.median), y: i * step + step / 2, b, lines: () => [b.label,
      count(b.won) + " of " + count(won) + " shapes won; measured on " + count(b.n), "median " + fmt(b.median) + " TFLOPS, quartiles " + fmt(b.q1) + " to " + fmt(b.q3),
      "from " + fmt(b.min) + " to " + fmt(b.max) + (b.geomean ? "; geometric mean " + fmt(b.geomean) : "")] }));
    const svg = picture(width, height, "TFLOPS by backend; arrow keys go from one to the next",
      x.ticks.map((t) => [sv("path", { class: "grid", d: `M${x(t)} 4V${height - bottom}` }), sv("text", { x: x(t), y: height - bottom + 16, "text-anchor": "middle" }, fmt(t, 3))]).flat(),
      items.map(({ b, y }) => sv("g", { class: "k" + mark(b.name) },
        sv("text", { class: "strong", x: 0, y: y + 4 }, b.label),
        sv("path", { class: "line", "stroke-width": 2, d: `M${x(b.min)} ${y}H${x(b.max)}` }),
        sv("path", { class: "line", "stroke-width": 13, "stroke-opacity": 0.55, d: `M${x(b.q1)} ${y}H${Math.max(x(b.q3), x(b.q1) + 1)}` }),
        sv("path", { class: "line", "stroke-width": 4, d: `M${x(b.median)} ${y - 10}v20` }),
        sv("text", { class: "strong", x: width, y: y - 1, "text-anchor": "end" }, count(b.won) + " won"),
        sv("text", { x: width, y: y + 13, "text-anchor": "end" }, won ? percent(b.won / won) : ""))),
      sv("text", { x: (left + width - right) / 2, y: height - 1, "text-anchor": "middle" }, "TFLOPS"));
    pointable(svg, items, { find: (px, py) => (py < all.length * step ? Math.max(0, Math.min(all.length - 1, Math.floor(py / step))) : -1) });
    fill(box, svg);
  });
}

function drawRoofline() {
  const box = $("chart-roofline"), roof = doc.roof;
  const points = doc.shapes.filter((r) => get(r, "tflops") > 0 && get(r, "intensity") > 0).map((r) => ({ r, i: get(r, "intensity"), t: get(r, "tflops") }));
  $("roof-note").textContent = roof
    ? `Each tuned shape, under the ${fmt(roof.tflops, 5)} TFLOPS (${roof.format}) and ${fmt(roof.tbs)} TB/s of the ${roof.device} (${roof.source}). ` + doc.roof_note
    : "Each tuned shape by its intensity. " + doc.roof_note;
  if (!points.length) { fill(box, empty(doc.counts.tuned ? "No tuned shape says how much it moves." : "No shape is tuned yet.")); return; }
  chart(box, (width) => {
    const left = 50, right = 24, top = 12, bottom = 40, height = Math.max(280, Math.min(400, width * 0.7));
    const is = points.map((p) => p.i), ts = points.map((p) => p.t);
    let lowI = Math.min(...is) / 1.5, highI = Math.max(...is) * 1.5, highT = Math.max(...ts) * 1.5;
    if (roof) { const knee = roof.tflops / roof.tbs; highI = Math.max(highI, knee * 1.6); highT = roof.tflops * 1.4; }
    const lowT = Math.min(...ts) / 1.5;
    const x = logScale(lowI, highI, left, width - right), y = logScale(lowT, highT, height - bottom, top);
    const by = new Map();
    for (const p of points) {
      p.x = x(p.i); p.y = y(p.t);
      const name = get(p.r, "backend");
      by.set(name, (by.get(name) || "") + markPath(name, p.x, p.y, points.length > 1500 ? 2.4 : 3.4));
    }
    points.sort((a, b) => a.x - b.x);
    const items = points.map((p) => ({ x: p.x, y: p.y, open: () => showDetails(p.r), lines: () => [shapeName(p.r), label(get(p.r, "backend")) + ", " + fmt(p.t) + " TFLOPS, " + fmt(get(p.r, "us")) + " µs",
      fmt(p.i) + " operations a byte" + (roof ? ", " + percent(get(p.r, "share")) + " of the roof" : ""), get(p.r, "kernel")] }));
    const circle = sv("circle", { class: "ring", r: 7, visibility: "hidden" });
    const svg = picture(width, height, "TFLOPS over operations a byte; arrow keys go from shape to shape, Enter opens one",
      x.ticks.map((t) => [sv("path", { class: "grid", d: `M${x(t)} ${top}V${height - bottom}` }), sv("text", { x: x(t), y: height - bottom + 16, "text-anchor": "middle" }, fmt(t, 3))]).flat(),
      y.ticks.map((t) => [sv("path", { class: "grid", d: `M${left} ${y(t)}H${width - right}` }), sv("text", { x: left - 6, y: y(t) + 4, "text-anchor": "end" }, fmt(t, 3))]).flat(),
      [...by].map(([name, d]) => sv("path", { class: "fill k" + mark(name), d, "fill-opacity": points.length > 1500 ? 0.55 : 0.8 })),
      roof ? sv("path", { class: "roof", d: roofPath(roof, x, y, lowI, highI, lowT) }) : null,
      sv("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "operations a byte"),
      sv("text", { x: -(top + height - bottom) / 2, y: 11, "text-anchor": "middle", transform: "rotate(-90)" }, "TFLOPS"), circle);
    pointable(svg, items, { ring: (item) => {
      circle.setAttribute("visibility", item ? "visible" : "hidden");
      if (item) { circle.setAttribute("cx", item.x); circle.setAttribute("cy", item.y); }
    } });
    fill(box, svg, legend([...by.keys()].map((name) => ["k" + mark(name), label(name), markPath(name, 7, 7, 4.2)])));
  });
}

function roofPath(roof, x, y, lowI, highI, lowT) {
  const knee = roof.tflops / roof.tbs, start = Math.max(lowI, lowT / roof.tbs);
  return `M${x(start)} ${y(start * roof.tbs)}L${x(knee)} ${y(roof.tflops)}H${x(highI)}`;
}

// Bars of {n, text, kind, lines}; texts stand between the bars where `edges`.
function drawBars(box, bars, name) {
  if (!bars.some((b) => b.n)) return false;
  chart(box, (width) => {
    const height = 190, bottom = 34, top = 18, step = width / bars.length, most = Math.max(...bars.map((b) => b.n));
    const y = (n) => (n ? Math.min(height - bottom - 2, height - bottom - (n / most) * (height - bottom - top)) : height - bottom);
    const items = bars.map((b, i) => ({ x: (i + 0.5) * step, y: y(b.n), lines: () => b.lines }));
    const svg = picture(width, height, name + "; arrow keys go from bar to bar",
      sv("path", { class: "axis", d: `M0 ${height - bottom}H${width}` }),
      bars.map((b, i) => sv("g", { class: "k-" + b.kind },
        sv("path", { class: "fill", d: `M${i * step + 2} ${height - bottom}V${y(b.n)}H${(i + 1) * step - 2}V${height - bottom}z` }),
        b.n ? sv("text", { class: "strong", x: (i + 0.5) * step, y: y(b.n) - 5, "text-anchor": "middle" }, count(b.n)) : null,
        sv("text", { x: (i + 0.5) * step, y: height - bottom + (i % 2 && step < 44 ? 29 : 16), "text-anchor": "middle" }, b.text))));
    pointable(svg, items, { find: (px) => Math.max(0, Math.min(bars.length - 1, Math.floor(px / step))) });
    fill(box, svg);
  });
  return true;
}

const GAINS = [0, 0.9, 0.97, 1.03, 1.1, 1.25, 1.5, 2, 3, Infinity];
function gainBars(ratios) {
  return GAINS.slice(1).map((high, i) => {
    const low = GAINS[i], n = ratios.filter((g) => g >= low && g < high).length;
    const range = !low ? "slower than " + times(high) : isFinite(high) ? times(low) + " to " + times(high) : times(low) + " and more";
    const text = !low ? "<" + high : isFinite(high) ? String(low) : low + "+";
    return { n, text, kind: high <= 0.97 ? "slower" : low >= 1.03 ? "faster" : "same", lines: [range, count(n) + (n === 1 ? " shape" : " shapes")] };
  });
}

function drawGain() {
  const e = doc.earlier, over = (name) => doc.shapes.map((r) => ratio(get(r, name), get(r, "us"))).filter((g) => g);
  const merged = Object.entries(e.counts).map(([action, n]) => count(n) + " " + action).join(", ");
  $("gain-note").textContent = e.n ? `${count(e.n)} shapes were in ${e.source || "the table"}: ${count(e.faster)} are faster now, ${count(e.slower)} slower, ${times(e.geomean)} in the geometric mean.` + (merged ? " The merge: " + merged + "." : "")
    : merged ? "The merge: " + merged + ". The table had none of these shapes." : e.note ? "" : "The table had none of these shapes.";
  if (!drawBars($("chart-gain"), gainBars(over("old_us")), "Gain over the previous table")) fill($("chart-gain"), empty(e.note || "There is no older time to compare with."));
  const chosen = over("median_us");
  $("choice-note").textContent = chosen.length ? "What it is worth to choose: the median candidate's time over the winner's." : "";
  if (!drawBars($("chart-choice"), gainBars(chosen), "Gain over the median candidate")) fill($("chart-choice"), empty("No winner had other candidates yet."));
}

function drawNoise() {
  const n = doc.noise;
  const bars = (s) => (s.bins || []).map((many, i) => {
    const low = n.edges[i], high = n.edges[i + 1];
    const range = high === null ? percent(low) + " and more" : percent(low) + " to " + percent(high);
    return { n: many, text: high === null ? fmt(low * 100, 3) + "+" : fmt(low * 100, 3), kind: low >= 0.03 ? "slower" : "tuned", lines: [range, count(many) + (many === 1 ? " winner" : " winners")] };
  });
  const spread = (s) => (s.n ? `${count(s.n)} winners: median ${percent(s.median)}, nine in ten within ${percent(s.p90)}, at most ${percent(s.max)}.` : "");
  $("spread-note").textContent = spread(n.spread) + (n.spread.n ? " Half the interquartile range of a winner's samples over their median, in percent." : "");
  $("repeat-note").textContent = spread(n.repeat) + (n.repeat.n ? " How far the last time of a winner is from its first." : "");
  if (!drawBars($("chart-spread"), bars(n.spread), "Spread of the winners")) fill($("chart-spread"), empty("No winner has a spread yet."));
  if (!drawBars($("chart-repeat"), bars(n.repeat), "Repeats of the winners")) fill($("chart-repeat"), empty("No winner was measured twice."));
  $("close-note").textContent = n.judged ? `${count(n.close)} of ${count(n.judged)} winners lead the best other kernel by no more than their own spread: there the choice hardly matters.` : "";
  const heads = [["Node"], ["Slot"], ["Winners", count], ["Spread", percent], ["Canary µs", fmt], ["Canary's range", percent], ["Hottest °C", fmt], ["Clock from", fmt], ["to MHz", fmt]];
  const used = heads.map((_, i) => i < 3 || n.slots.some((s) => s[i] !== null));
  fill($("slots"), n.slots.length ? el("table", null,
    el("thead", null, el("tr", null, heads.filter((_, i) => used[i]).map(([name], i) => el("th", { scope: "col", class: i > 1 ? "num" : null }, name)))),
    el("tbody", null, n.slots.map((s) => el("tr", null, s.map((v, i) => used[i] && el("td", { class: i > 1 ? "num" : null }, heads[i][1] ? heads[i][1](v) : v)).filter((c) => c))))) : empty("No slot has begun yet."));
}

// A lane a slot: each timed canary, as its time over the median of the slots of its device.
function drawGpus() {
  const box = $("chart-gpus"), all = doc.gpus, n = all.reduce((s, g) => s + g.points.length, 0);
  $("gpus-note").textContent = n ? `${count(n)} timed canaries: a compute-bound kernel (circles) and a memory-bound one (diamonds), over the median of all slots.` : "";
  if (!n) { fill(box, empty("The GPUs were not timed beside each other: that may take one percent of a slot's time.")); return; }
  chart(box, (width) => {
    const pitch = all.length <= 40 ? 22 : 12, top = 6, bottom = 40, height = top + all.length * pitch + bottom;
    const left = Math.min(Math.max(...all.map((g) => g.name.length)) * 7 + 12, width * 0.35), right = width - 12;
    const values = all.flatMap((g) => g.points.flatMap(([, compute, memory]) => [compute, memory])).filter((v) => v);
    const low = Math.min(0.98, ...values), high = Math.max(1.02, ...values), x = (v) => left + ((v - low) / (high - low)) * (right - left);
    const step = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2].find((s) => (high - low) / s <= 8) || 5, ticks = [];
    for (let i = Math.ceil((low - 1) / step); 1 + i * step <= high; i++) ticks.push(1 + i * step);
    const items = [], lanes = all.map((g, i) => {
      const y = top + (i + 0.5) * pitch;
      const d = g.points.map(([t, ...both]) => both.map((v, k) => {
        if (!v) return "";
        items.push({ x: x(v), y, lines: () => [g.name, (k ? "memory-bound: " : "compute-bound: ") + percent(v - 1) + " over the median", "after " + lasting(t), g.flag] });
        return MARKS[k ? 3 : 0](Math.round(x(v) * 10) / 10, y, 3);
      }).join("")).join("");
      return sv("g", { class: "k-" + (g.flag ? "slower" : "tuned") }, sv("text", { class: g.flag ? "strong" : null, x: 0, y: y + 4 }, g.name), sv("path", { class: "fill", d, "fill-opacity": 0.6 }));
    });
    const svg = picture(width, height, "Timed canaries by slot; arrow keys go from one to the next",
      ticks.map((v) => [sv("path", { class: "grid", d: `M${x(v)} ${top}V${height - bottom}` }), sv("text", { x: x(v), y: height - bottom + 16, "text-anchor": "middle" }, (v > 1 ? "+" : "") + percent(Math.round((v - 1) * 1000) / 1000))]).flat(),
      lanes, sv("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, "time over the median"));
    pointable(svg, items, {});
    fill(box, svg);
  });
}
