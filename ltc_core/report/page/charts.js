"use strict";
// Building blocks of the page. Texts enter it by `textContent` alone, so that no name of an op or a file is run.

const NUMBER = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

/** An element with attributes, listeners (on...) and children; texts become text nodes. */
function el(name, attributes, ...children) {
  const svg = ["svg", "g", "rect", "path", "text", "title", "defs", "marker"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") made.style.cssText = value;
    else made.setAttribute(key, value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
  return made;
}

function number(value) { return NUMBER.format(value); }

function milliseconds(value) {
  return value >= 1000 ? `${number(value / 1000)} s` : value >= 0.1 ? `${number(value)} ms` : `${number(value * 1000)} µs`;
}

function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${number(value)} ${unit}`;
    value /= 1024;
  }
  return `${number(value)} TiB`;
}

function counted(value, word) { return `${value} ${word}${value === 1 ? "" : "s"}`; }

function percent(value) { return `${number(100 * value)} %`; }

function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// -- hints ------------------------------------------------------------------------------------------

const tip = el("div", { class: "tip", hidden: "" });
document.addEventListener("DOMContentLoaded", () => document.body.append(tip));

function showTip(event, text) {
  tip.hidden = false;
  tip.textContent = text;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const top = event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${top}px`;
}

function hideTip() { tip.hidden = true; }

// -- tables -----------------------------------------------------------------------------------------

/** A table. Columns: {title, of(row): text or node, number: bool}. */
function table(columns, rows, none) {
  if (!rows.length) return el("p", { class: "note" }, none || "Nothing.");
  const head = el("tr", {}, columns.map((c) => el("th", { class: c.number ? "number" : null, scope: "col" }, c.title)));
  const body = rows.map((row) => el("tr", {}, columns.map((c) => el("td", { class: c.number ? "number" : null }, c.of(row)))));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, body)));
}

function code(text) { return el("code", {}, text); }

// -- charts -----------------------------------------------------------------------------------------

/** A canvas that is drawn again when its size or the colours change. `draw(context, width, height)`. */
function chart(height, draw, hover) {
  const canvas = el("canvas", { style: `height: ${height}px`, role: "img" });
  const again = () => {
    const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    draw(context, width, height);
  };
  new ResizeObserver(again).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  if (hover) {
    canvas.addEventListener("mousemove", (event) => {
      const text = hover(event.offsetX, canvas.clientWidth);
      if (text) showTip(event, text); else hideTip();
    });
    canvas.addEventListener("mouseleave", hideTip);
  }
  return canvas;
}

const LEFT = 62, BELOW = 22;

function axis(context, width, height, most, text) {
  context.fillStyle = color("--soft");
  context.strokeStyle = color("--line");
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let k = 0; k <= 4; k++) {
    const y = (height - BELOW) * (1 - k / 4) + 6 * (k / 4);
    context.fillText(text(most * k / 4), LEFT - 8, Math.max(7, y));
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(width, y);
    context.stroke();
  }
}

/** Bars of several parts, one for each step. `steps`: [number, start, [ms of each part]]. */
function stepBars(steps, parts) {
  const totals = steps.map((s) => s[2].reduce((a, b) => a + b, 0));
  const ordered = [...totals].sort((a, b) => a - b);
  // The first steps may take a hundred times as long as the others: they are cut off, and marked.
  const most = Math.min(ordered[ordered.length - 1], 2.5 * ordered[Math.floor(ordered.length / 2)]) || 1;
  const draw = (context, width, height) => {
    axis(context, width, height, most, milliseconds);
    const wide = (width - LEFT) / steps.length, room = height - BELOW - 6;
    const colors = parts.map((_, k) => color(`--part${k}`));
    steps.forEach((step, at) => {
      let y = height - BELOW, left = room;
      step[2].forEach((ms, k) => {
        const high = Math.min(left, room * ms / most);
        left -= high;
        context.fillStyle = colors[k];
        context.fillRect(LEFT + at * wide, y - high, Math.max(1, wide - (wide > 4 ? 1 : 0)), high);
        y -= high;
      });
      if (totals[at] > most) {
        context.fillStyle = color("--bad");
        context.fillRect(LEFT + at * wide, 2, Math.max(1, wide - 1), 3);
      }
    });
    context.fillStyle = color("--soft");
    context.textAlign = "left";
    context.fillText(`step ${steps[0][0]}`, LEFT, height - 8);
    context.textAlign = "right";
    context.fillText(`step ${steps[steps.length - 1][0]}`, width, height - 8);
  };
  return chart(210, draw, (x, width) => {
    const step = steps[Math.floor((x - LEFT) / ((width - LEFT) / steps.length))];
    if (!step || x < LEFT) return "";
    const told = step[2].map((ms, k) => [ms, parts[k]]).filter(([ms]) => ms > 0).sort((a, b) => b[0] - a[0]);
    const total = step[2].reduce((a, b) => a + b, 0);
    return `step ${step[0]}: ${milliseconds(total)}\n` + told.map(([ms, part]) => `${milliseconds(ms)} ${part}`).join("\n");
  });
}

function legend(parts) {
  return el("div", { class: "legend" }, parts.map((part, k) =>
    el("span", {}, el("i", { style: `background: var(--part${k})` }), part)));
}

/** A curve over positions; `mark` is the position of a line. */
function curve(points, text, mark, hover) {
  const most = Math.max(...points.map((p) => p[1]), 1), last = points[points.length - 1][0] || 1;
  const x = (at, width) => LEFT + (width - LEFT) * at / last;
  const draw = (context, width, height) => {
    axis(context, width, height, most, text);
    const y = (value) => height - BELOW - (height - BELOW - 6) * value / most;
    context.beginPath();
    points.forEach(([at, value], k) => {
      if (k) context.lineTo(x(at, width), y(points[k - 1][1]));
      context.lineTo(x(at, width), y(value));
    });
    context.strokeStyle = color("--part0");
    context.lineWidth = 2;
    context.stroke();
    context.lineTo(x(last, width), height - BELOW);
    context.lineTo(x(points[0][0], width), height - BELOW);
    context.globalAlpha = 0.15;
    context.fillStyle = color("--part0");
    context.fill();
    context.globalAlpha = 1;
    if (mark !== undefined) {
      context.fillStyle = color("--bad");
      context.fillRect(x(mark, width) - 1, 4, 2, height - BELOW - 4);
    }
  };
  return chart(170, draw, (at, width) => {
    const place = (at - LEFT) / (width - LEFT) * last;
    if (place < 0) return "";
    let best = points[0];
    for (const point of points) if (point[0] <= place) best = point;
    return hover(best);
  });
}

/** A tree of times as nested bars; a click makes a bar the whole width. */
function icicle(root) {
  const holder = el("div", { class: "icicle" });
  const HIGH = 22;
  const draw = (top, above) => {
    holder.replaceChildren();
    let depth = 0;
    const add = (node, left, width, level, trail, kind) => {
      depth = Math.max(depth, level);
      const share = node.ms / root.ms;
      const hue = { forward: "--part0", backward: "--part3" }[kind] || "--part5";
      const button = el("button", {
        style: `left: ${left}%; width: ${width}%; top: ${level * HIGH}px; background: color-mix(in srgb, var(${hue}) ${Math.round(18 + 42 * Math.min(1, 3 * share))}%, var(--ground))`,
        onclick: () => (node === top && above.length ? draw(above[above.length - 1], above.slice(0, -1)) : draw(node, trail)),
        onmousemove: (event) => showTip(event, `${[...trail.map((n) => n.name), node.name].join(" › ")}\n${milliseconds(node.ms)} a step, ${percent(share)}`),
        onmouseleave: hideTip,
      }, width > 2.5 ? `${node.name} ${milliseconds(node.ms)}` : "");
      holder.append(button);
      let at = left;
      for (const child of node.below) {
        const wide = width * child.ms / node.ms;
        if (wide > 0.25) add(child, at, wide, level + 1, [...trail, node], level === above.length && !above.length ? child.name : kind);
        at += wide;
      }
    };
    above.forEach((node, level) => {
      depth = Math.max(depth, level);
      holder.append(el("button", { style: `left: 0; width: 100%; top: ${level * HIGH}px; background: var(--raised)`, onclick: () => draw(node, above.slice(0, level)) }, node.name));
    });
    const kind = (above[1] || (above.length ? top : null) || {}).name;
    add(top, 0, 100, above.length, above, kind);
    holder.style.height = `${(depth + 1) * HIGH}px`;
    hideTip();
  };
  draw(root, []);
  return holder;
}
