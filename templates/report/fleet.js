// The time line: a lane a slot, what ran when, and what kept it from running.
const KIND = { done: "attempt ended well", fault: "attempt faulted", lost: "worker or node lost", cancelled: "cancelled", running: "running" };
const AWAY = { preparing: "being prepared", trouble: "no answer", away: "given up", ended: "lease ended", released: "lease given back", busy: "waits for others", shared: "shared with others", quarantine: "quarantined", gone: "slot lost" };

// Time to x. Where nothing happened for long, time is cut: a pause takes PAUSE pixels.
const PAUSE = 22;
function timeScale(fleet, from, to) {
  const pauses = fleet.pauses, cut = pauses.reduce((s, [a, b]) => s + b - a, 0);
  const per = (to - from - PAUSE * pauses.length) / Math.max(fleet.length - cut, 0.1);
  const scale = (t) => {
    let x = from, reached = 0;
    for (const [a, b] of pauses) {
      if (t <= a) break;
      x += (a - reached) * per + (t >= b ? PAUSE : ((t - a) / (b - a)) * PAUSE);
      reached = b;
      if (t < b) return x;
    }
    return x + (t - reached) * per;
  };
  const steps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
  const step = steps.find((s) => s * per >= 74) || 2592000;
  scale.ticks = [];
  for (let t = 0; t <= fleet.length && scale.ticks.length < 60; t += step) if (!pauses.some(([a, b]) => t > a && t < b)) scale.ticks.push(t);
  return scale;
}

function drawFleet() {
  const box = $("chart-fleet"), fleet = doc.fleet, lanes = fleet.lanes;
  const n = lanes.reduce((s, [, , segments]) => s + segments.length, 0);
  $("fleet-note").textContent = lanes.length ? `${count(lanes.length)} slots over ${lasting(fleet.length)}, from ${clock(fleet.start)}; ${count(n)} attempts.` + (fleet.coarse ? " Short neighbours that ended well are drawn as one." : "") + (fleet.pauses.length ? " Where nothing ran for long, time is cut." : "") : "";
  if (!lanes.length) { fill(box, empty("No node has been given work yet.")); return; }
  chart(box, (width) => {
    const pitch = lanes.length <= 40 ? 18 : lanes.length <= 200 ? 9 : 4, thick = pitch > 6 ? pitch - 3 : pitch - 1;
    const nodes = [];
    lanes.forEach(([node], i) => { if (!i || lanes[i - 1][0] !== node) nodes.push({ node, first: i, n: 0 }); nodes[nodes.length - 1].n++; });
    const longest = Math.max(...nodes.map((x) => x.node.length)), left = Math.min(Math.max(60, longest * 7 + 28), width * 0.3), gap = pitch > 6 ? 7 : 3, top = 6, bottom = 24;
    const y = new Map(), places = new Map();
    let down = top;
    nodes.forEach((x, k) => { x.y = down; for (let i = 0; i < x.n; i++) { y.set(x.first + i, down); places.set(lanes[x.first + i][0] + "\n" + lanes[x.first + i][1], x.first + i); down += pitch; } down += k < nodes.length - 1 ? gap : 0; });
    const height = down + bottom, x = timeScale(fleet, left, width - 8), paths = {}, items = [];
    const block = (kind, lane, x0, w) => { paths[kind] = (paths[kind] || "") + `M${x0.toFixed(1)} ${y.get(lane)}h${w.toFixed(1)}v${thick}h${(-w).toFixed(1)}z`; };
    const add = (kind, lane, a, b, lines, whole = true) => {
      const x0 = x(a), w = Math.max(x(b ?? fleet.length) - x0, 1.2), end = Math.min(w, 6);
      block(whole ? kind : "done", lane, x0, w);
      if (!whole) block(kind, lane, x0 + w - end, end);
      items.push({ x: x0 + w / 2, y: y.get(lane) + thick, x0, x1: x0 + w, lane, lines });
    };
    const when = (a, b) => clock(fleet.start + a) + (b === null ? ", going on" : ` for ${lasting(b - a)}`);
    for (const [node, slot, a, b, kind, text] of fleet.spans) {
      const hit = slot === null ? lanes.flatMap(([name], i) => (name === node ? [i] : [])) : [places.get(node + "\n" + slot)];
      for (const lane of hit) if (lane !== undefined) add(kind, lane, a, b, () => [AWAY[kind] + ": " + when(a, b), text]);
    }
    lanes.forEach(([node, slot, segments], lane) => {
      for (const [a, b, kind, attempt, group, tuned, outcome, shape, detail] of segments) {
        add(kind, lane, a, b, () => [`${node} slot ${slot}: ${group || "group"}, ${KIND[kind]}`, `attempt ${attempt}, ${when(a, b)}`, `${count(tuned)} shapes tuned` + (outcome && outcome !== "done" ? `; ended as ${outcome}` + (shape ? ` at ${shape}` : "") : ""), detail], !(tuned && (kind === "fault" || kind === "lost")));
      }
    });
    for (const [t, kind, text, node, slot] of fleet.marks) {
      const lane = places.get(node + "\n" + slot);
      if (kind !== "canary" || lane === undefined) continue;
      const cx = x(t), cy = y.get(lane) + thick / 2, r = Math.min(4, thick / 2);
      paths.canary = (paths.canary || "") + `M${cx} ${cy - 1.3 * r}l${1.3 * r} ${1.3 * r}l${-1.3 * r} ${1.3 * r}l${-1.3 * r} ${-1.3 * r}z`;
      items.push({ x: cx, y: cy + r, x0: cx - 4, x1: cx + 4, lane, lines: () => ["canary failed: " + when(t, t).split(" for")[0], text] });
    }
    const order = ["preparing", "trouble", "away", "ended", "released", "busy", "gone", "done", "running", "cancelled", "lost", "fault", "quarantine", "canary"].filter((k) => paths[k]);
    const controller = fleet.marks.filter(([, kind]) => kind === "controller");
    const ring = sv("rect", { class: "ring", visibility: "hidden", rx: 2 });
    const svg = picture(width, height, "What every slot did over time; arrow keys go from attempt to attempt",
      x.ticks.map((t) => [sv("path", { class: "grid", d: `M${x(t)} ${top}V${height - bottom}` }), sv("text", { x: x(t), y: height - 7, "text-anchor": t ? "middle" : "start" }, t ? lasting(t) : clock(fleet.start))]).flat(),
      controller.slice(1).map(([t]) => sv("path", { class: "cut", d: `M${x(t)} ${top}V${height - bottom}` })),
      fleet.pauses.map(([a, b]) => [a, b].map((t) => sv("path", { class: "cut", d: `M${x(t)} ${top}V${height - bottom}` }))).flat(),
      nodes.map((k) => sv("text", { class: "strong", x: 0, y: k.y + Math.max(10, thick - 3) }, k.node.length * 7 > left - 20 ? k.node.slice(0, Math.floor((left - 20) / 7)) + "…" : k.node)),
      pitch > 10 ? lanes.map(([, slot], i) => sv("text", { x: left - 6, y: y.get(i) + thick - 3, "text-anchor": "end" }, slot)) : null,
      order.map((k) => sv("path", { class: "fill k-" + k, d: paths[k], "fill-opacity": k === "quarantine" ? 0.75 : 1 })), ring);
    items.sort((a, b) => a.lane - b.lane || a.x0 - b.x0);
    pointable(svg, items, {
      find: (px, py) => {
        let best = -1;
        items.forEach((item, i) => { if (px >= item.x0 - 2 && px <= item.x1 + 2 && py >= y.get(item.lane) && py < y.get(item.lane) + pitch) best = i; });
        return best;
      },
      ring: (item) => {
        ring.setAttribute("visibility", item ? "visible" : "hidden");
        if (!item) return;
        for (const [k, v] of [["x", item.x0 - 1], ["y", y.get(item.lane) - 1], ["width", item.x1 - item.x0 + 2], ["height", thick + 2]]) ring.setAttribute(k, v);
      },
    });
    fill(box, svg, legend(order.map((k) => ["k-" + k, KIND[k] || AWAY[k] || "canary failed", k === "canary" ? MARKS[3](7, 7, 4) : null])));
  });
}
