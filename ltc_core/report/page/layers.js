"use strict";
// Places boxes in layers, so that edges go down. Within a layer a box comes where its neighbours in other layers are in
// the mean. Cost: below a millisecond for 40 boxes (dagre, which searches for the best places, took 30 to 60 ms).

const GAP = 18, BETWEEN = 36, MARGIN = 12, SWEEPS = 8;
const BEND = 6;  // width that an edge is given where it passes a layer
const MOST_BENDS = 300;  // of a graph; where there were more, long edges are not led around boxes

/**
 * Places of the boxes and of the edges between them.
 * sizes: width and height of each box. edges: [from, to, ...] by position. Most edges go to later boxes; the others do not
 * count for the places. Returns {width, height, places: [{x, y, width, height}], routes: for each edge its points, or null}.
 */
function layered(sizes, edges) {
  const down = edges.filter(([from, to]) => from < to);
  const layer = layersOf(sizes.length, down);
  const spots = sizes.map(([width, height]) => ({ width, height, x: 0, y: 0, up: [], down: [] }));
  const rows = Array.from({ length: 1 + Math.max(-1, ...layer) }, () => []);
  spots.forEach((spot, k) => { if (layer[k] >= 0) rows[layer[k]].push(spot); });
  const bends = down.reduce((sum, [from, to]) => sum + layer[to] - layer[from] - 1, 0);
  const ways = edges.map(([from, to]) => {
    if (from >= to) return null;
    const way = [spots[from]], isShort = layer[to] === layer[from] + 1;
    for (let k = layer[from] + 1; k < layer[to] && bends <= MOST_BENDS; k++) {
      const bend = { width: BEND, height: 0, x: 0, y: 0, up: [], down: [] };
      rows[k].push(bend);
      way.push(bend);
    }
    way.push(spots[to]);
    for (let k = 1; k < way.length; k++) { way[k - 1].down.push(way[k]); way[k].up.push(way[k - 1]); }
    return isShort || bends <= MOST_BENDS ? way : null;
  });
  order(rows);
  align(rows);
  const size = corner(rows, spots.filter((_, k) => layer[k] < 0));
  return {
    ...size, places: spots.map(({ x, y, width, height }) => ({ x, y, width, height })),
    routes: ways.map((way) => way && way.map(({ x, y, height }, k) => ({ x, y: y + (k === 0 ? height / 2 : k === way.length - 1 ? -height / 2 : 0) }))),
  };
}

/** Layer of each box: one below the last of those that it reads, or one above the first that reads it; -1 without edges. */
function layersOf(count, edges) {
  const before = new Int32Array(count), after = Array.from({ length: count }, () => []), layer = new Array(count).fill(0);
  for (const [from, to] of edges) { after[from].push(to); before[to]++; }
  for (let k = 0; k < count; k++) for (const l of after[k]) layer[l] = Math.max(layer[l], layer[k] + 1);
  for (let k = 0; k < count; k++) if (!before[k]) layer[k] = Math.min(...after[k].map((l) => layer[l]), Infinity) - 1;
  return layer.map((value) => (value === Infinity ? -1 : value));
}

function mean(spots) { return spots.reduce((sum, spot) => sum + spot.x, 0) / spots.length; }

/** The rows from above, where the neighbours are those above, or from below. */
function swept(rows, sweep, visit) {
  if (sweep % 2) for (let k = rows.length - 1; k >= 0; k--) visit(rows[k], "down");
  else for (const row of rows) visit(row, "up");
}

/** Order each row by the places of its neighbours, again and again: so few edges cross. */
function order(rows) {
  const number = (row) => row.forEach((spot, k) => { spot.x = k - (row.length - 1) / 2; });
  rows.forEach(number);
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    swept(rows, sweep, (row, side) => {
      for (const spot of row) spot.wanted = spot[side].length ? mean(spot[side]) : spot.x;
      row.sort((a, b) => a.wanted - b.wanted);
      number(row);
    });
  }
}

/** Move the spots of each row to where their neighbours are, without changing their order. */
function align(rows) {
  for (const row of rows) { for (const spot of row) spot.wanted = 0; settle(row); }
  for (let sweep = 0; sweep <= SWEEPS; sweep++) {
    swept(rows, sweep, (row, side) => {
      for (const spot of row) spot.wanted = spot[side].length ? mean(spot[side]) : spot.x;
      settle(row);
    });
  }
}

/** Place a row so that the squares of the distances to the wanted places are least (pool adjacent violators). */
function settle(row) {
  const blocks = [];
  let offset = 0;
  row.forEach((spot, k) => {
    if (k) offset += (row[k - 1].width + spot.width) / 2 + GAP;
    spot.offset = offset;
    let sum = spot.wanted - offset, count = 1;
    while (blocks.length && blocks[blocks.length - 1].sum / blocks[blocks.length - 1].count > sum / count) {
      const last = blocks.pop();
      sum += last.sum;
      count += last.count;
    }
    blocks.push({ sum, count });
  });
  let k = 0;
  for (const { sum, count } of blocks) for (let n = 0; n < count; n++, k++) row[k].x = sum / count + row[k].offset;
}

/** Give the rows their height, put boxes without edges in columns below, and begin at the corner; returns the size. */
function corner(rows, alone) {
  let top = MARGIN;
  for (const row of rows) {
    const height = Math.max(...row.map((spot) => spot.height));
    for (const spot of row) spot.y = top + height / 2;
    top += height + BETWEEN;
  }
  const spots = rows.flat();
  const left = Math.min(...spots.map((spot) => spot.x - spot.width / 2), Infinity);
  for (const spot of spots) spot.x += MARGIN - left;
  const columns = Math.ceil(Math.sqrt(alone.length / 2)), widest = Math.max(0, ...alone.map((spot) => spot.width));
  for (let k = 0; k < alone.length; k += columns) {
    const row = alone.slice(k, k + columns), height = Math.max(...row.map((spot) => spot.height));
    row.forEach((spot, n) => { spot.x = MARGIN + n * (widest + GAP) + spot.width / 2; spot.y = top + height / 2; });
    top += height + GAP;
  }
  const right = Math.max(0, ...spots.map((spot) => spot.x + spot.width / 2), ...alone.map((spot) => spot.x + spot.width / 2));
  return { width: right + MARGIN, height: top - (alone.length ? GAP : BETWEEN) + MARGIN };
}
