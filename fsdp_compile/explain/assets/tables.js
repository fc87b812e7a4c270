function table(id, head, rows) {
  const cell = (name, text, numeric) => `<${name}${numeric ? ' class="n"' : ""}>${text}</${name}>`;
  byId(id).innerHTML = `<thead><tr>${head.map(h => cell("th", escapeHtml(h.replace(/ $/, "")), h.endsWith(" "))).join("")}</tr></thead><tbody>` +
    rows.map(r => `<tr ${r.attributes || ""}>${r.cells.map((c, i) => cell("td", c, head[i].endsWith(" "))).join("")}</tr>`).join("") + "</tbody>";
}

function fillSummary() {
  const sum = name => plan.graphs.reduce((s, g) => s + g[name], 0);
  const { device } = plan.hardware;
  byId("title").textContent = `${plan.title} on ${plan.world_size} ranks`;
  byId("setting").textContent = `${device.name}, ${plan.links}; estimated from the graphs, nothing was run`;
  const numel = plan.units.reduce((s, u) => s + u.numel, 0), held = plan.units.reduce((s, u) => s + u.shard_bytes, 0);
  const sent = plan.volume.total_bytes, bound = plan.bound;
  const percent = (part, whole) => whole ? (100 * part / whole).toFixed(1) + " %" : "–";
  const cards = [
    [time(plan.step_us), `step: ${time(sum("compute_us"))} compute, ${time(sum("exposed_us"))} exposed`],
    [percent(plan.busy_us, plan.step_us), `of the step is ${time(plan.busy_us)}, the larger of compute and link`],
    [percent(bound.time_us, plan.step_us), `of the step is ${time(bound.time_us)}, which no schedule in the same memory can beat`],
    [bytes(plan.peak_bytes), `peak memory without optimizer state; the device has ${bytes(device.memory.value)}`],
    [bytes(sent), `sent per rank and step; at least ${bytes(bound.sent_bytes)} in the same memory`],
    [(numel / 1e9).toPrecision(3) + " B", `parameters in ${plan.units.length} units, ${bytes(held)} per rank`],
  ];
  byId("cards").innerHTML = cards.map(([big, small]) => `<div class="card"><b>${escapeHtml(big)}</b><span>${escapeHtml(small)}</span></div>`).join("");
  const key = (color, name) => `<span><i style="background:${color}"></i>${escapeHtml(name)}</span>`;
  const kinds = [...new Set(transfers.map(c => c.kind))];
  byId("lane-key").innerHTML = key("var(--compute)", "compute") + kinds.map(k => key(COLOR[k], k)).join("") + key("var(--stall)", "compute waits");
  byId("memory-key").innerHTML = holders.map(h => key(h.color, h.name)).join("");
}

function fillCollectives(shown) {
  const where = p => p ? `<code title="%${escapeHtml(p.node)} ${escapeHtml(p.where)}">${p.index}</code>` : "–";
  table("collectives", ["graph", "unit", "what", "dtype", "messages", "whole ", "on link ", "exposed ", "why", "start ", "wait ", "last use ", "freed "],
    transfers.filter(c => !shown || c.exposure === shown).map(c => {
      const own = c.messages.filter(m => m.layout === "own message"), packed = c.messages.filter(m => m.layout === "packed");
      const layout = [own.length && `${own.length} own`, packed.length && `${packed.reduce((n, m) => n + m.parameters.length, 0)} packed`].filter(Boolean).join(", ");
      const names = c.messages.flatMap(m => m.parameters).join("\n");
      return {
        attributes: `class="pick" data-row="${c.id}"`,
        cells: [plan.graphs[c.graph].phase, escapeHtml(c.unit), `<i style="display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:6px;background:${COLOR[c.kind]}"></i>${c.kind}`,
          c.dtype, `<span class="whole" title="${escapeHtml(names)}">${layout}</span>`, bytes(c.size_bytes), time(c.time_us),
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

function fillRest() {
  const peak = plan.graphs.find(g => g.memory.peak_bytes === plan.peak_bytes);
  table("peak", ["node", "module or unit", "held for", "bytes "], !peak ? [] : peak.memory.largest.map(a => ({
    cells: [`<code>%${escapeHtml(a.node)}</code>`, escapeHtml(a.where), escapeHtml(a.holder), bytes(a.size_bytes)] })));
  table("copies", ["graph", "way", "bytes ", "nodes "], plan.graphs.flatMap(g => Object.entries(g.copied_bytes).filter(([w]) => g.phase === "backward" || w.endsWith("gathers")).map(([way, moved]) => ({
    cells: [g.phase, escapeHtml(way), bytes(moved), g.copies.filter(c => c.way === way).length] }))));
  table("units", ["unit", "parameters ", "elements ", "stored, sent, reduced", "full ", "per rank "], plan.units.map(u => ({
    cells: [escapeHtml(u.name), u.parameters, u.numel.toLocaleString("en"), `<span class="whole">${[u.stored, u.sent, u.reduced].map(d => d.join("/").replace("float", "f") || "–").join(", ")}</span>`, bytes(u.full_bytes), `<span title="padding ${bytes(u.padding_bytes)}">${bytes(u.shard_bytes)}</span>`] })));
  table("skipped", ["what", "why"], plan.skipped.length ? plan.skipped.map(s => ({ cells: [escapeHtml(s.what), escapeHtml(s.why)] })) : [{ cells: ["nothing", ""] }]);
  const number = n => Math.abs(n.value) >= 1e6 ? n.value.toExponential(3) : String(+n.value.toFixed(4));
  table("assumptions", ["of", "quantity", "value ", "unit", "source"], plan.numbers.map(n => ({
    cells: [escapeHtml(n.of), escapeHtml(n.what), number(n), escapeHtml(n.unit), `<span class="quiet">${escapeHtml(n.source)}</span>`] })));
}

function light(id, on) {
  document.querySelectorAll(`[data-transfer="${id}"]`).forEach(e => e.classList.toggle("lit", on));
}

fillSummary(); fillFilters(); fillRest(); draw();
["timeline", "memory"].forEach(id => watch(byId(id)));
addEventListener("resize", draw);
["mouseover", "mouseout"].forEach(kind => byId("collectives").addEventListener(kind, e => {
  const row = e.target.closest("[data-row]");
  if (row) light(row.dataset.row, kind === "mouseover");
}));
