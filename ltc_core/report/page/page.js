"use strict";
// The page: its sections, from the data that `ltc_core.report.build` has inserted.

const data = JSON.parse(document.getElementById("data").textContent);
const SECTIONS = [["summary", "Summary"], ["steps", "Steps"], ["time", "Time by line"], ["programs", "Programs"], ["graph", "Graph"],
  ["waits", "Waits"], ["memory", "Memory"], ["data", "Data"], ["job", "Ranks"], ["machine", "Machine"]];
let rank = data.ranks[0];

function section(id, title, note, ...content) {
  return el("section", { id }, el("h2", {}, title), note ? el("p", { class: "note" }, note) : null, ...content);
}

function go(id) { document.getElementById(id).scrollIntoView({ behavior: "instant" }); }

function header() {
  const process = rank.process;
  const when = process.began ? new Date(process.began * 1000).toLocaleString() : "";
  const chooser = data.ranks.length < 2 ? null : el("label", {}, "rank ", el("select", { id: "rank", onchange: (event) => { rank = data.ranks[+event.target.value]; draw(); } },
    data.ranks.map((r, k) => el("option", { value: k, selected: r === rank }, String(r.number)))));
  document.getElementById("top").replaceChildren(
    el("h1", {}, process.script || "a run"),
    el("p", {}, `${when} · ${counted(data.ranks.length, "process").replace("processs", "processes")} · torch ${process.torch || "?"} · executor ${process.executor || "?"} on ${process.device || "?"}`),
    el("nav", {}, SECTIONS.filter(([id]) => id !== "job" || data.ranks.length > 1).map(([id, title]) => el("a", { href: `#${id}` }, title)), chooser));
}

function summary() {
  const rows = data.summary.map((row) => el("li", {}, row.text, el("button", { class: "link", onclick: () => go(row.section) }, "show")));
  return section("summary", "Summary", null, el("ol", { class: "summary" }, rows));
}

function steps() {
  if (!rank.steps.length) return section("steps", "Steps", "No step has ended.");
  const mean = rank.mean;
  const rows = data.parts.map((part, k) => ({ part, k, ms: mean.parts[part] })).sort((a, b) => b.ms - a.ms);
  return section("steps", "Steps", "Each bar is a step of the thread that trains: what it did, or what it waited for. A red mark: the bar is longer than the chart, as first steps are.",
    stepBars(rank.steps, data.parts), legend(data.parts),
    el("h3", {}, `Mean of the last ${rank.num_steady} steps: ${milliseconds(mean.ms)}`),
    table([{ title: "what", of: (r) => r.part }, { title: "a step", number: true, of: (r) => milliseconds(r.ms) }, { title: "share", number: true, of: (r) => percent(r.ms / mean.ms) },
      { title: "", of: (r) => el("span", { class: "bar", style: `width: ${Math.round(260 * r.ms / mean.ms)}px; background: var(--part${r.k})` }) }], rows));
}

function time() {
  const total = rank.lines.reduce((sum, row) => sum + row.ms, 0) || 1;
  const measured = rank.programs.every((p) => !p.graph || p.is_measured);
  const note = `Computing, a step in the mean. ${measured ? "Shares are those of a run that called the ops one by one." : "Some programs were loaded compiled: their shares are estimated from work."} Ops of backward count where their forward op was called.`;
  const rows = rank.lines.slice(0, 40);
  return section("time", "Time by line", note,
    rank.icicle.ms ? icicle(rank.icicle) : null,
    el("h3", {}, "Lines"),
    table([{ title: "line", of: (r) => code(r.line) }, { title: "a step", number: true, of: (r) => milliseconds(r.ms) }, { title: "share", number: true, of: (r) => percent(r.ms / total) },
      { title: "", of: (r) => el("span", { class: "bar", style: `width: ${Math.round(120 * r.ms / total)}px` }) },
      { title: "ops", of: (r) => r.ops.slice(0, 4).map(([name, ms]) => `${name} ${milliseconds(ms)}`).join(", ") }], rows));
}

function programs() {
  const near = (p) => p.limit_ms && p.mean_ms ? percent(Math.min(1, p.limit_ms / p.mean_ms)) : "-";
  return section("programs", "Programs", "Each new program with its cause. “Of the limit”: how near its runs come to what this machine's arithmetic and memory allow; small ops and few threads keep it low.",
    table([
      { title: "program", number: true, of: (p) => p.number },
      { title: "ops", number: true, of: (p) => p.ops },
      { title: "runs", number: true, of: (p) => p.runs },
      { title: "a run", number: true, of: (p) => milliseconds(p.mean_ms) },
      { title: "how it ran", of: (p) => p.tiers.map((t) => `${t.tier} ${t.runs}× ${milliseconds(t.mean_ms)}`).join(", ") },
      { title: "kernels", number: true, of: (p) => (p.kernels && p.kernels.length) || "-" },
      { title: "GFLOP", number: true, of: (p) => p.flops === undefined ? "-" : number(p.flops / 1e9) },
      { title: "moved", number: true, of: (p) => p.bytes === undefined ? "-" : bytes(p.bytes) },
      { title: "GFLOP/s", number: true, of: (p) => p.flops && p.mean_ms ? number(p.flops / p.mean_ms / 1e6) : "-" },
      { title: "of the limit", number: true, of: near },
      { title: "why it was built", of: (p) => p.cause + (p.builds > 1 ? ` (built ${p.builds} times)` : "") },
      { title: "", of: (p) => p.graph ? el("span", {}, el("button", { class: "link", "data-open": p.number, onclick: () => { graphs.show(p); go("graph"); } }, "graph"), " ",
        old(p) ? el("button", { class: "link", "data-compare": p.number, onclick: () => { graphs.compare(old(p), p); go("graph"); } }, "compare") : "") : "" },
    ], rank.programs, "No program was built."));
}

/** The known program that this one was nearest to. */
function old(p) { return rank.programs.find((q) => q.graph && q.compile === p.nearest && q !== p); }

// -- graphs -------------------------------------------------------------------------------------------

class Graphs {
  constructor() {
    this.models = new Map();
    this.panes = el("div", { class: "panes" });
    this.changes = el("div");
    this.results = el("div");
    this.search = el("input", { type: "search", id: "search", placeholder: "op, module, line or kernel", oninput: () => this._find() });
    this.choice = el("select", { id: "program", onchange: () => this.show(this.known[+this.choice.value]) });
    this.other = el("select", { id: "other", onchange: () => this._choose() });
    this.color = el("select", { id: "color", onchange: () => this.viewers.forEach((v) => v.setColor(this.color.value)) },
      [["us", "time"], ["bytes", "memory moved"], ["flops", "arithmetic"], ["kernel", "kernel"]].map(([value, text]) => el("option", { value }, text)));
    this.viewers = [];
  }

  section() {
    this.known = rank.programs.filter((p) => p.graph);
    if (!this.known.length) return section("graph", "Graph", "No graph was recorded.");
    this.models.clear();
    const options = () => this.known.map((p, k) => el("option", { value: k }, `program ${p.number}: ${counted(p.ops, "op")}, ${counted(p.runs, "run")}`));
    this.choice.replaceChildren(...options());
    this.other.replaceChildren(el("option", { value: "" }, "nothing"), ...options());
    const made = section("graph", "Graph", "The ops of a program, folded by module; colours show where the time goes. Click a group to open it, its name to close it; drag and scroll to move.",
      el("div", { class: "controls" }, el("label", {}, "show ", this.choice), el("label", {}, "beside ", this.other), el("label", {}, "colour by ", this.color), this.search,
        el("button", { class: "button", onclick: () => this.viewers.forEach((v) => v.fit()) }, "whole graph")),
      this.results, this.changes, this.panes);
    const most = this.known.reduce((a, b) => (b.total_ms > a.total_ms ? b : a));
    requestAnimationFrame(() => { this.show(most); this._prepare([...this.known]); });
    return made;
  }

  /** Make the models of all programs while the page is idle, one at a time: a model of 20,000 ops takes 30 to 60 ms. */
  _prepare(rest) {
    const p = rest.shift();
    if (p === undefined) return;
    (window.requestIdleCallback || setTimeout)(() => {
      if (!this.known.includes(p)) return;  // another rank is shown
      this.model(p);
      this._prepare(rest);
    });
  }

  model(p) {
    if (!this.models.has(p)) this.models.set(p, new Model(p));
    return this.models.get(p);
  }

  show(p) {
    this.choice.value = String(this.known.indexOf(p));
    this.other.value = "";
    this.changes.replaceChildren();
    this._set([new Viewer(this.model(p))]);
  }

  compare(before, now) {
    this.choice.value = String(this.known.indexOf(now));
    this.other.value = String(this.known.indexOf(before));
    const a = this.model(before), b = this.model(now), found = difference(a, b);
    const left = new Viewer(a, { title: `program ${before.number}: `, marks: found.oldMarks, onopen: (key, is) => follow(right, key, is) });
    const right = new Viewer(b, { title: `program ${now.number}: `, marks: found.newMarks, onopen: (key, is) => follow(left, key, is) });
    const counts = ["changed", "added", "missing"].map((kind) => [kind, found.changes.filter((c) => c.kind === kind).length]);
    const inputs = found.inputs ? `; ${found.inputs}` : "";
    this.changes.replaceChildren(
      el("p", { id: "difference" }, `From program ${before.number} to ${now.number}: `, ...counts.flatMap(([kind, n], k) => [k ? ", " : "", el("span", { class: `${kind}-text` }, `${counted(n, "op")} ${kind}`)]), inputs, now.cause ? `. Cause: ${now.cause}` : ""),
      el("div", { class: "results" }, found.changes.slice(0, 200).map((c) => el("button", { onclick: () => (c.kind === "missing" ? left : right).reveal(c.at) },
        el("span", { class: `${c.kind}-text` }, `${c.kind} `), `${c.text}  ${c.line}`))));
    this._set([left, right]);
  }

  _choose() {
    const p = this.known[+this.choice.value], q = this.other.value === "" ? null : this.known[+this.other.value];
    if (q && q !== p) this.compare(q, p); else this.show(p);
  }

  _set(viewers) {
    this.viewers = viewers;
    this.panes.classList.toggle("two", viewers.length > 1);
    this.panes.replaceChildren(...viewers.map((v) => v.element));
    for (const v of viewers) { v.by = this.color.value; v.draw(); v.select(null); }
    this._find();
  }

  _find() {
    const text = this.search.value.trim();
    if (!text || !this.viewers.length) { this.results.replaceChildren(); return; }
    const viewer = this.viewers[this.viewers.length - 1], found = viewer.find(text);
    const rows = found.slice(0, 60).map((at) => { const told = viewer.model.describe(at); return el("button", { "data-at": at, onclick: () => viewer.reveal(at) }, `${at + 1}: ${told.name}  ${told.module}  ${told.line}`); });
    this.results.replaceChildren(el("p", { class: "note" }, found.length >= 200 ? "200 ops and more" : counted(found.length, "op")), el("div", { class: "results", id: "results" }, rows));
  }
}

function follow(viewer, key, isOpen) {
  const item = viewer.model.group(key);
  if (item && viewer.open.has(key) !== isOpen) viewer.toggle(item, true);
}

const graphs = new Graphs();

// -- the other sections -------------------------------------------------------------------------------

function waits() {
  const advice = { title: "what to do", of: (r) => r.advice };
  return section("waits", "Waits, fallbacks and transfers", "Where the script waits for a value, the device has nothing to record meanwhile.",
    el("h3", {}, "Values that the script waits for"),
    table([{ title: "line", of: (r) => code(r.line || "(a library)") }, { title: "why", of: (r) => r.reason }, { title: "times", number: true, of: (r) => r.calls },
      { title: "a step", number: true, of: (r) => milliseconds(r.ms_a_step) }, advice], rank.syncs, "None."),
    el("h3", {}, "Ops that ran on the CPU instead"),
    table([{ title: "op", of: (r) => code(r.op) }, { title: "line", of: (r) => code(r.line) }, { title: "times", number: true, of: (r) => r.calls },
      { title: "a step", number: true, of: (r) => milliseconds(r.ms_a_step) }, advice], rank.fallbacks, "None."),
    el("h3", {}, "Transfers"),
    table([{ title: "what", of: (r) => r.what }, { title: "line", of: (r) => code(r.line || "(a loader)") }, { title: "times", number: true, of: (r) => r.calls },
      { title: "bytes", number: true, of: (r) => bytes(r.bytes) }, { title: "a step", number: true, of: (r) => milliseconds(r.ms_a_step) }, advice], rank.transfers, "None."));
}

function memory() {
  const programs = rank.programs.filter((p) => p.graph);
  const content = [];
  for (const [name, points] of Object.entries(rank.curves)) {
    if (!name.endsWith(" memory") || points.length < 2) continue;
    content.push(el("h3", {}, `${name.replace(" memory", "")} over the run`), curve(points, bytes, undefined, ([at, value]) => `${milliseconds(at)}: ${bytes(value)}`));
  }
  if (programs.length) {
    const p = programs.reduce((a, b) => (b.graph.memory.peak > a.graph.memory.peak ? b : a)), m = p.graph.memory;
    const stride = Math.ceil(p.graph.nodes.length / m.curve.length) || 1;
    const made = new Map();
    p.graph.nodes.forEach((node, at) => node[OUTS].forEach((_, k) => made.set(node[FIRST] + k, at)));
    const groups = new Map();
    for (const [value, size] of m.holders) {
      const at = made.get(value), node = at === undefined ? null : p.graph.nodes[at];
      const line = node ? `${p.graph.lines[node[LINE]] || "(no line of yours)"}` : "parameters, states and data";
      const name = node ? p.graph.names[node[NAME]] + (node[BACKWARD] ? " in backward" : "") : "inputs";
      const row = groups.get(line) || { line, size: 0, count: 0, names: new Map() };
      row.size += size; row.count += 1; row.names.set(name, (row.names.get(name) || 0) + size);
      groups.set(line, row);
    }
    if (m.others) groups.set("smaller values", { line: "smaller values", size: m.others, count: 0, names: new Map() });
    content.push(el("h3", {}, `Within a step: program ${p.number}, at most ${bytes(m.peak)}`),
      curve(m.curve.map((value, k) => [k * stride, value]), bytes, Math.max(0, m.at), ([at, value]) => `after op ${at + 1} (${p.graph.names[p.graph.nodes[Math.min(at, p.graph.nodes.length - 1)][NAME]]}): ${bytes(value)}`),
      el("h3", {}, m.at >= 0 ? `Alive at the peak, op ${m.at + 1} (${p.graph.names[p.graph.nodes[m.at][NAME]]})` : "Alive at the peak, before the first op"),
      table([{ title: "made at", of: (r) => code(r.line) }, { title: "values", number: true, of: (r) => r.count || "" }, { title: "bytes", number: true, of: (r) => bytes(r.size) }, { title: "share", number: true, of: (r) => percent(r.size / m.peak) },
        { title: "by", of: (r) => [...r.names].sort((a, b) => b[1] - a[1]).slice(0, 4).map(([name, size]) => `${name} ${bytes(size)}`).join(", ") }],
      [...groups.values()].sort((a, b) => b.size - a.size)));
  }
  return section("memory", "Memory", "What a step holds by its plan: each value from the op that makes it to its last use.", ...(content.length ? content : [el("p", {}, "Nothing was recorded.")]));
}

function loader() {
  const l = rank.loader;
  if (!l) return section("data", "Data", "No loader of ours was used; uploads are under Waits.");
  const rows = [["batches", l.batches], ["reading a batch", milliseconds(l.read_ms)], ["uploading a batch", milliseconds(l.upload_ms)], ["the step waits for a batch", milliseconds(l.wait_ms)], ["share of a step", percent(l.share)]];
  const verdict = l.share > 0.1 ? "The loader is the limit: use more workers, or do less for a sample." : "The loader is not the limit.";
  return section("data", "Data", verdict + (l.here ? " Batches are read in the thread that trains, because that is quicker than another thread's handover." : ""),
    table([{ title: "what", of: (r) => r[0] }, { title: "", number: true, of: (r) => r[1] }], rows));
}

function job() {
  if (data.ranks.length < 2) return null;
  const late = data.lateness, of = new Map(late ? late.ranks.map((row) => [row.rank, row]) : []);
  const part = data.parts[2];
  return section("job", "Ranks", late ? `${late.collectives} collectives of all ranks. A rank that comes last keeps the others waiting.` : "The ranks have no collectives in common.",
    table([{ title: "rank", number: true, of: (r) => r.number }, { title: "steps", number: true, of: (r) => r.num_steps }, { title: "a step", number: true, of: (r) => milliseconds(r.mean.ms) },
      { title: "computing", number: true, of: (r) => milliseconds(r.mean.parts[data.parts[0]]) }, { title: "waits for others", number: true, of: (r) => milliseconds(r.mean.parts[part]) },
      { title: "waits for data", number: true, of: (r) => milliseconds(r.mean.parts[data.parts[1]]) },
      { title: "comes last", number: true, of: (r) => of.has(r.number) ? percent(of.get(r.number).last) : "-" }, { title: "after the first", number: true, of: (r) => of.has(r.number) ? milliseconds(of.get(r.number).late_ms) : "-" },
      { title: "", of: (r) => r.is_whole ? "" : "did not end by itself" }], data.ranks),
    el("h3", {}, `Collectives of rank ${rank.number}`),
    table([{ title: "line", of: (r) => code(r.line) }, { title: "what", of: (r) => r.plan }, { title: "times", number: true, of: (r) => r.calls }, { title: "bytes each", number: true, of: (r) => bytes(r.bytes / r.calls) },
      { title: "takes", number: true, of: (r) => milliseconds(r.mean_ms) }, { title: "bytes/s", number: true, of: (r) => bytes(r.bytes_a_second) }, { title: "waiting a step", number: true, of: (r) => milliseconds(r.wait_ms_a_step) }], rank.collectives, "None."));
}

function machine() {
  const p = rank.process, m = rank.machine;
  const rows = [["Python", p.python], ["PyTorch", p.torch], ["system", p.system], ["cores, threads", `${p.cores}, ${p.threads}`],
    ["arithmetic, measured", m.flops ? `${number(m.flops / 1e9)} GFLOP/s in float32` : "-"], ["memory, measured", m.bandwidth ? `${bytes(m.bandwidth)}/s` : "-"],
    ...Object.entries(p.settings || {})];
  return section("machine", "Machine and settings", `The timeline of this run is ${data.trace}, beside this file: https://ui.perfetto.dev opens it.`,
    table([{ title: "", of: (r) => r[0] }, { title: "", of: (r) => code(String(r[1])) }], rows));
}

function draw() {
  header();
  const sections = [summary, steps, time, programs, () => graphs.section(), waits, memory, loader, job, machine];
  document.getElementById("main").replaceChildren(...sections.map((make) => make()).filter(Boolean));
}

document.title = `${(rank.process.script || "run").slice(0, 60)} · ltc report`;
draw();
