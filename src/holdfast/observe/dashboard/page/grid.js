// Nodes x workers. A worker is a cell: its colour and its shape say the state (style.css). Few workers get large cells
// with their ranks, and each node a row with its name; thousands get small ones, node beside node. A change touches only
// the cells that differ.

import { element, number, setText } from "./format.js";

const STATES = { R: "running", D: "succeeded", F: "failed", S: "stopped", N: "not started", U: "unknown" };
const MOST_ROWS_WITH_NAMES = 24;
const MOST_LARGE = 128;
const SIZES = [[500, 14], [2000, 10], [Infinity, 7]]; // Up to so many workers, cells of so many pixels.

const known = (letter) => (STATES[letter.toUpperCase()] ? letter.toUpperCase() : "U");
const goesText = (node) => (node.is_going ? ", goes away" : "");
const placeOf = (node) => (node.rank === null ? "standby" : `node ${node.rank}`);

export class Grid {
  constructor(box, legend, onSelect) {
    this.box = box;
    this.legend = legend;
    this.onSelect = onSelect;
    this.order = [];
    this.nodes = {};
    this.rows = new Map(); // The element of each node's name, and its cells.
    this.selected = null;
    const rankOf = (event) => event.target.dataset.rank;
    box.addEventListener("click", (event) => rankOf(event) && onSelect(Number(rankOf(event))));
    box.addEventListener("mouseover", (event) => {
      if (rankOf(event)) event.target.title = this.words(this.find(Number(rankOf(event))));
    });
    box.addEventListener("keydown", (event) => this.press(event));
  }

  set(nodes, order) {
    const shape = (of, ids) => ids.map((id) => `${id}:${of[id].workers.length}:${of[id].first}`).join();
    const isSame = shape(this.nodes, this.order) === shape(nodes, order);
    this.nodes = { ...nodes };
    this.order = order;
    if (!isSame) this.build();
    for (const id of order) this.draw(this.nodes[id], this.rows.get(id));
    this.describe();
  }

  build() {
    const total = this.order.reduce((sum, id) => sum + this.nodes[id].workers.length, 0);
    this.box.classList.toggle("large", total <= MOST_LARGE);
    this.box.classList.toggle("named", this.order.length <= MOST_ROWS_WITH_NAMES);
    this.box.style.setProperty("--cell", `${SIZES.find(([most]) => total <= most)[1]}px`);
    this.rows.clear();
    this.box.replaceChildren(...this.order.map((id) => {
      const { workers, first } = this.nodes[id];
      const rankAt = (local) => (first === null ? "" : String(first + local));
      const cells = Array.from(workers, (_, local) => element("i", { "data-rank": rankAt(local) }, rankAt(local)));
      const row = { place: element("b"), name: element("span"), cells };
      this.rows.set(id, row);
      return element("div", { class: "node" }, element("p", {}, row.place, " ", row.name), element("div", {}, ...cells));
    }));
    this.select(this.selected);
  }

  draw(node, row) {
    setText(row.place, placeOf(node));
    setText(row.name, node.is_connected ? `${node.name}${goesText(node)}` : "not connected");
    row.place.closest(".node").classList.toggle("going", node.is_going);
    row.cells.forEach((cell, local) => {
      const letter = known(node.workers[local]);
      if (cell.dataset.state !== letter) cell.dataset.state = letter;
    });
  }

  select(rank) {
    for (const each of [this.selected, rank]) {
      const found = this.find(each);
      if (found) this.rows.get(found.id).cells[found.local].classList.toggle("selected", each === rank);
    }
    this.selected = rank;
    this.describe();
  }

  find(rank) {
    for (const id of rank === null ? [] : this.order) {
      const { first, workers } = this.nodes[id];
      if (first !== null && rank >= first && rank < first + workers.length) return { id, local: rank - first, rank };
    }
    return null;
  }

  press(event) {
    const found = this.find(this.selected);
    const all = found ? this.nodes[found.id].workers.length : 1;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: all, ArrowUp: -all }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = this.find((this.selected ?? -1) + step);
    if (next) this.onSelect(next.rank);
  }

  words({ id, local, rank }) {
    const node = this.nodes[id];
    return `rank ${rank}: ${STATES[known(node.workers[local])]}, ${placeOf(node)} ${node.name}${goesText(node)}`;
  }

  counts() {
    const found = {};
    for (const id of this.order) {
      for (const letter of this.nodes[id].workers) found[known(letter)] = (found[known(letter)] ?? 0) + 1;
    }
    return found;
  }

  // For the legend, and for those who do not see the cells.
  describe() {
    const counts = this.counts();
    const all = Object.keys(STATES).filter((each) => counts[each]).map((each) => [each, `${number(counts[each])} ${STATES[each]}`]);
    const found = this.find(this.selected);
    const label = `Workers: ${all.map(([, text]) => text).join(", ") || "none"}.${found ? ` Selected: ${this.words(found)}.` : ""}`;
    if (this.box.getAttribute("aria-label") === label) return;
    this.box.setAttribute("aria-label", label);
    this.legend.replaceChildren(...all.map(([each, text]) => element("li", {}, element("i", { "data-state": each }), text)));
  }
}
