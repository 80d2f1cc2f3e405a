// The page: takes the events of the server, and keeps the picture of the run on the screen up to date.

import { plot, roundRow, short, timeline } from "./charts.js";
import { duration, element, number, percent, setText, show } from "./format.js";
import { Grid } from "./grid.js";
import { LogPane } from "./log.js";

const byId = (id) => document.getElementById(id);
const HIDDEN_FOR_MS = 60_000;
const RETRY_MS = 2_000;

const picture = { run: null, nodes: {}, order: [], rounds: [], totals: {}, notice: null, report: null, points: [] };
let facts = null;
let source = null;
let watchdog = null;
let isOver = false;
let attempts = 0;

const grid = new Grid(byId("cells"), byId("legend"), (rank) => choose({ rank }));
const log = new LogPane(byId("log"), byId("log-problem"), byId("follow"));

// What is chosen stays in the address, so that a reload shows it again.
const chosen = { rank: 0, stream: "stdout", attempt: "" };
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  if (name === "rank" && /^\d{1,9}$/.test(value)) chosen.rank = Number(value);
  if (name === "stream" && value === "stderr") chosen.stream = value;
}

// The stream of events.

function connect() {
  clearTimeout(watchdog);
  if (source) source.close();
  if (isOver) return;
  source = new EventSource("/events");
  const on = (name, act) => source.addEventListener(name, (event) => {
    rest();
    act(JSON.parse(event.data));
  });
  on("hello", (data) => {
    facts = data;
    link("live", "live");
    drawFoot();
    followLog();
  });
  on("picture", take);
  on("change", take);
  on("log", takeLog);
  on("beat", () => {});
  on("bye", (data) => leave(data.text));
  source.onerror = () => lost();
}

// What is on the page stays; nothing new will come.
function leave(text) {
  isOver = true;
  source.close();
  clearTimeout(watchdog);
  link("over", "ended");
  show(byId("note"), text);
  drawStop();
}

// A server that says nothing for three beats is as good as gone.
function rest() {
  clearTimeout(watchdog);
  watchdog = setTimeout(lost, 3000 * (facts?.beat_s ?? 10));
}

function lost() {
  if (isOver || document.hidden) {
    if (source) source.close();
    return;
  }
  source.close();
  link("lost", "connection lost, trying again");
  clearTimeout(watchdog);
  watchdog = setTimeout(reconnect, RETRY_MS);
}

// Another dashboard may be at that address by now, with another key.
async function reconnect() {
  const answer = await fetch("/icon.svg").catch(() => null);
  if (answer?.status === 403) leave("The dashboard of this page has ended. Another one has another URL.");
  else if (answer) connect();
  else lost();
}

function link(state, text) {
  byId("link").dataset.link = state;
  setText(byId("link"), text);
}

// A page that is not looked at costs the run nothing after a while.
let hiddenTimer = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (document.hidden) {
    hiddenTimer = setTimeout(() => source && source.close(), HIDDEN_FOR_MS);
  } else if (!source || source.readyState === EventSource.CLOSED) connect();
});

// The picture.

// The whole picture has all sections and all points; a change has those that differ, and of the nodes those that do.
function take({ point, nodes, ...sections }) {
  const isWhole = Boolean(sections.points);
  const news = { point, nodes, ...sections };
  if (isWhole) picture.nodes = {};
  Object.assign(picture, sections);
  if (point) picture.points.push(point);
  for (const [id, node] of Object.entries(nodes ?? {})) {
    if (node === null) delete picture.nodes[id];
    else picture.nodes[id] = node;
  }
  if (news.nodes || news.order) {
    grid.set(picture.nodes, picture.order);
    if (grid.selected === null) choose({});
  }
  drawRun();
  if (news.notice !== undefined) drawNotice();
  if (news.rounds || news.totals) drawRounds(Boolean(news.rounds));
  if (news.point || news.points) drawPlots();
  if (news.report !== undefined || news.rounds || news.run) drawFailure();
  askWorker();
}

function drawRun() {
  const run = picture.run;
  if (!run) return;
  setText(byId("run-id"), run.id);
  setText(byId("state"), run.state);
  byId("state").dataset.state = run.state;
  setText(byId("sentence"), run.sentence);
  const refused = run.refused.length ? `Refused: ${run.refused[run.refused.length - 1]}` : "";
  if (!isOver) show(byId("note"), run.note || refused);
  setText(byId("round"), run.round ? number(run.round) : "–");
  const wanted = run.min_nodes === run.max_nodes ? run.max_nodes : `${run.min_nodes} to ${run.max_nodes}`;
  figure("nodes", number(run.nodes_here), run.max_nodes === null ? "" : ` of ${wanted}`);
  const counts = grid.counts();
  const all = Object.values(counts).reduce((sum, each) => sum + each, 0);
  figure("workers", number(counts.R ?? 0), ` of ${number(all)} running`);
  figure("restarts", number(run.restarts_left), ` of ${number(run.restarts_left + run.restarts_used)}`);
  document.title = `${run.state} · ${run.id} · holdfast`;
  drawStop();
}

// The time of day that is shown moves only if the notice does, and not with the seconds that an answer takes.
let goesAt = 0;
function drawNotice() {
  const told = picture.notice;
  byId("notice").hidden = !told;
  if (!told) return;
  const at = Date.now() + 1000 * told.left_s;
  if (Math.abs(at - goesAt) > 2000) goesAt = at;
  const when = told.left_s > 0 ? `in ${duration(told.left_s)}, at ${new Date(goesAt).toLocaleTimeString()}` : "now";
  setText(byId("notice-text"), `${told.text} ${when}.`);
  show(byId("notice-reason"), told.reason);
}

function figure(id, value, more) {
  const target = byId(id);
  if (target.textContent === value + more) return;
  target.replaceChildren(value, element("small", {}, more));
}

function drawRounds(hasChanged) {
  const { rounds, totals } = picture;
  setText(byId("goodput"), percent(totals.goodput));
  setText(byId("lost"), duration(totals.lost_s));
  byId("snapshot-box").hidden = !totals.snapshot;
  if (totals.snapshot) figure("snapshot", `step ${number(totals.snapshot.step)}`, ` ${totals.snapshot.age} ago`);
  const causes = Object.entries(totals.restarts ?? {}).filter(([, times]) => times > 0);
  const restarts = causes.map(([cause, times]) => `${number(times)} × ${cause}`).join(", ");
  setText(byId("rounds-now"), restarts ? `new rounds: ${restarts}` : "");
  timeline(byId("timeline"), rounds, totals);
  if (hasChanged) byId("rounds").replaceChildren(...[...rounds].reverse().map(roundRow));
}

function drawPlots() {
  const points = picture.points;
  const last = points[points.length - 1];
  plot(byId("progress"), points, {
    lines: [(point) => point[1], (point) => point[2]],
    names: "Steps of the slowest and of the fastest worker over time",
    format: short,
    empty: "Workers that call holdfast.progress(step) are plotted here.",
  });
  plot(byId("goodput-plot"), points, {
    lines: [(point) => point[3]],
    names: "Share of the time in which the workers ran and made progress",
    low: 0,
    high: 1,
    format: (value) => `${100 * value}%`,
    isGood: true,
    empty: "Not known yet.",
  });
  const [, slow, fast, good] = last ?? [];
  setText(byId("progress-now"), Number.isFinite(fast) ? `step ${slow === fast ? "" : `${short(slow)} to `}${short(fast)}${pace(points)}` : "");
  setText(byId("goodput-now"), Number.isFinite(good) ? percent(good) : "");
}

// Steps a second, over the last half minute.
function pace(points) {
  const last = points[points.length - 1];
  const first = points.find((point) => point[0] >= last[0] - 30 && point[2] !== null);
  const rate = first && last[0] > first[0] ? (last[2] - first[2]) / (last[0] - first[0]) : 0;
  return rate > 0 ? `, ${rate < 10 ? rate.toFixed(1) : short(rate)} a second` : "";
}

function drawFailure() {
  const { report, rounds, run } = picture;
  const bad = [...rounds].reverse().find((round) => ["failed", "hung", "node lost"].includes(round.end));
  const isFailed = run?.state === "failed" || run?.state === "error";
  byId("failure").hidden = !(report || isFailed || bad);
  byId("failure").dataset.isPast = String(!(report || isFailed));
  setText(byId("failure").querySelector("h2"), report || isFailed ? "Failure report" : "Last failure");
  const cause = bad ? `Round ${bad.round}: ${bad.cause || bad.end}` : run?.sentence ?? "";
  setText(byId("cause"), report || isFailed ? run?.sentence ?? "" : cause);
  setText(byId("report"), report ?? "");
}

function drawStop() {
  byId("stop").hidden = !(facts?.may_stop && picture.run && !picture.run.is_over && !isOver);
}

function drawFoot() {
  const rights = facts.may_stop ? "" : " Read-only: given the run's token (--token-file), the page can stop the run, too.";
  const stays = `It stays for ${duration(facts.linger_s)} after the end of the run.`;
  setText(byId("foot"), `holdfast ${facts.version}, served by process ${facts.pid} on ${facts.host}. ${stays}${rights}`);
}

// One worker.

function choose(change) {
  const isOther = change.rank !== undefined && change.rank !== chosen.rank;
  Object.assign(chosen, isOther ? { attempt: "" } : {}, change);
  byId("rank").value = String(chosen.rank);
  byId("stream").value = chosen.stream;
  byId("attempt").value = chosen.attempt;
  history.replaceState(null, "", `#rank=${chosen.rank}${chosen.stream === "stderr" ? "&stream=stderr" : ""}`);
  grid.select(chosen.rank);
  askWorker();
  followLog();
}

byId("rank").addEventListener("change", (event) => {
  const rank = Number(event.target.value);
  if (Number.isSafeInteger(rank) && rank >= 0) choose({ rank });
});
byId("stream").addEventListener("change", (event) => choose({ stream: event.target.value }));
byId("attempt").addEventListener("change", (event) => choose({ attempt: event.target.value }));
byId("controls").addEventListener("submit", (event) => event.preventDefault());

let asking = false;
async function askWorker() {
  if (asking || !picture.run || isOver || !grid.find(chosen.rank)) return;
  asking = true;
  try {
    const answer = await fetch(`/worker?rank=${chosen.rank}`);
    const told = await answer.json();
    if (told.rank === chosen.rank) setText(byId("worker-facts"), workerText(told));
  } catch {
    // The stream of events says whether the server is there.
  }
  asking = false;
}

function workerText(told) {
  const node = picture.nodes[told.node];
  const place = node ? `node ${node.rank ?? "–"} ${node.name}` : "";
  if (!told.state) return `rank ${told.rank}, ${place}`;
  const parts = [`rank ${told.rank}`, told.state, place, told.pid ? `pid ${told.pid}` : "", `age ${told.age}`, told.progress];
  return parts.filter(Boolean).join(" · ");
}

async function followLog() {
  if (!facts || !picture.run || isOver) return;
  const attempt = chosen.attempt === "" ? null : Number(chosen.attempt);
  const problem = await post("/log", { page: facts.page, rank: chosen.rank, stream: chosen.stream, attempt });
  if (problem) show(byId("log-problem"), problem);
}

function takeLog(piece) {
  const [rank, stream, attempt] = piece.key;
  if (rank !== chosen.rank || stream !== chosen.stream || String(attempt ?? "") !== chosen.attempt) return;
  if (piece.begins) log.clear();
  log.take(piece);
  if (attempt === null && Number.isSafeInteger(piece.attempt) && piece.attempt !== attempts) {
    attempts = piece.attempt;
    const earlier = Array.from({ length: Math.min(attempts, 100) }, (_, index) => String(attempts - 1 - index));
    const options = earlier.map((each) => element("option", { value: each }, each));
    byId("attempt").replaceChildren(element("option", { value: "" }, `present (${attempts})`), ...options);
  }
}

async function post(path, body) {
  const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  try {
    const answer = await fetch(path, request);
    const isJson = answer.headers.get("Content-Type")?.startsWith("application/json");
    const told = isJson ? await answer.json() : { problem: (await answer.text()).trim() };
    if (answer.ok) Object.assign(body, { answer: told });
    return answer.ok ? "" : told.problem;
  } catch {
    return "the dashboard does not answer";
  }
}

byId("stacks").addEventListener("click", async (event) => {
  const button = event.target;
  const body = { rank: chosen.rank };
  button.disabled = true;
  setText(button, "Taking stacks ...");
  const problem = await post("/stacks", body);
  button.disabled = false;
  setText(button, "Take stacks");
  byId("stacks-box").hidden = false;
  setText(byId("stacks-title"), `Stacks of rank ${body.rank}, ${new Date().toLocaleTimeString()}`);
  setText(byId("stacks-text"), problem || body.answer.text);
});
byId("stacks-close").addEventListener("click", () => (byId("stacks-box").hidden = true));

// Stop.

byId("stop").addEventListener("click", () => {
  show(byId("stop-problem"), "");
  byId("ask-stop").showModal();
});
byId("stop-now").addEventListener("click", async () => {
  const problem = await post("/stop", { reason: byId("stop-reason").value });
  show(byId("stop-problem"), problem);
  if (!problem) byId("ask-stop").close();
});

new ResizeObserver(() => {
  drawPlots();
  drawRounds(false);
}).observe(byId("timeline"));
connect();
