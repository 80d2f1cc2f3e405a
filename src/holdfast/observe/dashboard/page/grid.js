// Nodes x workers on one canvas. A worker is a cell: its colour and its sign say the state. Few workers get large cells
// with their ranks, in a row for each node; thousands get small ones, node beside node. A change draws only the cells
// that differ.

import { element, number } from "./format.js";

const filled = (path) => ({ path: new Path2D(path), line: 0 });
const drawn = (path, line = 1.75) => ({ path: new Path2D(path), line });
const circle = (radius) => `M${radius} 0a${radius} ${radius} 0 1 1 ${-2 * radius} 0a${radius} ${radius} 0 1 1 ${2 * radius} 0`;

// For each state its name, its colour, the sign in a large cell, and the shape that is a small cell, 14 units wide.
const SQUARE = "M-7 -7h14v14h-14z";
const STATES = {
  R: ["running", "--running", filled("M-2.5 -4L4 0L-2.5 4z"), filled(SQUARE)],
  D: ["succeeded", "--done", drawn("M-3.5 0L-1 3L4 -3"), filled(circle(7))],
  F: ["failed", "--failed", drawn("M-3 -3L3 3M3 -3L-3 3"), filled(SQUARE)],
  S: ["stopped", "--stopped", filled("M-3 -3h6v6h-6z"), drawn("M-6 -6h12v12h-12z", 2)],
  N: ["not started", "--waiting", drawn(circle(2.5)), filled(circle(3.5))],
  U: ["unknown", "--unknown", drawn("M-3 0h6"), filled("M-7 -1.75h14v3.5h-14z")],
};
const CROSS = drawn("M-4 -4L4 4M4 -4L-4 4", 2);
const MOST_ROWS_WITH_NAMES = 24;

export const stateName = (letter) => (STATES[letter.toUpperCase()] ?? STATES.U)[0];

const LARGE = { width: 44, height: 26, gap: 4 };
const SMALL = [20, 16, 14, 12, 10, 8, 7].map((size) => ({ width: size, height: size, gap: size > 12 ? 3 : 2 }));
const MOST_LARGE = 128;
const HIGH_ENOUGH = 560;

export class Grid {
  constructor(box, canvas, tip, legend, onSelect) {
    this.box = box;
    this.canvas = canvas;
    this.tip = tip;
    this.legend = legend;
    this.onSelect = onSelect;
    this.order = [];
    this.nodes = {};
    this.groups = new Map();
    this.selected = null;
    this.drawn = new Map();
    this.readColours();
    new ResizeObserver(() => this.layOut()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.readColours();
      this.layOut(true);
    });
    canvas.addEventListener("click", (event) => {
      const found = this.at(event);
      if (found) this.onSelect(found.rank);
    });
    canvas.addEventListener("mousemove", (event) => this.hover(event));
    canvas.addEventListener("mouseleave", () => (tip.hidden = true));
    canvas.addEventListener("keydown", (event) => this.press(event));
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.colours = Object.fromEntries(Object.entries(STATES).map(([letter, [, name]]) => [letter, read(name)]));
    this.plain = { text: read("--text"), muted: read("--muted"), panel: read("--panel"), on: read("--on-fill") };
    this.font = getComputedStyle(document.body).fontFamily;
  }

  set(nodes, order) {
    const shape = (of, ids) => ids.map((id) => `${id}:${of[id].workers.length}:${of[id].rank}:${of[id].first}`).join();
    const isSame = this.order.length === order.length && shape(this.nodes, this.order) === shape(nodes, order);
    this.nodes = { ...nodes };
    this.order = order;
    if (isSame) this.draw();
    else this.layOut(true);
    this.count();
  }

  // Few workers get large cells; else the largest with which all fit without scrolling.
  layOut(isAnew = false) {
    const width = this.box.clientWidth;
    if (!width || (!isAnew && width === this.width)) return;
    this.width = width;
    this.hasNames = this.order.length <= MOST_ROWS_WITH_NAMES;
    const total = this.order.reduce((sum, id) => sum + this.nodes[id].workers.length, 0);
    let lowest = 0;
    for (this.cell of total <= MOST_LARGE ? [LARGE] : SMALL) {
      lowest = this.arrange(width);
      if (lowest <= HIGH_ENOUGH) break;
    }
    const height = lowest + 3;
    const scale = (this.scale = Math.min(2, devicePixelRatio || 1));
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.pen = this.canvas.getContext("2d");
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    this.drawn.clear();
    this.draw();
  }

  // Gives each node its place: one below the other with their names, or side by side. Returns where the last one ends.
  arrange(width) {
    const { cell, hasNames } = this;
    const isNarrow = width < 480;
    const names = hasNames && !isNarrow ? Math.min(200, Math.floor(width * 0.28)) : 0;
    const above = hasNames && isNarrow ? 18 : 0;
    const columnsOf = (size) => Math.max(1, Math.min(size, Math.floor((width - names - 4 + cell.gap) / (cell.width + cell.gap))));
    const wideOf = (columns) => columns * (cell.width + cell.gap) - cell.gap;
    const widest = wideOf(columnsOf(Math.max(1, ...this.order.map((id) => this.nodes[id].workers.length))));
    const beside = Math.max(1, Math.floor((width - 4 + 3 * cell.gap) / (widest + 3 * cell.gap)));
    const step = beside > 1 && this.order.length > beside ? (width - 4 - widest) / (beside - 1) : widest + 3 * cell.gap;
    this.groups.clear();
    let [y, lowest] = [2, 0];
    this.order.forEach((id, index) => {
      const size = this.nodes[id].workers.length;
      const columns = columnsOf(size);
      const high = Math.max(1, Math.ceil(size / columns)) * (cell.height + cell.gap) - cell.gap;
      const column = hasNames ? 0 : index % beside;
      if (index > 0 && column === 0) y = lowest + (hasNames ? 10 : 2 * cell.gap + 1);
      const x = 2 + names + Math.round(column * step);
      this.groups.set(id, { x, y: y + above, columns, size, wide: wideOf(columns), high });
      lowest = Math.max(lowest, y + above + high);
    });
    return lowest;
  }

  draw() {
    if (!this.pen) return;
    for (const id of this.order) {
      const node = this.nodes[id];
      const group = this.groups.get(id);
      if (!group) continue;
      const before = this.drawn.get(id) ?? "";
      if (this.hasNames && this.drawn.get(`${id} name`) !== node.state + node.is_connected) this.drawName(id, node, group);
      if (before === node.workers) continue;
      for (let local = 0; local < node.workers.length; local += 1) {
        if (before[local] !== node.workers[local]) {
          this.drawCell(id, local);
        }
      }
      this.drawn.set(id, node.workers);
    }
  }

  drawName(id, node, group) {
    const pen = this.pen;
    const isAbove = this.width < 480;
    const [x, y, wide] = isAbove ? [2, group.y - 18, this.width - 4] : [2, group.y, group.x - 14];
    pen.fillStyle = this.plain.panel;
    pen.fillRect(x - 2, y - 2, wide + 4, isAbove ? 19 : this.cell.height + 2);
    const place = node.rank === null ? "standby" : `node ${node.rank}`;
    const middle = y + (isAbove ? 8 : this.cell.height / 2);
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    pen.font = `600 12px ${this.font}`;
    pen.fillStyle = node.is_connected ? this.plain.text : this.colours.F;
    pen.fillText(place, x, middle);
    const used = pen.measureText(place).width + 8;
    pen.font = `400 12px ${this.font}`;
    pen.fillStyle = this.plain.muted;
    pen.fillText(clipped(pen, node.is_connected ? node.name : "not connected", wide - used), x + used, middle);
    this.drawn.set(`${id} name`, node.state + node.is_connected);
  }

  place(group, local) {
    const { width, height, gap } = this.cell;
    return [
      group.x + (local % group.columns) * (width + gap),
      group.y + Math.floor(local / group.columns) * (height + gap),
    ];
  }

  drawCell(id, local) {
    const node = this.nodes[id];
    const [x, y] = this.place(this.groups.get(id), local);
    const { width, height, gap } = this.cell;
    const pen = this.pen;
    const margin = Math.min(2, gap / 2 + 0.5);
    pen.fillStyle = this.plain.panel;
    pen.fillRect(x - margin, y - margin, width + 2 * margin, height + 2 * margin);
    const rank = node.first === null ? null : node.first + local;
    this.paint(pen, node.workers[local], x, y, width, height);
    if (width >= 40) {
      pen.font = `600 12px ${this.font}`;
      pen.textAlign = "left";
      pen.textBaseline = "middle";
      pen.fillText(rank === null ? "" : String(rank), x + 19, y + height / 2 + 0.5, width - 22);
    }
    if (rank !== null && rank === this.selected) {
      pen.strokeStyle = this.plain.text;
      pen.lineWidth = margin;
      pen.strokeRect(x - margin / 2, y - margin / 2, width + margin, height + margin);
    }
  }

  // A large cell is filled, or outlined for workers that do not run, with a sign in it; the pen keeps the colour for its
  // text. A small cell is a shape.
  paint(pen, state, x, y, width, height, isLarge = width >= 40) {
    const letter = STATES[state.toUpperCase()] ? state.toUpperCase() : "U";
    const [, , sign, shape] = STATES[letter];
    const colour = this.colours[letter];
    const middle = y + height / 2;
    if (!isLarge) {
      stamp(pen, shape, x + width / 2, middle, colour, width / 14);
      if (letter === "F") stamp(pen, CROSS, x + width / 2, middle, this.plain.on, width / 14);
      return;
    }
    const isFilled = "RDF".includes(letter);
    const inset = isFilled ? 0 : 0.75;
    pen.beginPath();
    pen.roundRect(x + inset, y + inset, width - 2 * inset, height - 2 * inset, 4);
    pen.fillStyle = pen.strokeStyle = colour;
    pen.lineWidth = 1.5;
    if (isFilled) pen.fill();
    else pen.stroke();
    pen.fillStyle = isFilled ? this.plain.on : colour;
    stamp(pen, sign, x + Math.min(10, width / 2), middle, pen.fillStyle);
  }

  select(rank) {
    const before = this.selected;
    this.selected = rank;
    for (const each of [before, rank]) {
      const found = this.find(each);
      if (found && this.pen) this.drawCell(found.id, found.local);
    }
    this.describe();
  }

  find(rank) {
    if (rank === null) return null;
    for (const id of this.order) {
      const { first, workers } = this.nodes[id];
      if (first !== null && rank >= first && rank < first + workers.length) return { id, local: rank - first, rank };
    }
    return null;
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const { width, height, gap } = this.cell;
    for (const [id, group] of this.groups) {
      const [across, down] = [x - group.x, y - group.y];
      if (across < 0 || down < 0 || across > group.wide || down > group.high) continue;
      const local = Math.floor(down / (height + gap)) * group.columns + Math.floor(across / (width + gap));
      const first = this.nodes[id].first;
      if (local < group.size && first !== null) return { id, local, rank: first + local };
    }
    return null;
  }

  hover(event) {
    const found = this.at(event);
    this.tip.hidden = !found;
    if (!found) return;
    const node = this.nodes[found.id];
    const place = node.rank === null ? "" : `, node ${node.rank}`;
    this.tip.textContent = `rank ${found.rank}: ${stateName(node.workers[found.local])}${place} ${node.name}`;
    const [x, y] = this.place(this.groups.get(found.id), found.local);
    const left = Math.max(0, Math.min(x, this.width - this.tip.offsetWidth));
    this.tip.style.transform = `translate(${left}px, ${y + this.cell.height + 6}px)`;
  }

  press(event) {
    const found = this.find(this.selected);
    const columns = found ? this.groups.get(found.id).columns : 1;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = this.find((this.selected ?? -1) + step);
    if (next) this.onSelect(next.rank);
  }

  counts() {
    const found = {};
    for (const id of this.order) {
      for (const letter of this.nodes[id].workers) {
        const name = STATES[letter.toUpperCase()] ? letter.toUpperCase() : "U";
        found[name] = (found[name] ?? 0) + 1;
      }
    }
    return found;
  }

  count() {
    const found = this.counts();
    const key = JSON.stringify([found, this.colours.R, this.cell]);
    if (key !== this.counted) {
      this.counted = key;
      this.legend.replaceChildren(...Object.keys(STATES).filter((each) => found[each]).map((each) => this.entry(each, found[each])));
    }
    this.describe();
  }

  entry(letter, amount) {
    const sign = element("canvas", { width: 28, height: 28 });
    const pen = sign.getContext("2d");
    pen.scale(2, 2);
    const isLarge = this.cell?.width >= 40;
    const size = isLarge ? 14 : Math.min(14, this.cell?.width ?? 14);
    const at = (14 - size) / 2;
    this.paint(pen, letter, at, at, size, size, isLarge);
    return element("li", {}, sign, `${number(amount)} ${stateName(letter)}`);
  }

  describe() {
    const all = Object.entries(this.counts()).map(([letter, amount]) => `${amount} ${stateName(letter)}`);
    const found = this.find(this.selected);
    const chosen = found ? ` Selected: rank ${found.rank}, ${stateName(this.nodes[found.id].workers[found.local])}.` : "";
    const label = `Workers: ${all.join(", ") || "none"}.${chosen}`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
  }
}

function stamp(pen, { path, line }, x, y, colour, scale = 1) {
  pen.save();
  pen.translate(x, y);
  pen.scale(scale, scale);
  pen.fillStyle = pen.strokeStyle = colour;
  pen.lineWidth = line;
  pen.lineCap = pen.lineJoin = "round";
  if (line) pen.stroke(path);
  else pen.fill(path);
  pen.restore();
}

function clipped(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > room) length -= 1;
  return `${text.slice(0, length)}…`;
}
