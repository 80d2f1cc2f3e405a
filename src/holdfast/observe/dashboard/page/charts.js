// The small plots and the timeline of rounds, drawn as SVG.

import { duration, element, number, svg } from "./format.js";

const LEFT = 44;
const BOTTOM = 18;

// Lines over time. Each of `lines` takes a point and returns its value or null; `band` fills between the first two.
export function plot(box, points, { lines, names, low, high, format, isGood, empty }) {
  const shown = points.filter((point) => lines.some((line) => line(point) !== null));
  if (shown.length < 2) {
    box.replaceChildren(element("p", {}, empty));
    return;
  }
  const [width, height] = [box.clientWidth || 300, box.clientHeight || 104];
  const values = shown.flatMap((point) => lines.map((line) => line(point)).filter((value) => value !== null));
  const least = low ?? Math.min(...values);
  const most = high ?? Math.max(...values, least + 1);
  const [begin, end] = [points[0][0], points[points.length - 1][0]];
  const x = (at) => LEFT + ((at - begin) / Math.max(1, end - begin)) * (width - LEFT - 4);
  const y = (value) => 6 + (1 - (value - least) / Math.max(1e-9, most - least)) * (height - BOTTOM - 6);
  const path = (line) => points.map((point) => [point[0], line(point)]).filter(([, value]) => value !== null)
    .map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`);
  const picture = svg("svg", { role: "img", "aria-label": names });
  for (const value of [least, most]) {
    picture.append(
      svg("line", { class: "axis", x1: LEFT, x2: width - 4, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)),
    );
  }
  picture.append(
    svg("text", { class: "tick", x: LEFT, y: height - 2 }, `${duration(end - begin)} ago`),
    svg("text", { class: "tick", x: width - 4, y: height - 2, "text-anchor": "end" }, "now"),
  );
  const [first, second] = lines;
  if (second) picture.append(svg("polygon", { class: "band", points: [...path(first), ...path(second).reverse()].join(" ") }));
  else {
    const filled = path(first);
    const edge = (at) => `${filled[at].split(",")[0]},${y(least)}`;
    picture.append(svg("polygon", { class: "area", points: [edge(0), ...filled, edge(filled.length - 1)].join(" ") }));
  }
  const kind = isGood ? "curve good" : "curve";
  picture.append(svg("polyline", { class: kind, points: path(lines[lines.length - 1]).join(" ") }));
  box.replaceChildren(picture);
}

export const short = (value) => {
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return number(value);
};

// Rounds as spans on one line of time; the time lost in between is a dotted line.
export function timeline(box, rounds, totals) {
  if (!rounds.length) {
    box.replaceChildren();
    return;
  }
  const width = box.clientWidth || 300;
  const last = rounds[rounds.length - 1];
  const total = Math.max(totals.rounds_s ?? 0, last.start_s + (last.ran_s ?? 0), 1);
  const x = (at) => (at / total) * width;
  const picture = svg("svg", { role: "img", "aria-label": `${rounds.length} rounds in ${duration(total)}` });
  picture.append(svg("line", { class: "gap", x1: 0, x2: width, y1: 13, y2: 13 }));
  for (const round of rounds) {
    const begin = x(round.start_s);
    const end = round.ran_s === null ? width : x(round.start_s + round.ran_s);
    const wide = Math.max(3, end - begin - 1);
    const title = svg("title", {}, `round ${round.round}: ${round.end || "running"}${round.cause ? `, ${round.cause}` : ""}`);
    picture.append(svg("rect", { class: "span", "data-end": round.end, x: begin, y: 2, width: wide, height: 22, rx: 3 }, title));
    const name = wide > 150 ? `${round.round} ${round.end || "running"}` : String(round.round);
    if (wide > 22) picture.append(svg("text", { class: "span-name", x: begin + wide / 2, y: 17, "text-anchor": "middle" }, name));
  }
  for (const [at, anchor, text] of [[0, "start", "0"], [width / 2, "middle", duration(total / 2)], [width, "end", duration(total)]]) {
    picture.append(svg("text", { class: "tick", x: at, y: 44, "text-anchor": anchor }, text));
  }
  box.replaceChildren(picture);
}

export function roundRow(round) {
  const cell = (name, text) => element("td", name ? { "data-name": name } : {}, text);
  const end = element("span", { class: "ended", "data-end": round.end }, round.end || "running");
  return element(
    "tr",
    {},
    cell("Round", String(round.round)),
    cell("Nodes", String(round.nodes)),
    cell("Workers", String(round.workers)),
    cell("Ran", round.ran_s === null ? "–" : duration(round.ran_s)),
    cell("Lost", round.end ? duration(round.lost_s) : "–"),
    element("td", {}, end),
    cell("", round.cause),
  );
}
