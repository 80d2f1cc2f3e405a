// Numbers and times as people read them, and building elements. Text is only ever set as text.

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.max(0, seconds);
  if (s > 0 && s < 1) return `${Math.max(1, Math.round(1000 * s))} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${pad(Math.floor(s % 60))} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${pad(Math.floor((s % 3600) / 60))} m`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

const pad = (n) => String(n).padStart(2, "0");

export const number = (n) => n.toLocaleString("en-US", { maximumFractionDigits: 0 });

export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${(100 * share).toFixed(share >= 0.9995 || share === 0 ? 0 : 1)} %`;
}

// An element with attributes; strings among the children become text.
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Only what differs touches the page.
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

export function show(target, text) {
  setText(target, text);
  target.hidden = !text;
}
