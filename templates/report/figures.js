// Numbers for people, scales, the tip, and a picture's points by mouse and by keyboard.
const whole = new Intl.NumberFormat("en-US");
const count = (n) => whole.format(n);

function fmt(x, digits = 4) {
  if (x === null || x === undefined) return "";
  const size = Math.abs(x);
  if (size >= 1000) return whole.format(Math.round(x));
  if (size > 0 && size < 0.0001) return x.toExponential(2);
  return String(Number(x.toPrecision(digits)));
}
const percent = (x) => (x === null || x === undefined ? "" : fmt(x * 100, 3) + "\u00a0%");
const times = (x) => (x === null || x === undefined || !isFinite(x) ? "" : x.toFixed(x < 10 ? 2 : 1) + "×");

// the same as `duration` of orchestrator/view/formatting.py, but for days
function lasting(s) {
  if (s < 60) return fmt(s, 3) + " s";
  if (s < 3600) return Math.floor(s / 60) + " min" + (s % 60 >= 1 ? " " + String(Math.floor(s % 60)).padStart(2, "0") + " s" : "");
  if (s < 86400) return Math.floor(s / 3600) + " h" + (s % 3600 >= 60 ? " " + String(Math.floor((s % 3600) / 60)).padStart(2, "0") + " min" : "");
  return Math.floor(s / 86400) + " d " + Math.floor((s % 86400) / 3600) + " h";
}
const clock = (epoch) => new Date(epoch * 1000).toLocaleTimeString([], { hour12: false });

// A logarithmic scale with its ticks; `low` and `high` are positive.
function logScale(low, high, from, to) {
  const a = Math.log10(low), b = Math.max(Math.log10(high), a + 0.01);
  const scale = (x) => from + ((Math.log10(x) - a) / (b - a)) * (to - from);
  scale.ticks = [];
  const steps = b - a > 2.5 ? [1] : b - a > 1 ? [1, 3] : [1, 2, 3, 5, 7];
  for (let e = Math.floor(a) - 1; e <= Math.ceil(b); e++) {
    for (const m of steps) {
      const x = m * 10 ** e;
      if (x >= low * 0.999 && x <= high * 1.001) scale.ticks.push(Number(x.toPrecision(3)));
    }
  }
  return scale;
}

const tip = $("tip");
function showTip(lines, x, y) {
  fill(tip, lines.filter((line) => line).map((line) => el("p", null, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, x + 14), innerWidth - box.width - 8);
  const top = y + box.height + 22 > innerHeight ? y - box.height - 12 : y + 16;
  tip.style.left = left + "px";
  tip.style.top = Math.max(8, top) + "px";
}
const hideTip = () => { tip.hidden = true; };

// Lets people point at items {x, y, w, lines(), open()}: with the mouse (the nearest within `reach`), or with the
// arrow keys once the picture has the focus; what is pointed at is read out.
function pointable(svg, items, { ring, reach = 18, find } = {}) {
  let now = -1;
  const nearest = find || ((x, y) => {
    let best = -1, least = reach * reach;
    items.forEach((item, i) => {
      const d = (item.x - x) ** 2 + (item.y - y) ** 2;
      if (d <= least) { best = i; least = d; }
    });
    return best;
  });
  const point = (i, x, y, aloud) => {
    now = i;
    if (i < 0) { hideTip(); if (ring) ring(null); return; }
    const item = items[i], box = svg.getBoundingClientRect();
    if (ring) ring(item);
    const lines = item.lines();
    showTip(lines, x ?? box.left + item.x, y ?? box.top + item.y);
    if (aloud) $("said").textContent = lines.join(". ");
  };
  svg.addEventListener("pointermove", (e) => {
    const box = svg.getBoundingClientRect();
    point(nearest(e.clientX - box.left, e.clientY - box.top), e.clientX, e.clientY, false);
  });
  const leave = () => { now = -1; hideTip(); if (ring) ring(null); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("click", () => { if (now >= 0 && items[now].open) { hideTip(); items[now].open(); } });
  svg.addEventListener("keydown", (e) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
    if (step && items.length) {
      e.preventDefault();
      point((now + step + items.length) % items.length, null, null, true);
    } else if (e.key === "Escape") leave();
    else if (e.key === "Enter" && now >= 0 && items[now].open) { hideTip(); items[now].open(); }
  });
}

// A box that is drawn for its width, and again when that changes.
const drawn = new Map();
const widths = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const kept = drawn.get(entry.target), width = Math.floor(entry.contentRect.width);
    if (kept && width > 0 && width !== kept.width) { kept.width = width; kept.draw(width); }
  }
});
function chart(box, draw) {
  const width = Math.floor(box.clientWidth) || 600;
  if (!drawn.has(box)) widths.observe(box);
  drawn.set(box, { draw, width });
  draw(width);
}
