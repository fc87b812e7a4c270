"use strict";
const plan = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const escapeHtml = text => String(text).replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));
const bytes = b => b >= 1e9 ? (b / 1e9).toPrecision(3) + " GB" : b >= 1e6 ? (b / 1e6).toPrecision(3) + " MB" : b >= 1e3 ? (b / 1e3).toPrecision(3) + " kB" : Math.round(b) + " B";
const time = t => t >= 1e6 ? (t / 1e6).toPrecision(3) + " s" : t >= 1e3 ? (t / 1e3).toPrecision(3) + " ms" : t >= 10 || t === 0 ? t.toFixed(0) + " µs" : t.toFixed(1) + " µs";
const COLOR = { "all-gather": "var(--gather)", "reduce-scatter": "var(--reduce)", "all-reduce": "var(--replicate)", "all-to-all": "var(--replicate)" };
const LEFT = 86, NAME = 12, RIGHT = 14, LANE = 30, GAP = 8;
const total = plan.graphs.reduce((end, g) => Math.max(end, g.offset_us + g.end_us), 1);
const transfers = plan.graphs.flatMap((g, graph) => [...g.collectives, ...g.own].map((c, index) => ({ ...c, graph, id: graph + "-" + index, offset: g.offset_us })));
const lanes = ["compute", ...plan.lanes];
const holders = plan.holders.map((name, i) => ({ name, color: `var(--h${["sharded parameters", "sharded gradients", "gathered units", "unsharded gradients", "saved for backward", "inputs and buffers", "outputs", "temporaries"].indexOf(name)})`, i }));
let from = 0, to = total;

const short = name => name.split(".").slice(/\d$/.test(name) ? -2 : -1).join(".");
const svgWidth = svg => svg.clientWidth || 1000;
const x = (svg, t) => LEFT + (t - from) / (to - from) * (svgWidth(svg) - LEFT - RIGHT);
const tag = (name, attributes, inside = "") => `<${name} ${Object.entries(attributes).map(([k, v]) => `${k}="${v}"`).join(" ")}>${inside}</${name}>`;

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high; t += step) found.push(t);
  return found;
}

function axis(svg, height) {
  const edges = plan.graphs.filter(g => g.offset_us >= from && g.offset_us < to).map(g =>
    tag("line", { class: "edge", x1: x(svg, g.offset_us), x2: x(svg, g.offset_us), y1: 14, y2: height - 20 }) +
    tag("text", { x: x(svg, g.offset_us) + 5, y: 11 }, escapeHtml(plan.graphs.length > 2 ? `${g.phase} ${g.region}` : g.phase)));
  const lines = ticks(from, to, Math.max(3, svgWidth(svg) / 130)).map(t =>
    tag("line", { class: "grid", x1: x(svg, t), x2: x(svg, t), y1: 16, y2: height - 20 }) +
    tag("text", { x: x(svg, t), y: height - 5, "text-anchor": "middle" }, time(t)));
  return lines.join("") + edges.join("");
}

function bar(svg, begin, end, y, height, color, label, attributes) {
  const left = Math.max(x(svg, begin), LEFT), right = Math.min(x(svg, end), svgWidth(svg) - RIGHT);
  if (right <= left) return "";
  const width = Math.max(right - left, .7);
  const fits = label && width > 7 * label.length + 6;
  return tag("rect", { x: left, y, width, height, fill: color, rx: width > 6 ? 2 : 0, ...attributes }) +
    (fits ? tag("text", { class: "name", x: left + width / 2, y: y + height / 2 + 4, "text-anchor": "middle" }, escapeHtml(label)) : "");
}

function drawTimeline() {
  const svg = byId("timeline"), top = 20, height = top + lanes.length * (LANE + GAP) + 20;
  svg.setAttribute("height", height);
  const row = lane => top + lanes.indexOf(lane) * (LANE + GAP);
  const cut = text => text.length > NAME ? text.slice(0, NAME - 1) + "…" : text;
  const name = (l, text, y) => tag("text", { x: LEFT - 10, y: row(l) + y, "text-anchor": "end" }, `<title>${escapeHtml(l)}</title>` + escapeHtml(cut(text.replace(/^fsdp\./, ""))));
  const names = lanes.map(l => { const [link, group] = l.split(": "); return group ? name(l, link, LANE / 2 - 3) + name(l, group, LANE / 2 + 11) : name(l, l, LANE / 2 + 4); });
  const spans = plan.graphs.flatMap((g, graph) => g.spans.map((s, i) => bar(svg, g.offset_us + s.begin_us, g.offset_us + s.end_us, row("compute"), LANE,
    i % 2 ? "var(--compute)" : "var(--compute-2)", short(s.where), { "data-span": `${graph}-${i}` })));
  const sent = transfers.map(c => bar(svg, c.offset + c.begin_us, c.offset + c.end_us, row(c.lane), LANE, COLOR[c.kind], short(c.unit), { "data-transfer": c.id }));
  const stalls = transfers.filter(c => c.exposed_us > 1 && c.wait).map(c => {
    const begin = c.offset + c.end_us - c.exposed_us;
    return bar(svg, begin, c.offset + c.end_us, row("compute"), LANE, "url(#stall)", "", { "data-transfer": c.id });
  });
  svg.innerHTML = `<defs><pattern id="stall" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="var(--stall)" opacity=".16"/><line x1="0" y1="0" x2="0" y2="6" stroke="var(--stall)" stroke-width="2.5"/></pattern></defs>`
    + axis(svg, height) + names.join("") + spans.join("") + stalls.join("") + sent.join("") + tag("line", { class: "cursor", y1: 16, y2: height - 20, visibility: "hidden" });
}

function drawMemory() {
  const svg = byId("memory"), height = 240, top = 18, bottom = height - 20;
  svg.setAttribute("height", height);
  const points = plan.graphs.flatMap(g => g.memory.curve.map(p => ({ t: g.offset_us + p.time_us, bytes: p.bytes })).concat(g.memory.curve.length ? [{ t: g.offset_us + g.end_us, bytes: g.memory.curve.at(-1).bytes }] : []));
  const high = Math.max(1, plan.peak_bytes) * 1.06;
  const y = b => bottom - b / high * (bottom - top);
  const rows = ticks(0, high, 4).map(b => tag("line", { class: "grid", x1: LEFT, x2: svgWidth(svg) - RIGHT, y1: y(b), y2: y(b) }) +
    tag("text", { x: LEFT - 10, y: y(b) + 4, "text-anchor": "end" }, b ? bytes(b) : "0"));
  const base = points.map(() => 0);
  const areas = holders.map(h => {
    const lower = [], upper = [];
    points.forEach((p, i) => {
      const next = base[i] + (p.bytes[h.name] || 0), last = upper.length ? upper[upper.length - 1].split(",")[1] : null;
      const px = Math.min(Math.max(x(svg, p.t), LEFT), svgWidth(svg) - RIGHT).toFixed(1);
      if (last !== null) { upper.push(`${px},${last}`); lower.push(`${px},${lower[lower.length - 1].split(",")[1]}`); }
      upper.push(`${px},${y(next).toFixed(1)}`); lower.push(`${px},${y(base[i]).toFixed(1)}`);
      base[i] = next;
    });
    return tag("polygon", { points: upper.concat(lower.reverse()).join(" "), fill: h.color, "data-holder": h.name });
  });
  const peaks = plan.graphs.map((g, i) => ({ g, i })).filter(({ g }) => g.memory.peak_bytes === plan.peak_bytes).slice(0, 1).map(({ g }) => {
    const px = x(svg, g.offset_us + g.memory.peak.time_us), right = px > svgWidth(svg) / 2;
    if (px < LEFT || px > svgWidth(svg) - RIGHT) return "";
    return tag("circle", { cx: px, cy: y(plan.peak_bytes), r: 4, fill: "var(--mark)" }) +
      tag("text", { x: px + (right ? -8 : 8), y: y(plan.peak_bytes) - 4, "text-anchor": right ? "end" : "start", style: "fill:var(--ink);font-weight:600" }, `peak ${bytes(plan.peak_bytes)}`);
  });
  svg.innerHTML = axis(svg, height) + rows.join("") + areas.join("") + peaks.join("") + tag("line", { class: "cursor", y1: 16, y2: bottom, visibility: "hidden" });
}

function draw() { drawTimeline(); drawMemory(); }

function tip(event, html) {
  const box = byId("tip");
  box.hidden = !html;
  if (!html) return;
  box.innerHTML = html;
  const left = event.clientX + 16 + box.offsetWidth > innerWidth ? event.clientX - box.offsetWidth - 12 : event.clientX + 16;
  box.style.left = Math.max(4, left) + "px";
  box.style.top = Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8) + "px";
}

const rowsOf = pairs => `<table>${pairs.map(([k, v]) => `<tr><td class="quiet">${k}</td><td>${escapeHtml(v)}</td></tr>`).join("")}</table>`;
const place = p => p ? `%${p.node} (#${p.index})` : "–";
function transferTip(c) {
  const own = c.messages.filter(m => m.parameters.length === 1).length, packed = c.messages.flatMap(m => m.parameters).length - own;
  return `<b>${escapeHtml(c.kind)} of ${escapeHtml(c.unit)}</b>${escapeHtml(c.exposure === "hidden" ? "hidden: " : `${time(c.exposed_us)} exposed: `)}${escapeHtml(c.reason)}` +
    rowsOf([["whole", `${bytes(c.size_bytes)} ${c.dtype}, ${own} own, ${packed} packed`], ["on the link", `${time(c.time_us)} on ${c.link} over ${c.ranks} ranks`], ["starts", place(c.start)], ["waited for", place(c.wait)], ["last used", place(c.last_use)], ["freed", place(c.reshard)]]);
}

function hover(event) {
  const svg = event.currentTarget, t = from + (event.clientX - svg.getBoundingClientRect().left - LEFT) / (svgWidth(svg) - LEFT - RIGHT) * (to - from);
  document.querySelectorAll(".cursor").forEach(line => {
    const px = x(line.ownerSVGElement, t);
    line.setAttribute("x1", px); line.setAttribute("x2", px); line.setAttribute("visibility", t >= from && t <= to ? "visible" : "hidden");
  });
  const { transfer, span } = event.target.dataset;
  if (transfer) return tip(event, transferTip(transfers.find(c => c.id === transfer)));
  if (span) {
    const [graph, index] = span.split("-").map(Number), s = plan.graphs[graph].spans[index];
    return tip(event, `<b>${escapeHtml(s.where || "compute")}</b>` + rowsOf([["time", time(s.end_us - s.begin_us)], ["work", (s.flops / 1e12).toFixed(2) + " TFLOP"], ["nodes", `%${s.first} .. %${s.last}`]]));
  }
  const graph = plan.graphs.findLast(g => g.offset_us <= t);
  if (svg.id === "memory" && graph && t <= total) {
    const point = graph.memory.curve.findLast(p => graph.offset_us + p.time_us <= t) || graph.memory.curve[0];
    const sum = Object.values(point.bytes).reduce((a, b) => a + b, 0);
    return tip(event, `<b>${bytes(sum)} live</b>` + rowsOf(Object.entries(point.bytes).sort((a, b) => b[1] - a[1]).map(([k, v]) => [k, bytes(v)])));
  }
  tip(event, "");
}

function watch(svg) {
  let grabbed = null;
  const scale = () => (to - from) / (svgWidth(svg) - LEFT - RIGHT);
  const show = (a, b) => { const width = Math.min(b - a, total); from = Math.max(0, Math.min(a, total - width)); to = from + width; draw(); };
  svg.addEventListener("wheel", e => {
    e.preventDefault();
    const t = from + (e.clientX - svg.getBoundingClientRect().left - LEFT) * scale(), factor = Math.exp(e.deltaY * .0015);
    if ((to - from) * factor > total / 5000) show(t - (t - from) * factor, t + (to - t) * factor);
  }, { passive: false });
  svg.addEventListener("pointerdown", e => { grabbed = { at: e.clientX, from, to }; });
  addEventListener("pointerup", () => { grabbed = null; });
  svg.addEventListener("pointermove", e => {
    if (!grabbed) return hover(e);
    const moved = (e.clientX - grabbed.at) * scale();
    show(grabbed.from - moved, grabbed.to - moved);
  });
  svg.addEventListener("pointerleave", e => tip(e, ""));
  svg.addEventListener("dblclick", () => show(0, total));
}

function table(id, head, rows) {
  const cell = (name, text, numeric) => `<${name}${numeric ? ' class="n"' : ""}>${text}</${name}>`;
  byId(id).innerHTML = `<thead><tr>${head.map(h => cell("th", escapeHtml(h.replace(/ $/, "")), h.endsWith(" "))).join("")}</tr></thead><tbody>` +
    rows.map(r => `<tr ${r.attributes || ""}>${r.cells.map((c, i) => cell("td", c, head[i].endsWith(" "))).join("")}</tr>`).join("") + "</tbody>";
}

function fillSummary() {
  byId("title").textContent = `${plan.title} on ${plan.world_size} ranks`;
  byId("verdict").textContent = plan.verdict;
  byId("setting").textContent = `${plan.hardware.device.name}, ${plan.links}; estimated from the graphs, nothing was run`;
  byId("cards").innerHTML = plan.summary.map(([name, value, more]) =>
    `<div class="card"><b>${escapeHtml(value)}</b><span>${escapeHtml(name + more)}</span></div>`).join("");
  const key = (color, name) => `<span><i style="background:${color}"></i>${escapeHtml(name)}</span>`;
  const kinds = [...new Set(transfers.map(c => c.kind))];
  byId("lane-key").innerHTML = key("var(--compute)", "compute") + kinds.map(k => key(COLOR[k], k)).join("") + key("var(--stall)", "compute waits");
  byId("memory-key").innerHTML = holders.map(h => key(h.color, h.name)).join("");
}

function fillCollectives(shown) {
  const where = p => p ? `<code title="%${escapeHtml(p.node)} ${escapeHtml(p.where)}">${p.index}</code>` : "–";
  table("collectives", ["graph", "unit", "what", "dtype", "messages", "whole ", "on link ", "exposed ", "why", "start ", "wait ", "last use ", "freed "],
    transfers.filter(c => !shown || c.exposure === shown).map(c => {
      const names = c.messages.flatMap(m => m.parameters), own = c.messages.filter(m => m.parameters.length === 1).length, packed = names.length - own;
      const layout = [own && `${own} own`, packed && `${packed} packed`].filter(Boolean).join(", ");
      return {
        attributes: `class="pick" data-row="${c.id}"`,
        cells: [plan.graphs[c.graph].phase, escapeHtml(c.unit), `<i style="display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:6px;background:${COLOR[c.kind]}"></i>${c.kind}`,
          c.dtype, `<span class="whole" title="${escapeHtml(names.join("\n"))}">${layout}</span>`, bytes(c.size_bytes), time(c.time_us),
          c.exposed_us > 1 ? `<span class="bad">${time(c.exposed_us)}</span>` : "hidden", escapeHtml(c.reason), where(c.start), where(c.wait), where(c.last_use), where(c.reshard)],
      };
    }));
}

function fillFilters() {
  const kinds = ["", ...new Set(transfers.map(c => c.exposure))];
  const show = shown => {
    byId("filters").innerHTML = kinds.map(k => `<button data-shown="${escapeHtml(k)}" aria-pressed="${k === shown}">${escapeHtml(k || "all")} ${k ? transfers.filter(c => c.exposure === k).length : transfers.length}</button>`).join("");
    fillCollectives(shown);
  };
  byId("filters").addEventListener("click", e => { if ("shown" in e.target.dataset) show(e.target.dataset.shown); });
  show("");
}

function fillTables() {
  const peak = plan.graphs.find(g => g.memory.peak_bytes === plan.peak_bytes);
  table("peak", ["node", "module or unit", "held for", "bytes "], !peak ? [] : peak.memory.largest.map(a => ({
    cells: [`<code>%${escapeHtml(a.node)}</code>`, escapeHtml(a.where), escapeHtml(a.holder), bytes(a.size_bytes)] })));
  const shown = plan.tables.filter(t => t.rows.length);
  byId("tables").insertAdjacentHTML("beforeend", shown.map((t, i) => `<div class="panel"><h2>${t.title}</h2><div class="scroll"><table id="table-${i}"></table></div></div>`).join(""));
  shown.forEach((t, i) => table(`table-${i}`, t.columns, t.rows.map(row => ({ cells: row.map(escapeHtml) }))));
}

function light(id, on) {
  document.querySelectorAll(`[data-transfer="${id}"]`).forEach(e => e.classList.toggle("lit", on));
}

fillSummary(); fillFilters(); fillTables(); draw();
["timeline", "memory"].forEach(id => watch(byId(id)));
addEventListener("resize", draw);
["mouseover", "mouseout"].forEach(kind => byId("collectives").addEventListener(kind, e => {
  const row = e.target.closest("[data-row]");
  if (row) light(row.dataset.row, kind === "mouseover");
}));
