"use strict";
// The graph of a program, folded by module: a group is opened by a click. Each open group is placed by itself, by `dagre`,
// and is one box in the group around it: so a click costs the same in a graph of any size (all at once, `dagre` took a
// second for 60 boxes). A group of more items than MOST_BELOW is cut into ranges.

const NAME = 0, LINE = 1, MODULE = 2, BACKWARD = 3, FIRST = 4, OUTS = 5, READS = 6, CONSTANTS = 7, FLOPS = 8, BYTES = 9, VIEW = 10;
const MOST_BELOW = 40, MOST_VISIBLE = 80;

/** A program's graph with its groups. */
class Model {
  constructor(program) {
    this.program = program;
    this.graph = program.graph;
    this.nodes = this.graph.nodes;
    this.us = program.node_us;
    this.madeBy = new Map();
    this.nodes.forEach((node, at) => node[OUTS].forEach((_, k) => this.madeBy.set(node[FIRST] + k, at)));
    this.inputs = new Map(this.graph.inputs.map((row, k) => [row[0], k]));
    this.readers = this.nodes.map(() => []);
    this.edges = [];
    this.nodes.forEach((node, at) => {
      for (const value of node[READS]) {
        const from = this.madeBy.get(value);
        if (from === undefined) continue;
        this.readers[from].push(at);
        this.edges.push([from, at]);
      }
    });
    this.root = { key: "", name: "", below: [], parent: null, ops: this.nodes.length };
    this.itemOf = this.nodes.map((node, at) => this._place(node, at));
    this._cut(this.root);
    this.byKey = new Map();
    this._sum(this.root, 0);
    this._join();
  }

  path(node) {
    const module = this.graph.modules[node[MODULE]];
    if (module) {
      const [first, ...rest] = module.split(".");
      return [node[BACKWARD] ? `${first} (backward)` : first, ...rest];
    }
    const line = this.graph.lines[node[LINE]] || "(no line of yours)";
    return [node[BACKWARD] ? `${line} (backward)` : line];
  }

  _place(node, at) {
    let place = this.root;
    for (const name of this.path(node)) {
      place.names ??= new Map();
      let below = place.names.get(name);
      if (!below) {
        below = { key: `${place.key}/${name}`, name, below: [], parent: place };
        place.names.set(name, below);
        place.below.push(below);
      }
      place = below;
    }
    const item = { key: `${place.key}#${at}`, name: this.graph.names[node[NAME]], at, parent: place };
    place.below.push(item);
    return item;
  }

  /** Groups of one op become the op; large ones are cut into ranges, again and again. */
  _cut(group) {
    for (const child of group.below) if (child.below) this._cut(child);
    while (group.below.length > MOST_BELOW) {
      const size = Math.ceil(group.below.length / Math.min(MOST_BELOW, Math.ceil(group.below.length / 12)));
      const ranges = [];
      for (let k = 0; k < group.below.length; k += size) {
        const items = group.below.slice(k, k + size);
        const range = { key: `${group.key}/[${k}+${size}]`, name: "", below: items, parent: group, isRange: true };
        for (const item of items) item.parent = range;
        ranges.push(range);
      }
      group.below = ranges;
    }
  }

  _sum(item, depth) {
    this.byKey.set(item.key, item);
    item.depth = depth;
    if (item.at !== undefined) {
      const node = this.nodes[item.at];
      item.ops = 1;
      item.first = item.last = item.at;
      item.us = this.us[item.at];
      item.bytes = node[BYTES];
      item.flops = node[FLOPS];
      return;
    }
    item.ops = item.us = item.bytes = item.flops = 0;
    item.first = Infinity;
    item.last = -1;
    for (const child of item.below) {
      this._sum(child, depth + 1);
      item.ops += child.ops;
      item.us += child.us;
      item.bytes += child.bytes;
      item.flops += child.flops;
      item.first = Math.min(item.first, child.first);
      item.last = Math.max(item.last, child.last);
    }
    if (item.isRange) item.name = `ops ${item.first + 1} to ${item.last + 1}`;
  }

  /** Give each group the edges between its items: what an op reads from another one is an edge where their groups part. */
  _join() {
    for (const [from, to] of this.edges) {
      const [a, b] = parted(this.itemOf[from], this.itemOf[to]);
      const edges = a.parent.edges ??= new Map();
      const key = `${a.key}\n${b.key}`, known = edges.get(key);
      if (known) known.count++; else edges.set(key, { a, b, count: 1 });
    }
  }

  /** The innermost group that is worth opening first: what has only one child is opened with it. */
  opened() {
    const open = new Set([""]);
    let group = this.root;
    while (group.below.filter((c) => c.below).length === 1 && group.below.length < 3) {
      group = group.below.find((c) => c.below);
      open.add(group.key);
    }
    return open;
  }

  type(index) { return index < 0 ? "-" : this.graph.types[index]; }

  describe(at) {
    const node = this.nodes[at];
    return { name: this.graph.names[node[NAME]], line: this.graph.lines[node[LINE]], module: this.graph.modules[node[MODULE]],
      constants: this.graph.constants[node[CONSTANTS]], outs: node[OUTS].map((k) => this.type(k)) };
  }
}

/** Draws a model. `marks`: position of a node -> "added", "missing" or "changed". */
class Viewer {
  constructor(model, options = {}) {
    this.model = model;
    this.title = options.title || "";
    this.marks = options.marks || new Map();
    this.onopen = options.onopen || (() => {});
    this.open = model.opened();
    this.order = [];
    this.by = "us";
    this.selected = null;
    this.svg = el("svg", { role: "img", "aria-label": `graph of ${counted(model.nodes.length, "op")}` });
    this.world = el("g");
    this.svg.append(el("defs", {}, el("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" },
      el("path", { d: "M0 0L8 4L0 8z", fill: "#8894a5" }))), this.world);
    this.head = el("div", { class: "head" });
    this.details = el("div", { class: "details" });
    this.element = el("div", { class: "viewer" }, el("div", { class: "canvas" }, this.head, this.svg), this.details);
    this.view = { x: 0, y: 0, k: 1 };
    this._pan();
    this.draw();
    this.select(null);
  }

  // -- what is visible ------------------------------------------------------------------------------

  visible() {
    const found = [];
    const visit = (group) => {
      for (const child of group.below) if (child.below && this.open.has(child.key)) visit(child); else found.push(child);
    };
    visit(this.model.root);
    return found;
  }

  toggle(item, quietly) {
    if (!item.below) return;
    if (this.open.has(item.key)) {
      for (const key of [...this.open]) if (key === item.key || key.startsWith(`${item.key}/`)) this.open.delete(key);
    } else {
      this._openAll(item);
    }
    this.draw(item);
    if (!quietly) this.onopen(item.key, this.open.has(item.key));
  }

  /** Open a group and those around it. If too much is visible, the groups opened longest ago are closed. */
  _openAll(item) {
    const needed = new Set([""]);
    for (let group = item; group; group = group.parent) { needed.add(group.key); this.open.add(group.key); }
    this.order = this.order.filter((key) => !needed.has(key));
    while (this.visible().length > MOST_VISIBLE && this.order.length) this.open.delete(this.order.shift());
    if (this.visible().length > MOST_VISIBLE) {
      for (const key of [...this.open]) if (!needed.has(key)) this.open.delete(key);
    }
    for (const key of needed) if (key) this.order.push(key);
  }

  reveal(at) {
    const item = this.model.itemOf[at];
    this._openAll(item.parent);
    this.draw(item);
    this.select(item);
  }

  // -- drawing --------------------------------------------------------------------------------------

  draw(focus) {
    const items = this.visible(), model = this.model;
    const most = Math.max(...items.map((item) => item[this.by]), 1e-9);
    this.placed = new Map();
    this.lines = [];
    const clusters = [], edges = [], boxes = [];
    this.size = this._layout(model.root);
    this._put(model.root, 0, 0, most, clusters, edges, boxes);
    this._across(items, edges);
    this.world.replaceChildren(...clusters, ...edges, ...boxes);
    this.head.textContent = `${this.title}${counted(model.nodes.length, "op")}, ${items.length} groups and ops shown`;
    this._show(focus);
    this._mark();
  }

  /** Place the items of an open group, relative to its corner; returns the layout, kept until a size changes. */
  _layout(group) {
    const sizes = group.below.map((item) => {
      if (item.below && this.open.has(item.key)) { const inner = this._layout(item); return [inner.width, inner.height]; }
      return [Math.min(230, 26 + 7.4 * Math.max(Math.min(item.name.length, 28), this._sub(item).length)), 38];
    });
    const key = sizes.join(";");
    this.layouts ??= new Map();
    const known = this.layouts.get(group.key);
    if (known && known.key === key) return known;
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ nodesep: 18, ranksep: 30, edgesep: 10, marginx: 12, marginy: 12 });
    graph.setDefaultEdgeLabel(() => ({}));
    group.below.forEach((item, k) => graph.setNode(item.key, { width: sizes[k][0], height: sizes[k][1] }));
    for (const { a, b, count } of (group.edges || new Map()).values()) graph.setEdge(a.key, b.key, { count });
    dagre.layout(graph);
    const top = group.key ? 20 : 0;
    const found = {
      key, width: graph.graph().width, height: graph.graph().height + top,
      places: group.below.map((item) => { const { x, y, width, height } = graph.node(item.key); return { x, y: y + top, width, height }; }),
      edges: graph.edges().map((edge) => ({ from: edge.v, to: edge.w, ...graph.edge(edge) })).map((edge) => ({ ...edge, points: edge.points.map(({ x, y }) => ({ x, y: y + top })) })),
    };
    this.layouts.set(group.key, found);
    return found;
  }

  _put(group, left, top, most, clusters, edges, boxes) {
    const layout = this._layout(group);
    if (group.key) clusters.push(this._cluster(group, left, top, layout));
    for (const edge of layout.edges) {
      const ends = [edge.from, edge.to].map((key) => this.model.byKey.get(key));
      if (ends.some((item) => item.below && this.open.has(item.key))) continue;  // drawn between their items
      edges.push(this._edge(ends[0], ends[1], curved(edge.points.map(({ x, y }) => ({ x: x + left, y: y + top }))), edge.count));
    }
    group.below.forEach((item, k) => {
      const { x, y, width, height } = layout.places[k];
      const at = { x: left + x, y: top + y, width, height };
      if (item.below && this.open.has(item.key)) {
        this._put(item, at.x - width / 2, at.y - height / 2, most, clusters, edges, boxes);
      } else {
        this.placed.set(item.key, at);
        boxes.push(this._item(item, at, most));
      }
    });
  }

  /** Edges between items of different groups. */
  _across(items, edges) {
    const owner = new Int32Array(this.model.nodes.length);
    items.forEach((item, k) => this._own(item, k, owner));
    const between = new Map();
    for (const [from, to] of this.model.edges) {
      const a = owner[from], b = owner[to];
      if (a !== b && items[a].parent !== items[b].parent) between.set(a * items.length + b, (between.get(a * items.length + b) || 0) + 1);
    }
    for (const [pair, count] of between) {
      const a = items[Math.floor(pair / items.length)], b = items[pair % items.length];
      const from = this.placed.get(a.key), to = this.placed.get(b.key);
      const y0 = from.y + from.height / 2, y1 = to.y - to.height / 2, bend = Math.max(30, Math.min(160, Math.abs(y1 - y0) / 2));
      edges.push(this._edge(a, b, `M${from.x} ${y0}C${from.x} ${y0 + bend} ${to.x} ${y1 - bend} ${to.x} ${y1}`, count, "across"));
    }
  }

  _edge(a, b, d, count, kind) {
    const path = el("path", { class: `edge ${kind || ""}`, d, "marker-end": "url(#arrow)" });
    if (count > 1) path.style.strokeWidth = Math.min(4, 1 + Math.log2(count) / 2);
    this.lines.push([a.key, b.key, path]);
    return path;
  }

  _own(item, k, owner) {
    if (item.at !== undefined) owner[item.at] = k;
    else for (const child of item.below) this._own(child, k, owner);
  }

  _sub(item) {
    if (item.at === undefined) return `${counted(item.ops, "op")}, ${milliseconds(item.us / 1000)}`;
    const outs = this.model.nodes[item.at][OUTS];
    return `${outs.length ? this.model.type(outs[0]) : ""}${outs.length > 1 ? ", ..." : ""}`.slice(0, 30);
  }

  _markOf(item) {
    if (!this.marks.size) return "";
    if (item.at !== undefined) return this.marks.get(item.at) || "";
    const found = new Set(item.below.map((child) => this._markOf(child)).filter(Boolean));
    return found.size === 1 ? [...found][0] : found.size ? "changed" : "";
  }

  _item(item, at, most) {
    const share = item[this.by] / most, short = item.name.length > 28 ? `…${item.name.slice(-27)}` : item.name;
    const box = el("g", {
      class: `item ${item.below ? "group" : "op"} ${this._markOf(item)}`, "data-key": item.key, tabindex: 0, role: "button", "aria-label": item.name,
      transform: `translate(${at.x - at.width / 2} ${at.y - at.height / 2})`,
      onclick: () => (item.below ? this.toggle(item) : this.select(item)),
      onkeydown: (event) => { if (event.key === "Enter") { if (item.below) this.toggle(item); else this.select(item); } },
      onmousemove: (event) => showTip(event, `${item.name}\n${this._sub(item)}\n${milliseconds(item.us / 1000)}, ${bytes(item.bytes)}, ${number(item.flops / 1e6)} MFLOP`),
      onmouseleave: hideTip,
    },
    el("rect", { width: at.width, height: at.height, rx: item.below ? 8 : 3 }),
    el("rect", { x: 1, y: 1, width: at.width - 2, height: at.height - 2, rx: item.below ? 7 : 2, style: `stroke: none; pointer-events: none; fill: rgba(var(--heat), ${(0.6 * share).toFixed(3)})` }),
    el("text", { x: at.width / 2, y: 16, "text-anchor": "middle" }, (item.below ? "▸ " : "") + short),
    el("text", { x: at.width / 2, y: 31, "text-anchor": "middle", class: "soft" }, this._sub(item)));
    return box;
  }

  _cluster(group, left, top, { width, height }) {
    return el("g", { class: "cluster" },
      el("rect", { x: left, y: top, width, height, rx: 8 }),
      el("text", { x: left + 8, y: top + 15, "data-close": group.key, onclick: () => this.toggle(group) }, `▾ ${group.name}`));
  }

  setColor(by) { this.by = by; this.draw(this.selected); }

  // -- selection ------------------------------------------------------------------------------------

  select(item) {
    this.selected = item;
    this._mark();
    const model = this.model;
    if (!item) {
      const slow = model.us.map((us, at) => [us, at]).sort((a, b) => b[0] - a[0]).slice(0, 12).filter(([us]) => us > 0);
      this.details.replaceChildren(el("b", {}, "Slowest ops"), this._links(slow.map(([us, at]) => [at, milliseconds(us / 1000)])),
        el("p", { class: "note" }, model.program.is_measured ? "Measured in a run that called the ops one by one." : "Estimated from their work: this program was loaded compiled, and its ops were never called one by one."));
      return;
    }
    const node = model.nodes[item.at], told = model.describe(item.at);
    const rows = [["line", told.line || "-"], ["module", told.module || "-"], ["makes", told.outs.join(", ")]];
    if (told.constants) rows.push(["arguments", told.constants]);
    rows.push(["time", milliseconds(item.us / 1000)], ["work", `${number(item.flops / 1e6)} MFLOP, ${bytes(item.bytes)}`]);
    if (node[BACKWARD]) rows.push(["", "recorded in backward"]);
    if (node[VIEW]) rows.push(["", "a view: it moves nothing"]);
    const made = node[READS].filter((value) => model.madeBy.has(value)).map((value) => [model.madeBy.get(value), ""]);
    const given = node[READS].filter((value) => model.inputs.has(value)).map((value) => {
      const row = model.graph.inputs[model.inputs.get(value)];
      return el("div", { class: "mono" }, `input ${model.inputs.get(value)}: ${model.type(row[1])}${row[2] ? ", given up" : ""}`);
    });
    this.details.replaceChildren(el("b", { class: "mono" }, `${item.at + 1}: ${told.name}`),
      el("dl", {}, rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      el("b", {}, "Reads"), ...given, this._links(made), el("b", {}, "Is read by"), this._links([...new Set(model.readers[item.at])].map((at) => [at, ""])));
  }

  _links(rows) {
    return el("div", { class: "results" }, rows.slice(0, 60).map(([at, text]) => {
      const told = this.model.describe(at);
      return el("button", { onclick: () => this.reveal(at) }, `${at + 1}: ${told.name} ${text || told.outs[0] || ""}`);
    }));
  }

  _mark() {
    const key = this.selected && this.selected.key;
    for (const box of this.world.querySelectorAll(".item")) box.classList.toggle("selected", box.dataset.key === key);
    for (const [from, to, path] of this.lines || []) path.classList.toggle("near", Boolean(key) && (from === key || to === key));
  }

  /** Positions of the ops whose name, module or line has the text. */
  find(text) {
    const wanted = text.toLowerCase();
    const found = [];
    for (let at = 0; at < this.model.nodes.length && found.length < 200; at++) {
      const told = this.model.describe(at);
      if (`${told.name} ${told.module} ${told.line}`.toLowerCase().includes(wanted)) found.push(at);
    }
    return found;
  }

  // -- moving ---------------------------------------------------------------------------------------

  _show(focus) {
    const box = this.svg.getBoundingClientRect(), wide = box.width || 900, high = box.height || 540;
    let at = focus && this.placed.get(focus.key);
    if (focus && !at) {  // a group that was opened: its first item
      for (let item = focus; item && !at; item = item.below && item.below[0]) at = this.placed.get(item.key);
    }
    const whole = Math.min(1.2, wide / (this.size.width || 1), high / (this.size.height || 1));
    const k = Math.max(whole, at ? 0.75 : 0.45);
    this.view = at ? { k, x: wide / 2 - at.x * k, y: high / 2 - at.y * k } : { k, x: (wide - this.size.width * k) / 2, y: whole === k ? (high - this.size.height * k) / 2 : 24 };
    this._move();
  }

  fit() { this._show(null); }

  _move() { this.world.setAttribute("transform", `translate(${this.view.x} ${this.view.y}) scale(${this.view.k})`); }

  _pan() {
    let from = null;
    this.svg.addEventListener("pointerdown", (event) => { from = { x: event.clientX, y: event.clientY, view: { ...this.view } }; });
    addEventListener("pointermove", (event) => {
      if (!from) return;
      this.view.x = from.view.x + event.clientX - from.x;
      this.view.y = from.view.y + event.clientY - from.y;
      this._move();
    });
    addEventListener("pointerup", () => { from = null; });
    this.svg.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = this.svg.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      const k = Math.min(4, Math.max(0.05, this.view.k * Math.exp(-event.deltaY / 500)));
      this.view.x = x - (x - this.view.x) * k / this.view.k;
      this.view.y = y - (y - this.view.y) * k / this.view.k;
      this.view.k = k;
      this._move();
    }, { passive: false });
  }
}

/** The items of one group that two items are in. */
function parted(a, b) {
  while (a.depth > b.depth) a = a.parent;
  while (b.depth > a.depth) b = b.parent;
  while (a.parent !== b.parent) { a = a.parent; b = b.parent; }
  return [a, b];
}

function curved(points) {
  let text = `M${points[0].x} ${points[0].y}`;
  for (let k = 1; k < points.length - 1; k++) {
    const next = points[k + 1];
    const x = k < points.length - 2 ? (points[k].x + next.x) / 2 : next.x, y = k < points.length - 2 ? (points[k].y + next.y) / 2 : next.y;
    text += `Q${points[k].x} ${points[k].y} ${x} ${y}`;
  }
  return points.length === 2 ? `${text}L${points[1].x} ${points[1].y}` : text;
}

// -- differences --------------------------------------------------------------------------------------

/** What changed between two graphs: marks for both, and the changes in words. Ops are aligned in order, by op, line and module. */
function difference(old, now) {
  const key = (model, at) => {
    const node = model.nodes[at];
    return `${model.graph.names[node[NAME]]}|${model.graph.lines[node[LINE]]}|${model.graph.modules[node[MODULE]]}|${node[BACKWARD]}`;
  };
  const a = old.nodes.map((_, at) => key(old, at)), b = now.nodes.map((_, at) => key(now, at));
  const pairs = aligned(a, b);
  const oldMarks = new Map(a.map((_, at) => [at, "missing"])), newMarks = new Map(b.map((_, at) => [at, "added"]));
  const changes = [];
  for (const [i, j] of pairs) {
    oldMarks.delete(i);
    newMarks.delete(j);
    const was = old.describe(i), is = now.describe(j);
    const fields = [["makes", was.outs.join(", "), is.outs.join(", ")], ["arguments", was.constants, is.constants]].filter(([, x, y]) => x !== y);
    if (fields.length) {
      oldMarks.set(i, "changed");
      newMarks.set(j, "changed");
      changes.push({ at: j, kind: "changed", text: `${is.name}: ${fields.map(([name, x, y]) => `${name} ${x} → ${y}`).join("; ")}`, line: is.line });
    }
  }
  const pairedOld = new Set(pairs.map(([i]) => i)), pairedNew = new Set(pairs.map(([, j]) => j));
  a.forEach((_, i) => { if (!pairedOld.has(i)) changes.push({ at: i, kind: "missing", text: old.describe(i).name, line: old.describe(i).line }); });
  b.forEach((_, j) => { if (!pairedNew.has(j)) changes.push({ at: j, kind: "added", text: now.describe(j).name, line: now.describe(j).line }); });
  const was = old.graph.inputs.map((row) => old.type(row[1])), is = now.graph.inputs.map((row) => now.type(row[1]));
  const inputs = was.length === is.length ? was.filter((type, k) => type !== is[k]).length : null;
  return { oldMarks, newMarks, changes, inputs: inputs === null ? `${was.length} inputs became ${is.length}` : inputs ? `${counted(inputs, "input")} of another type` : "" };
}

/** Pairs of positions of a longest common subsequence; of long differing stretches the next equal ones. */
function aligned(a, b) {
  const pairs = [];
  let start = 0, endA = a.length, endB = b.length;
  while (start < endA && start < endB && a[start] === b[start]) { pairs.push([start, start]); start++; }
  const tail = [];
  while (endA > start && endB > start && a[endA - 1] === b[endB - 1]) { endA--; endB--; tail.push([endA, endB]); }
  const n = endA - start, m = endB - start;
  if (n && m && n * m <= 4e6) {
    const wide = m + 1, best = new Uint16Array((n + 1) * wide);
    for (let i = n - 1; i >= 0; i--) for (let j = m - 1; j >= 0; j--) {
      best[i * wide + j] = a[start + i] === b[start + j] ? best[(i + 1) * wide + j + 1] + 1 : Math.max(best[(i + 1) * wide + j], best[i * wide + j + 1]);
    }
    for (let i = 0, j = 0; i < n && j < m;) {
      if (a[start + i] === b[start + j]) pairs.push([start + i++, start + j++]);
      else if (best[(i + 1) * wide + j] >= best[i * wide + j + 1]) i++;
      else j++;
    }
  } else {
    const places = new Map();
    for (let j = start; j < endB; j++) { if (!places.has(b[j])) places.set(b[j], []); places.get(b[j]).push(j); }
    let from = start;
    for (let i = start; i < endA; i++) {
      const list = places.get(a[i]) || [];
      while (list.length && list[0] < from) list.shift();
      if (list.length && list[0] - from < 200) { from = list.shift() + 1; pairs.push([i, from - 1]); }
    }
  }
  return pairs.concat(tail.reverse());
}
