"use strict";
// The graph of a program, folded by module: a group is opened by a click. Each open group is placed by itself (`layered`),
// and is one box in the group around it: so a click costs the same in a graph of any size. A group of more items than
// MOST_BELOW is cut into ranges.

const NAME = 0, LINE = 1, MODULE = 2, BACKWARD = 3, FIRST = 4, OUTS = 5, READS = 6, CONSTANTS = 7, FLOPS = 8, BYTES = 9, VIEW = 10;
const MOST_BELOW = 40, MOST_VISIBLE = 80, MOST_LINKS = 60;

/** A kernel's colour: neighbours differ. */
function colorOf(kernel, opacity) { return `hsl(${(kernel.k * 137.5) % 360} 65% 50% / ${opacity})`; }

/** A program's graph with its groups. What all of it has is kept in arrays by position; what a group has, once it is drawn. */
class Model {
  constructor(program) {
    this.program = program;
    this.graph = program.graph;
    this.nodes = this.graph.nodes;
    this.us = program.node_us;
    this.inputs = new Map(this.graph.inputs.map((row, k) => [row[0], k]));
    this.makers = new Map();
    this.nodes.forEach((node, at) => { for (let k = 0; k < node[OUTS].length; k++) this.makers.set(node[FIRST] + k, at); });
    this.edges = this._edges();
    this.kernels = program.kernels.map(([name, ops], k) => ({ k, name, ops }));
    this.kernelsOf = new Map();
    for (const kernel of this.kernels) for (const at of kernel.ops) if (this.kernelsOf.has(at)) this.kernelsOf.get(at).push(kernel); else this.kernelsOf.set(at, [kernel]);
    this.eager = new Set(program.eager);
    this.root = { key: "", name: "", below: [], parent: null };
    this.places = new Map();
    this.itemOf = this.nodes.map((node, at) => this._place(node, at));
    this._cut(this.root);
    this._sum(this.root);
    this.owner = new Int32Array(this.nodes.length);
  }

  /** From and to of each value that an op makes and another one reads, one after the other. */
  _edges() {
    const found = [];
    this.nodes.forEach((node, at) => {
      for (const value of node[READS]) {
        const from = this.makers.get(value);
        if (from !== undefined) found.push(from, at);
      }
    });
    return Int32Array.from(found);
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
    const where = (node[MODULE] * this.graph.lines.length + (this.graph.modules[node[MODULE]] ? 0 : node[LINE])) * 2 + node[BACKWARD];
    let place = this.places.get(where);
    if (!place) {
      place = this.root;
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
      this.places.set(where, place);
    }
    const item = { key: `${place.key}#${at}`, name: this.graph.names[node[NAME]], at, parent: place, ops: 1, first: at, last: at, us: this.us[at], bytes: node[BYTES], flops: node[FLOPS], sub: undefined, kernels: undefined };
    place.below.push(item);
    return item;
  }

  /** Large groups are cut into ranges, and these again. */
  _cut(group) {
    for (const child of group.below) if (child.below) this._cut(child);
    this._range(group);
  }

  _range(group) {
    if (group.below.length <= MOST_BELOW) return;
    const size = Math.ceil(group.below.length / Math.min(MOST_BELOW, Math.ceil(group.below.length / 12)));
    const ranges = [];
    for (let k = 0; k < group.below.length; k += size) {
      const items = group.below.slice(k, k + size);
      const range = { key: `${group.key}/[${k}+${size}]`, name: "", below: items, parent: group, isRange: true };
      for (const item of items) item.parent = range;
      ranges.push(range);
    }
    group.below = ranges;
    for (const range of ranges) this._range(range);
  }

  /** Add up what the items of a group cost. */
  _sum(group) {
    let ops = 0, us = 0, bytes = 0, flops = 0, first = Infinity, last = -1;
    for (const child of group.below) {
      if (child.below) this._sum(child);
      ops += child.ops;
      us += child.us;
      bytes += child.bytes;
      flops += child.flops;
      if (child.first < first) first = child.first;
      if (child.last > last) last = child.last;
    }
    Object.assign(group, { ops, us, bytes, flops, first, last });
    if (group.isRange) group.name = `ops ${group.first + 1} to ${group.last + 1}`;
  }

  /** Call `visit` with the position of each op of an item. */
  each(item, visit) {
    if (item.at !== undefined) visit(item.at);
    else for (const child of item.below) this.each(child, visit);
  }

  /** Edges between some items: [position among them, position, number of values]. Other ops do not count. */
  between(items) {
    const found = new Map(), { owner, edges } = this;
    owner.fill(-1);
    items.forEach((item, k) => this.each(item, (at) => { owner[at] = k; }));
    for (let k = 0; k < edges.length; k += 2) {
      const a = owner[edges[k]], b = owner[edges[k + 1]];
      if (a !== b && a >= 0 && b >= 0) found.set(a * items.length + b, (found.get(a * items.length + b) || 0) + 1);
    }
    return [...found].map(([pair, count]) => [Math.floor(pair / items.length), pair % items.length, count]);
  }

  /** Ops that read what an op makes. */
  readers(at) {
    const found = [];
    for (let k = 0; k < this.edges.length; k += 2) if (this.edges[k] === at && found[found.length - 1] !== this.edges[k + 1]) found.push(this.edges[k + 1]);
    return found;
  }

  /** The kernels that compute an item's ops. */
  kernelsIn(item) {
    if (!item.kernels) {
      const found = new Set();
      this.each(item, (at) => { for (const kernel of this.kernelsOf.get(at) || []) found.add(kernel); });
      item.kernels = [...found].sort((a, b) => a.k - b.k);
    }
    return item.kernels;
  }

  /** The group of a key; undefined if there is none. */
  group(key) {
    if (!this.groups) {
      this.groups = new Map();
      const visit = (item) => { this.groups.set(item.key, item); for (const child of item.below) if (child.below) visit(child); };
      visit(this.root);
    }
    return this.groups.get(key);
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
    this.lit = new Set();  // the kernels whose ops are outlined
    this.svg = el("svg", { role: "img", "aria-label": `graph of ${counted(model.nodes.length, "op")}` });
    this.world = el("g");
    this.svg.append(el("defs", {}, el("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" },
      el("path", { d: "M0 0L8 4L0 8z", fill: "#8894a5" }))), this.world);
    this.head = el("div", { class: "head" });
    this.details = el("div", { class: "details" });
    this.element = el("div", { class: "viewer" }, el("div", { class: "canvas" }, this.head, this.svg), this.details);
    this.view = { x: 0, y: 0, k: 1 };
    this.box = { width: 0, height: 0 };
    this.layouts = new Map();
    this.groupMarks = this._groupMarks();
    this._pan();
    new ResizeObserver(([entry]) => {  // asked for in `_show`, the size would cost a layout of the page
      const isFirst = !this.box.width;
      this.box = entry.contentRect;
      if (isFirst) this.fit();
    }).observe(this.svg);
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
    this.placed = new Map();
    this.boxes = new Map();
    this.heats = new Map();
    this.lines = [];
    const clusters = [], edges = [], boxes = [];
    this.size = this._layout(model.root);
    this._put(model.root, 0, 0, clusters, edges, boxes);
    this._across(items, edges);
    this.world.replaceChildren(...clusters, ...edges, ...boxes);
    const kernels = model.kernels.length ? `, which ${counted(model.kernels.length, "kernel call")} compute` : "";
    this.head.textContent = `${this.title}${counted(model.nodes.length, "op")}${kernels}; ${items.length} groups and ops shown`;
    this._heat();
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
    const known = this.layouts.get(group.key);
    if (known && known.key === key) return known;
    const edges = group.edges ??= this.model.between(group.below), top = group.key ? 20 : 0;
    const { width, height, places, routes } = layered(sizes, edges);
    const lowered = (place) => ({ ...place, y: place.y + top });
    const found = {
      key, width, height: height + top, places: places.map(lowered),
      edges: edges.map(([from, to, count], k) => ({ from, to, count, points: routes[k] && routes[k].map(lowered) })),
    };
    this.layouts.set(group.key, found);
    return found;
  }

  _put(group, left, top, clusters, edges, boxes) {
    const layout = this._layout(group);
    if (group.key) clusters.push(this._cluster(group, left, top, layout));
    for (const edge of layout.edges) {
      const from = group.below[edge.from], to = group.below[edge.to];
      if ([from, to].some((item) => item.below && this.open.has(item.key))) continue;  // drawn between their items
      const moved = (place) => ({ ...place, x: place.x + left, y: place.y + top });
      if (edge.points) edges.push(this._edge(from, to, curved(edge.points.map(moved)), edge.count));
      else edges.push(this._arc(from, to, moved(layout.places[edge.from]), moved(layout.places[edge.to]), edge.count));
    }
    group.below.forEach((item, k) => {
      const { x, y, width, height } = layout.places[k];
      const at = { x: left + x, y: top + y, width, height };
      if (item.below && this.open.has(item.key)) {
        this._put(item, at.x - width / 2, at.y - height / 2, clusters, edges, boxes);
      } else {
        this.placed.set(item.key, at);
        boxes.push(this._item(item, at));
      }
    });
  }

  /** Edges between items of different groups. */
  _across(items, edges) {
    for (const [k, l, count] of this.model.between(items)) {
      const a = items[k], b = items[l];
      if (a.parent !== b.parent) edges.push(this._arc(a, b, this.placed.get(a.key), this.placed.get(b.key), count));
    }
  }

  /** An edge that is not led around boxes. */
  _arc(a, b, from, to, count) {
    const y0 = from.y + from.height / 2, y1 = to.y - to.height / 2, bend = Math.max(30, Math.min(160, Math.abs(y1 - y0) / 2));
    return this._edge(a, b, `M${from.x} ${y0}C${from.x} ${y0 + bend} ${to.x} ${y1 - bend} ${to.x} ${y1}`, count, "across");
  }

  _edge(a, b, d, count, kind) {
    const path = el("path", { class: `edge ${kind || ""}`, d, "marker-end": "url(#arrow)" });
    if (count > 1) path.style.strokeWidth = Math.min(4, 1 + Math.log2(count) / 2);
    this.lines.push([a, b, path]);
    return path;
  }

  /** The second line of a box; formatting numbers takes longer than drawing them. */
  _sub(item) {
    if (item.sub === undefined) {
      const outs = item.at === undefined ? [] : this.model.nodes[item.at][OUTS];
      if (item.at === undefined) item.sub = `${counted(item.ops, "op")}, ${milliseconds(item.us / 1000)}`;
      else item.sub = `${outs.length ? this.model.type(outs[0]) : ""}${outs.length > 1 ? ", ..." : ""}`.slice(0, 30);
    }
    return item.sub;
  }

  /** Mark of each op that has one, and of the groups around it; "changed" where they differ. */
  _groupMarks() {
    const found = new Map();
    for (const [at, mark] of this.marks) {
      for (let item = this.model.itemOf[at]; item; item = item.parent) found.set(item, (found.get(item) ?? mark) === mark ? mark : "changed");
    }
    return found;
  }

  _item(item, at) {
    const short = item.name.length > 28 ? `…${item.name.slice(-27)}` : item.name;
    const heat = el("rect", { class: "heat", x: 1, y: 1, width: at.width - 2, height: at.height - 2, rx: item.below ? 7 : 2 });
    const box = el("g", {
      class: `item ${item.below ? "group" : "op"} ${this.groupMarks.get(item) || ""}`, "data-key": item.key, tabindex: 0, role: "button", "aria-label": item.name,
      transform: `translate(${at.x - at.width / 2} ${at.y - at.height / 2})`,
      onclick: () => (item.below ? this.toggle(item) : this.select(item)),
      onkeydown: (event) => { if (event.key === "Enter") { if (item.below) this.toggle(item); else this.select(item); } },
      onmousemove: (event) => showTip(event, `${item.name}\n${this._sub(item)}\n${milliseconds(item.us / 1000)}, ${bytes(item.bytes)}, ${number(item.flops / 1e6)} MFLOP${this._kernelText(item)}`),
      onmouseleave: hideTip,
    },
    el("rect", { width: at.width, height: at.height, rx: item.below ? 8 : 3 }),
    heat,
    el("text", { x: at.width / 2, y: 16, "text-anchor": "middle" }, (item.below ? "▸ " : "") + short),
    el("text", { x: at.width / 2, y: 31, "text-anchor": "middle", class: "soft" }, this._sub(item)));
    this.boxes.set(item, box);
    this.heats.set(item, heat);
    return box;
  }

  /** Fill the boxes: by time, bytes or arithmetic, or those of one kernel with its colour. */
  _heat() {
    const most = Math.max(...[...this.heats.keys()].map((item) => item[this.by] || 0), 1e-9);
    for (const [item, rect] of this.heats) {
      const kernels = this.by === "kernel" ? this.model.kernelsIn(item) : [];
      if (this.by !== "kernel") rect.style.fill = `rgba(var(--heat), ${(0.6 * item[this.by] / most).toFixed(3)})`;
      else rect.style.fill = kernels.length === 1 || (kernels.length && !item.below) ? colorOf(kernels[0], 0.45) : "none";
    }
  }

  _kernelText(item) {
    const kernels = this.model.kernelsIn(item);
    if (!kernels.length) return "";
    return `\n${kernels.length > 2 ? counted(kernels.length, "kernel") : kernels.map((kernel) => titleOf(kernel)).join("\n")}`;
  }

  _cluster(group, left, top, { width, height }) {
    return el("g", { class: "cluster" },
      el("rect", { x: left, y: top, width, height, rx: 8 }),
      el("text", { x: left + 8, y: top + 15, "data-close": group.key, onclick: () => this.toggle(group) }, `▾ ${group.name}`));
  }

  setColor(by) { this.by = by; this._heat(); }

  // -- selection ------------------------------------------------------------------------------------

  select(item) {
    this.selected = item;
    this.lit = new Set(item ? this.model.kernelsIn(item) : []);
    this._mark();
    this.details.replaceChildren(...(item ? this._ofOp(item) : this._ofAll()));
  }

  /** Show a kernel: the ops that it computes, here and in the graph. */
  selectKernel(kernel) {
    this.selected = null;
    this.lit = new Set([kernel]);
    this._mark();
    this.details.replaceChildren(el("b", { class: "mono" }, titleOf(kernel)), el("p", { class: "note" }, `Computes ${counted(kernel.ops.length, "op")}, outlined in the graph where they are visible.`),
      this._links(kernel.ops.map((at) => [at, ""])));
  }

  _ofAll() {
    const { us, program, kernels, kernelsOf } = this.model;
    const slow = greatest(us, 12).filter((at) => us[at] > 0);
    const large = greatest(kernels.map((kernel) => kernel.ops.length), 12).map((k) => kernels[k]);
    return [el("b", {}, "Slowest ops"), this._links(slow.map((at) => [at, milliseconds(us[at] / 1000)])),
      el("p", { class: "note" }, program.is_measured ? "Measured in a run that called the ops one by one." : "Estimated from their work: this program was loaded compiled, and its ops were never called one by one."),
      ...(kernels.length ? [el("b", {}, "Kernels of most ops"), el("p", { class: "note" }, `${counted(kernels.length, "kernel call")} compute ${counted(kernelsOf.size, "op")}.`), this._kernels(large)] : [])];
  }

  _ofOp(item) {
    const model = this.model, node = model.nodes[item.at], told = model.describe(item.at);
    const rows = [["line", told.line || "-"], ["module", told.module || "-"], ["makes", told.outs.join(", ")]];
    if (told.constants) rows.push(["arguments", told.constants]);
    rows.push(["time", milliseconds(item.us / 1000)], ["work", `${number(item.flops / 1e6)} MFLOP, ${bytes(item.bytes)}`]);
    if (node[BACKWARD]) rows.push(["", "recorded in backward"]);
    if (node[VIEW]) rows.push(["", "a view: it moves nothing"]);
    const made = node[READS].filter((value) => model.makers.has(value)).map((value) => [model.makers.get(value), ""]);
    const given = node[READS].filter((value) => model.inputs.has(value)).map((value) => {
      const row = model.graph.inputs[model.inputs.get(value)];
      return el("div", { class: "mono" }, `input ${model.inputs.get(value)}: ${model.type(row[1])}${row[2] ? ", given up" : ""}`);
    });
    return [el("b", { class: "mono" }, `${item.at + 1}: ${told.name}`),
      el("dl", {}, rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      ...this._fusion(item.at),
      el("b", {}, "Reads"), ...given, this._links(made), el("b", {}, "Is read by"), this._links(model.readers(item.at).map((at) => [at, ""]))];
  }

  /** The kernels of an op, and the ops that they compute together with it. */
  _fusion(at) {
    const model = this.model, kernels = model.kernelsIn(model.itemOf[at]);
    if (!model.kernels.length) return [];
    if (!kernels.length) {
      const why = model.eager.has(at) ? "None: it is called by itself, between compiled code." : "None: compiled code does not need its value, or an equal op computes it.";
      return model.nodes[at][VIEW] ? [] : [el("b", {}, "Kernel"), el("p", { class: "note" }, why)];
    }
    const others = new Set(kernels.flatMap((kernel) => kernel.ops));
    others.delete(at);
    return [el("b", {}, kernels.length > 1 ? `Computed in ${kernels.length} kernels` : "Runs in kernel"), this._kernels(kernels),
      ...(others.size ? [el("b", {}, `together with ${counted(others.size, "other op")}`), this._links([...others].sort((a, b) => a - b).map((other) => [other, ""]))] : [])];
  }

  _kernels(kernels) {
    return el("div", { class: "results" }, kernels.slice(0, MOST_LINKS).map((kernel) => el("button", { "data-kernel": kernel.k, onclick: () => this.selectKernel(kernel) },
      el("i", { class: "swatch", style: `background: ${colorOf(kernel, 1)}` }), `${titleOf(kernel)} · ${counted(kernel.ops.length, "op")}`)));
  }

  _links(rows) {
    return el("div", { class: "results" }, rows.slice(0, MOST_LINKS).map(([at, text]) => {
      const told = this.model.describe(at);
      return el("button", { "data-op": at, onclick: () => this.reveal(at) }, `${at + 1}: ${told.name} ${text || told.outs[0] || ""}`);
    }));
  }

  _mark() {
    for (const [item, box] of this.boxes) {
      const shared = this.lit.size ? this.model.kernelsIn(item).find((kernel) => this.lit.has(kernel)) : undefined;
      box.classList.toggle("selected", item === this.selected);
      box.classList.toggle("fused", shared !== undefined);
      box.style.setProperty("--kernel", shared ? colorOf(shared, 1) : "");
    }
    for (const [from, to, path] of this.lines) path.classList.toggle("near", this.selected !== null && (from === this.selected || to === this.selected));
  }

  /** Positions of the ops whose name, module, line or kernel has the text. */
  find(text) {
    const { model } = this, { graph } = model, wanted = text.toLowerCase();
    model.texts ??= model.nodes.map((node, at) => [graph.names[node[NAME]], graph.modules[node[MODULE]], graph.lines[node[LINE]], ...(model.kernelsOf.get(at) || []).map(titleOf)].join(" ").toLowerCase());
    const found = [];
    for (let at = 0; at < model.texts.length && found.length < 200; at++) if (model.texts[at].includes(wanted)) found.push(at);
    return found;
  }

  // -- moving ---------------------------------------------------------------------------------------

  _show(focus) {
    const wide = this.box.width || 900, high = this.box.height || 540;
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

/** A kernel call in words. */
function titleOf(kernel) { return `${kernel.k + 1}: ${kernel.name}`; }

/** Positions of the greatest values, the greatest first. */
function greatest(values, count) {
  const found = [];
  for (let at = 0; at < values.length; at++) {
    if (found.length === count && values[at] <= values[found[count - 1]]) continue;
    let k = found.length;
    while (k && values[found[k - 1]] < values[at]) k--;
    found.splice(k, 0, at);
    if (found.length > count) found.pop();
  }
  return found;
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
  const [a, b] = keysOf([old, now]);
  const pairs = aligned(a, b);
  const oldMarks = new Map(), newMarks = new Map(), changes = [];
  const pairedOld = new Uint8Array(a.length), pairedNew = new Uint8Array(b.length);
  for (const [i, j] of pairs) {
    pairedOld[i] = pairedNew[j] = 1;
    if (alike(old, i, now, j)) continue;
    const was = old.describe(i), is = now.describe(j);
    const fields = [["makes", was.outs.join(", "), is.outs.join(", ")], ["arguments", was.constants, is.constants]].filter(([, x, y]) => x !== y);
    oldMarks.set(i, "changed");
    newMarks.set(j, "changed");
    changes.push({ at: j, kind: "changed", text: `${is.name}: ${fields.map(([name, x, y]) => `${name} ${x} → ${y}`).join("; ")}`, line: is.line });
  }
  const note = (model, paired, marks, kind) => paired.forEach((is, at) => {
    if (is) return;
    const told = model.describe(at);
    marks.set(at, kind);
    changes.push({ at, kind, text: told.name, line: told.line });
  });
  note(old, pairedOld, oldMarks, "missing");
  note(now, pairedNew, newMarks, "added");
  const was = old.graph.inputs.map((row) => old.type(row[1])), is = now.graph.inputs.map((row) => now.type(row[1]));
  const inputs = was.length === is.length ? was.filter((type, k) => type !== is[k]).length : null;
  return { oldMarks, newMarks, changes, inputs: inputs === null ? `${was.length} inputs became ${is.length}` : inputs ? `${counted(inputs, "input")} of another type` : "" };
}

/** For each model a number for each op: the same for ops of the same name, line, module and direction. */
function keysOf(models) {
  const known = new Map();
  const numberOf = (text) => { if (!known.has(text)) known.set(text, known.size); return known.get(text); };
  const tables = models.map(({ graph }) => [graph.names, graph.lines, graph.modules].map((table) => table.map(numberOf)));
  return models.map(({ nodes }, k) => {
    const [names, lines, modules] = tables[k], size = known.size;
    return nodes.map((node) => ((names[node[NAME]] * size + lines[node[LINE]]) * size + modules[node[MODULE]]) * 2 + node[BACKWARD]);
  });
}

/** Whether two ops make the same types and have the same arguments. */
function alike(old, i, now, j) {
  const was = old.nodes[i], is = now.nodes[j];
  return old.graph.constants[was[CONSTANTS]] === now.graph.constants[is[CONSTANTS]] && was[OUTS].length === is[OUTS].length
    && was[OUTS].every((type, k) => old.type(type) === now.type(is[OUTS][k]));
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
