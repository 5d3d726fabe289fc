// The page of a service. It reads the documents under api/ and draws them; texts of the service become text nodes only.

const POINTS_MAX = 720;
const POINT_MS = 5_000;
const HOUR_MS = 3_600_000;
// A point is missing if there was none for this long.
const GAP_MS = 3 * POINT_MS;
const UNKNOWN = "–";

const $ = (id) => document.getElementById(id);

// -- numbers and times -------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const three = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minute = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const zoned = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", timeZoneName: "short" });
const zone = (ms = Date.now()) => zoned.formatToParts(ms).find((part) => part.type === "timeZoneName").value;

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
const shown = (value, write) => (known(value) ? write(value) : UNKNOWN);
const count = (value) => shown(value, (number) => whole.format(number));
const perSecond = (value) => shown(value, (number) => (number > 0 && number < 10 ? number.toFixed(1) : whole.format(number)));
const fixed = (digits) => (value) => shown(value, (number) => number.toFixed(digits));
const share = (value) => shown(value, (number) => `${Math.round(100 * number)} %`);

function short(value) {
  const units = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [size, name] = units.find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  return `${three.format(value / size)}${name}`;
}

function seconds(value) {
  if (!known(value)) return UNKNOWN;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7_200) return `${Math.round(value / 60)} min`;
  return value < 172_800 ? `${Math.round(value / 3_600)} h` : `${Math.round(value / 86_400)} days`;
}

function bytes(value) {
  if (!known(value)) return UNKNOWN;
  const units = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const [size, name] = units.find(([size]) => value >= size) ?? [1, "B"];
  return `${three.format(value / size)} ${name}`;
}

function time(ms) {
  if (!known(ms)) return UNKNOWN;
  const at = clock.format(ms);
  return day.format(ms) === day.format(Date.now()) ? at : `${day.format(ms)}, ${at}`;
}

// -- elements ----------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const html = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

function write(id, ...parts) {
  const element = $(id);
  const text = parts.map((part) => (typeof part === "string" ? part : part.textContent)).join("");
  // Unchanged elements stay, so that a screen reader is not told the same again.
  if (element.textContent !== text || parts.some((part) => typeof part !== "string")) element.replaceChildren(...parts);
}

// A table; columns are [heading, class, value of a row].
function table(caption, columns, rows) {
  const heads = columns.map(([name, kind]) => html("th", { scope: "col", role: "columnheader", class: kind || null }, name));
  const lines = rows.map((row) =>
    html("tr", { role: "row" }, ...columns.map(([name, kind, value]) => html("td", { class: kind || null, role: "cell", "data-name": name }, value(row)))),
  );
  return html(
    "table",
    // A table whose rows are shown as blocks would be none for a screen reader.
    { role: "table" },
    html("caption", { class: "spoken" }, caption),
    html("thead", {}, html("tr", { role: "row" }, ...heads)),
    html("tbody", {}, ...lines),
  );
}

// Put a table, or the reason for none, into a part that can be scrolled, without moving what a reader looks at.
function list(part, caption, columns, rows, empty) {
  part.setAttribute("role", "region");
  part.setAttribute("aria-label", caption);
  part.tabIndex = 0;
  const top = part.scrollTop;
  part.replaceChildren(rows.length ? table(caption, columns, rows) : html("p", { class: "empty" }, empty));
  part.scrollTop = top;
}

// -- what the service has told -----------------------------------------------------------------------------

let state = null;
let drawing = null;
let drifts = [];
let lastLossAt = 0;
// One for each five seconds: {at, rate, lag, lagS, loss, baseline, auc}.
let points = [];
// Times without a service, as [from, to].
let gaps = [];

function takeHistory(history) {
  const first = history.at_ms[0] ?? Infinity;
  const before = points.filter((point) => point.at < first);
  const since = history.at_ms.map((at, row) => ({
    at,
    rate: history.events_per_s[row],
    lag: history.lag_records[row],
    lagS: history.lag_s[row],
    loss: history.loss[row],
    baseline: history.baseline[row],
    auc: history.auc[row],
  }));
  points = [...before, ...since].slice(-POINTS_MAX);
  gaps = [];
  points.forEach((point, row) => {
    if (row && point.at - points[row - 1].at >= GAP_MS) gaps.push([points[row - 1].at + POINT_MS, point.at]);
  });
}

function takeState(next) {
  state = next;
  const at = Math.floor(next.at_ms / POINT_MS) * POINT_MS;
  let point = points.at(-1);
  if (point === undefined || point.at < at) {
    if (point && at - point.at >= GAP_MS) gaps.push([point.at + POINT_MS, at]);
    point = { at, rate: null, lag: null, lagS: null, loss: null, baseline: null, auc: null };
    points = [...points, point].slice(-POINTS_MAX);
  }
  point.rate = next.events_per_s;
  point.lag = next.lag_records;
  point.lagS = next.lag_s;
  if (next.quality && next.quality.at_ms > lastLossAt) {
    lastLossAt = next.quality.at_ms;
    Object.assign(point, { loss: next.quality.loss, baseline: next.quality.baseline, auc: next.quality.auc });
  }
}

// -- the verdict and the figures ---------------------------------------------------------------------------

const small = (text) => html("small", {}, text);

function drawFigures() {
  document.title = `${state.level === "well" ? "" : `${state.level} · `}${state.service} · streamiter`;
  write("service", state.service);
  $("verdict").dataset.level = state.level;
  write("sentence", `${state.sentence}.`);
  const role = state.role === "service" ? "" : `${state.role}, `;
  write("since", `${role}${state.phase} since ${time(state.phase_since_ms)}`);
  const more = state.problems.slice(1);
  $("problems").hidden = more.length === 0;
  $("problems").replaceChildren(...more.map((problem) => html("li", {}, problem.detail)));

  write("events", perSecond(state.events_per_s));
  write("events-note", `${count(state.events)} since the start`);
  write("lag", count(state.lag_records), known(state.lag_records) ? small(" records") : "");
  write("lag-note", known(state.lag_s) ? `${seconds(state.lag_s)} behind` : `age ${UNKNOWN}`);
  drawQuality(state.quality);
  const model = state.model;
  write("version", model ? `${model.generation}.${whole.format(model.version)}` : UNKNOWN);
  write("version-note", model ? `${seconds(model.age_s)} old, of ${count(model.records)} rows` : "no model yet");
  drawChallenger(state.challenger);
  const checkpoint = state.checkpoint;
  write("checkpoint", checkpoint ? whole.format(checkpoint.number) : UNKNOWN);
  write(
    "checkpoint-note",
    checkpoint ? `${seconds(state.checkpoint_age_s)} ago, took ${seconds(checkpoint.duration_s)}` : "none yet",
  );
}

function drawQuality(quality) {
  const name = { RMSE: "RMSE", loss: "Loss" }[quality?.measure] ?? "Log loss";
  write("loss-name", name);
  write("loss-choice", name);
  write("loss", fixed(4)(quality?.loss));
  const parts = [`baseline ${fixed(4)(quality?.baseline)}`];
  if (known(quality?.loss) && quality.baseline > 0) {
    const more = 100 * (quality.loss / quality.baseline - 1);
    const [kind, text] = more <= 0 ? ["better", `−${(-more).toFixed(1)} %`] : ["worse", `+${more.toFixed(1)} %`];
    parts.push(", ", html("span", { class: kind }, text));
  }
  write("loss-note", ...parts);
  write("auc", fixed(4)(quality?.auc));
  write("auc-note", known(quality?.rows) ? `of the last ${count(quality.rows)} rows` : "no labels yet");
}

// -- charts ------------------------------------------------------------------------------------------------

const MARGIN = { left: 52, right: 12, top: 10, bottom: 22 };
const MINUTES = [1, 2, 5, 10, 15, 20];

// Round numbers at equal distances, about four of them, around all values.
function ticks(lowest, highest, isWhole) {
  const rough = Math.max((highest - lowest || Math.abs(highest) || 1) / 4, isWhole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
  const first = Math.floor(lowest / step + 1e-9);
  const last = Math.max(first + 1, Math.ceil(highest / step - 1e-9));
  const digits = Math.max(0, -Math.floor(Math.log10(step)) + (/^[25]*2\.?5/.test((step / power).toString()) ? 1 : 0));
  const numbers = Array.from({ length: last - first + 1 }, (_, number) => (first + number) * step);
  return numbers.map((number) => [number, Math.abs(number) >= 1000 ? short(number) : number.toFixed(Math.min(digits, 6))]);
}

class Chart {
  constructor(id, { name, lines, fromZero = false, write: format, hasDrifts = false }) {
    Object.assign(this, { name, lines, fromZero, format, hasDrifts, at: null });
    this.card = $(id);
    this.names = html("div", { class: "names" });
    this.plot = html("div", { class: "plot" });
    this.behind = html("div", { class: "behind", hidden: "" });
    this.card.append(this.names, this.plot, this.behind);
    toggled(this.card, (isOpen) => {
      this.plot.hidden = isOpen;
      this.behind.hidden = !isOpen;
      this.draw();
    });
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  point(event) {
    this.at = event && event.clientX - this.plot.getBoundingClientRect().left;
    this.draw();
  }

  range() {
    const to = (points.at(-1)?.at ?? Date.now()) + POINT_MS;
    const first = points[0]?.at ?? to;
    return [Math.max(to - HOUR_MS, Math.min(first, to - 120_000)), to];
  }

  draw() {
    const [from, to] = this.range();
    const inside = points.filter((point) => point.at >= from);
    if (this.behind.hidden) this.drawPlot(inside, from, to);
    else this.drawTable(inside);
  }

  drawNames(near) {
    const isNow = near === null;
    const parts = this.lines.map(({ key, label, kind }) => {
      // Reports of the quality come more seldom than points; of all else a missing figure is unknown.
      const newest = this.hasDrifts ? points.findLast((point) => known(point[key])) : points.at(-1);
      const value = (isNow ? newest : near)?.[key];
      return html("span", {}, html("i", { class: kind || null }), `${label} `, html("b", {}, this.format(value ?? null)));
    });
    if (this.hasDrifts && drifts.length) parts.push(html("span", {}, html("i", { class: "drift" }), "drift"));
    parts.push(html("span", {}, isNow ? "" : `at ${clock.format(near.at)}`));
    this.names.replaceChildren(...parts);
  }

  drawPlot(inside, from, to) {
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (!width) return;
    const right = width - 6 - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    const x = (at) => MARGIN.left + ((right - MARGIN.left) * (at - from)) / (to - from);
    const values = inside.flatMap((point) => this.lines.map(({ key }) => point[key]).filter(known));
    const lowest = this.fromZero ? 0 : Math.min(...values);
    const marks = values.length ? ticks(lowest, Math.max(...values, this.fromZero ? 1 : -Infinity), this.fromZero) : [];
    const [bottomTick, topTick] = marks.length ? [marks[0][0], marks.at(-1)[0]] : [0, 1];
    const y = (value) => bottom - ((bottom - MARGIN.top) * (value - bottomTick)) / (topTick - bottomTick);
    const near = this.at === null ? null : nearest(inside, from + ((this.at - MARGIN.left) / (right - MARGIN.left)) * (to - from));

    const picture = svg("svg", { role: "img", "aria-label": this.told(inside), viewBox: `0 0 ${width - 6} ${height}` });
    for (const [value, label] of marks) {
      picture.append(
        svg("line", { class: "gridline", x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) }),
        svg("text", { x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, label),
      );
    }
    picture.append(...this.timeAxis(from, to, x, bottom, right));
    for (const [begin, end] of gaps.filter(([, end]) => end > from)) {
      const left = x(Math.max(begin, from));
      const label = svg("title", {}, `no data from ${time(begin)} to ${time(end)}`);
      picture.append(
        hatch(),
        svg("rect", { class: "gap", x: left, y: MARGIN.top, width: Math.max(2, x(end) - left), height: bottom - MARGIN.top }, label),
      );
    }
    if (this.hasDrifts) {
      for (const drift of drifts.filter((each) => each.at_ms >= from)) {
        const at = x(drift.at_ms);
        picture.append(
          svg("line", { class: "drift faint", x1: at, x2: at, y1: MARGIN.top, y2: bottom }),
          svg("line", { class: "drift", x1: at, x2: at, y1: MARGIN.top - 4, y2: MARGIN.top + 4 }, svg("title", {}, `drift at ${time(drift.at_ms)}`)),
        );
      }
    }
    for (const { key, kind } of this.lines) picture.append(...this.line(inside, key, kind, x, y));
    if (near) picture.append(svg("line", { class: "cursor", x1: x(near.at), x2: x(near.at), y1: MARGIN.top, y2: bottom }));
    if (!values.length) {
      picture.append(svg("text", { x: (MARGIN.left + right) / 2, y: (MARGIN.top + bottom) / 2, "text-anchor": "middle" }, `${this.name}: no data yet`));
    }
    this.drawNames(near);
    this.plot.replaceChildren(picture);
  }

  timeAxis(from, to, x, bottom, right) {
    const parts = [svg("line", { class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom })];
    const room = Math.max(2, Math.floor((right - MARGIN.left) / 64));
    const step = 60_000 * (MINUTES.find((each) => (to - from) / 60_000 / each <= room) ?? 30);
    const offset = new Date(to).getTimezoneOffset() * 60_000;
    for (let at = Math.ceil((from - offset) / step) * step + offset; at <= to; at += step) {
      parts.push(
        svg("line", { class: "axis", x1: x(at), x2: x(at), y1: bottom, y2: bottom + 4 }),
        svg("text", { x: x(at), y: bottom + 17, "text-anchor": x(at) > right - 16 ? "end" : "middle" }, minute.format(at)),
      );
    }
    return parts;
  }

  // The parts of a line: it ends where the service was away, and passes points without a figure.
  line(inside, key, kind, x, y) {
    const runs = [[]];
    for (const point of inside) {
      const last = runs.at(-1).at(-1);
      if (last && gaps.some(([begin, end]) => last.at < begin && end <= point.at)) runs.push([]);
      if (known(point[key])) runs.at(-1).push(point);
    }
    const drawn = runs.filter((run) => run.length);
    const path = drawn
      .map((run) => {
        const places = run.map((point) => `${x(point.at).toFixed(1)},${y(point[key]).toFixed(1)}`);
        return places.length > 1 ? `M${places.join("L")}` : `M${places[0]}h1`;
      })
      .join("");
    const parts = path ? [svg("path", { class: `series ${kind}`, d: path })] : [];
    const last = drawn.at(-1)?.at(-1);
    if (last && !kind) parts.push(svg("circle", { class: "last", cx: x(last.at), cy: y(last[key]), r: 3 }));
    return parts;
  }

  told(inside) {
    const parts = this.lines.map(({ key, label }) => {
      const values = inside.map((point) => point[key]).filter(known);
      if (!values.length) return `${label}: no data yet`;
      const [now, low, high] = [values.at(-1), Math.min(...values), Math.max(...values)].map(this.format);
      return `${label}: ${now} now, from ${low} to ${high}`;
    });
    const missing = gaps.length ? ` Without data: ${gaps.length} ${gaps.length === 1 ? "time" : "times"}.` : "";
    return `${this.name} in the last hour. ${parts.join(". ")}.${missing}`;
  }

  // A row for each minute, the newest first.
  drawTable(inside) {
    const rows = inside.filter((point, row) => row === inside.length - 1 || point.at % 60_000 === 0).reverse();
    const columns = this.lines.map(({ key, label }) => [label, "number", (point) => this.format(point[key])]);
    list(this.behind, `${this.name}, a row for each minute`, [["Time", "", (point) => time(point.at)], ...columns], rows, "No data yet.");
  }
}

function nearest(inside, at) {
  let best = null;
  for (const point of inside) if (best === null || Math.abs(point.at - at) < Math.abs(best.at - at)) best = point;
  return best;
}

// Each chart has a pattern of its own, but all are equal, so the first one found is right.
function hatch() {
  return svg(
    "defs",
    {},
    svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("path", { d: "M0,0V6" })),
  );
}

// The button of a card that shows the table behind its picture.
function toggled(card, change) {
  const button = card.querySelector("button.table");
  button.setAttribute("aria-label", `Table of ${card.querySelector("h2").textContent}`);
  button.addEventListener("click", () => {
    const isOpen = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(isOpen));
    change(isOpen);
  });
}

const measures = {
  loss: [{ key: "loss", label: "model", kind: "" }, { key: "baseline", label: "baseline", kind: "baseline" }],
  auc: [{ key: "auc", label: "AUC", kind: "" }],
};
const quality = new Chart("quality", { name: "Log loss", lines: measures.loss, write: fixed(4), hasDrifts: true });
const charts = [
  quality,
  new Chart("rate", { name: "Events per second", lines: [{ key: "rate", label: "now", kind: "" }], write: perSecond, fromZero: true }),
  new Chart("backlog", { name: "Lag in records", lines: [{ key: "lag", label: "unread", kind: "" }], write: count, fromZero: true }),
];
for (const choice of document.getElementsByName("measure")) {
  choice.addEventListener("change", () => {
    quality.lines = measures[choice.value];
    quality.name = choice.value === "auc" ? "AUC" : $("loss-choice").textContent;
    quality.draw();
  });
}

// -- the flow ----------------------------------------------------------------------------------------------

const GLYPHS = { busy: "●", blocked: "■", held: "◆", idle: "○", ended: "✓" };
const flow = $("flow");
const picture = flow.querySelector(".picture");
const behind = flow.querySelector(".behind");
let parts = new Map();
let isTableAsked = false;

// Smaller text than this share cannot be read, so the table takes the place of the drawing.
const LEGIBLE = 0.72;
// The drawing is at most so high, so that it is on the first screen; one that would not be legible then is higher.
const HEIGHT_MAX = 304;

toggled(flow, (isOpen) => {
  isTableAsked = isOpen;
  drawFlow();
});
new ResizeObserver(() => drawFlow()).observe(flow);

function buildFlow() {
  const { width, height } = drawing;
  const kinds = ["data", "feedback"];
  const heads = kinds.map((kind) =>
    svg(
      "marker",
      { id: `arrow-${kind}`, viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 7, markerHeight: 7, orient: "auto" },
      svg("path", { class: `arrow ${kind}`, d: "M0,1L10,5L0,9Z" }),
    ),
  );
  const top = Math.min(...[...drawing.steps, ...drawing.loops].map((each) => each.y)) - 4;
  const left = Math.min(...[...drawing.steps, ...drawing.loops].map((each) => each.x)) - 2;
  const view = [left, top, width - 2 * left, height - top - 14];
  const canvas = svg("svg", { role: "img", "aria-label": "The steps of the flow", viewBox: view.join(" ") });
  canvas.style.maxWidth = `${view[2]}px`;
  canvas.style.maxHeight = HEIGHT_MAX < LEGIBLE * view[3] ? "none" : `${HEIGHT_MAX}px`;
  canvas.append(svg("defs", {}, ...heads));
  parts = new Map();
  const loops = drawing.loops.map((loop) => {
    const heading = svg("text", { x: loop.x + 12, y: loop.y + 19 });
    canvas.append(svg("rect", { class: "loop", x: loop.x, y: loop.y, width: loop.width, height: loop.height, rx: 8 }), heading);
    return { ...loop, heading };
  });
  for (const link of drawing.links) {
    const kind = link.kind === "data" || link.kind === "service" ? "data" : "feedback";
    canvas.append(svg("path", { class: `link ${link.kind}`, d: link.path, "marker-end": `url(#arrow-${kind})` }));
  }
  for (const step of drawing.steps) canvas.append(buildStep(step, loops));
  parts.set("", { canvas, loops, width: view[2] });
  picture.replaceChildren(canvas);
}

function buildStep(step, loops) {
  const middle = step.x + step.width / 2;
  const inLoop = loops.some((loop) => loop.steps.includes(step.name));
  const height = 18 * step.lines.length + (inLoop ? 32 : 16);
  let y = step.y + (step.height - height) / 2 + 11;
  const group = svg("g", { class: "step" }, svg("rect", { class: "body", x: step.x, y: step.y, width: step.width, height: step.height, rx: 6 }));
  const title = svg("title", {});
  group.append(title);
  step.lines.forEach((line, row) => {
    const isLast = row === step.lines.length - 1;
    group.append(svg("text", { class: "name", x: middle, y, "text-anchor": "middle" }, line + (isLast && step.times ? ` ${step.times}` : "")));
    y += 18;
  });
  const glyph = svg("tspan", { class: "glyph" });
  const rate = svg("tspan", {});
  group.append(svg("text", { x: middle, y, "text-anchor": "middle" }, glyph, rate));
  const epoch = svg("text", { x: middle, y: y + 15, "text-anchor": "middle" });
  if (inLoop) group.append(epoch);
  // A bar of what the step did: busy, blocked, held; the rest is idle.
  const bar = { x: step.x + 8, y: step.y + step.height - 7, width: step.width - 16 };
  group.append(svg("rect", { class: "track", ...bar, height: 3, rx: 1.5 }));
  const shares = ["busy", "blocked", "held"].map((kind) => group.appendChild(svg("rect", { class: `share ${kind}`, x: bar.x, y: bar.y, width: 0, height: 3 })));
  parts.set(step.name, { group, title, glyph, rate, epoch, shares, bar });
  return group;
}

function drawFlow() {
  if (!drawing || !state) return;
  const { canvas, loops, width } = parts.get("");
  const isSmall = flow.clientWidth < LEGIBLE * width;
  picture.hidden = isSmall || isTableAsked;
  behind.hidden = !picture.hidden;
  flow.querySelector("button.table").hidden = isSmall;
  if (!behind.hidden) drawSteps();
  for (const step of state.steps) drawStep(step);
  loops.forEach((loop) => {
    const now = state.loops.find((each) => each.heads.every((head) => loop.steps.includes(head)));
    loop.heading.textContent = ["iteration", now?.progress, now && `${count(now.fed_back_records)} records fed back`].filter(Boolean).join(" · ");
  });
  const told = state.steps.map((step) => `${step.name}: ${step.state ?? "state unknown"}`);
  canvas.setAttribute("aria-label", `The steps of the flow. ${told.join(". ")}.`);
}

function drawStep(step) {
  const part = parts.get(step.name);
  if (!part) return;
  part.group.setAttribute("class", `step ${step.state ?? ""}`);
  // The more a step does, the stronger its colour.
  part.group.style.setProperty("--part", `${Math.round(8 + 30 * (step[step.state] ?? 0))}%`);
  part.glyph.textContent = step.state ? `${GLYPHS[step.state]} ` : "";
  part.rate.textContent = step.state === "ended" ? "ended" : `${perSecond(step.records_per_s)}/s`;
  // A loop that learns without waiting has no epochs.
  part.epoch.textContent = step.epoch_watermark === null ? "" : `epoch ${count(step.epoch_watermark)}`;
  part.title.textContent = `${step.name}: busy ${share(step.busy)}, blocked ${share(step.blocked)}, held ${share(step.held)}; ${count(step.waiting_records)} records wait`;
  let x = part.bar.x;
  [step.busy, step.blocked, step.held].forEach((value, row) => {
    const length = part.bar.width * (value ?? 0);
    part.shares[row].setAttribute("x", x);
    part.shares[row].setAttribute("width", length);
    x += length;
  });
}

function drawSteps() {
  list(
    behind,
    "Steps of the flow",
    [
      ["Step", "", (step) => step.name],
      ["State", "", (step) => html("span", { "data-state": step.state }, step.state ?? UNKNOWN)],
      ["Records/s", "number", (step) => perSecond(step.records_per_s)],
      ["Busy", "number", (step) => share(step.busy)],
      ["Blocked", "number", (step) => share(step.blocked)],
      ["Held", "number", (step) => share(step.held)],
      ["Waiting", "number", (step) => count(step.waiting_records)],
      ["Epoch", "number", (step) => count(step.epoch_watermark)],
      ["Rejected", "number", (step) => count(step.rejected)],
      ["Records", "number", (step) => count(step.records)],
    ],
    state.steps,
    "The job has not started.",
  );
}

let drawnFor = "";

// The drawing is asked for when the steps are others than before.
async function takeDrawing() {
  const names = state.steps.map((step) => step.name).join("\n");
  if (!names || names === drawnFor) return;
  drawnFor = names;
  const answer = await fetch("api/drawing").catch(() => null);
  if (!answer?.ok) {
    drawnFor = "";
    return;
  }
  drawing = await answer.json();
  buildFlow();
}

// -- lists -------------------------------------------------------------------------------------------------

const rowsOf = (id) => $(id).querySelector(".rows");

function drawDetails(details) {
  // As the points, drifts before a restart stay.
  drifts = [...details.drifts, ...drifts.filter((drift) => drift.at_ms < state.started_at_ms)];
  drawWeights(details.weights);
  drawEffects(details.effects);
  drawEmbeddings(details.embeddings);
  list(
    rowsOf("versions"),
    "Model versions",
    [
      ["Version", "", (each) => `${each.generation}.${whole.format(each.version)}`],
      ["Made", "", (each) => time(each.created_at_ms)],
      ["Rows learned", "number", (each) => count(each.records)],
      ["Loss", "number", (each) => fixed(4)(each.metrics.loss)],
    ],
    details.versions,
    "No version has been published.",
  );
  list(
    rowsOf("drifts"),
    "Drifts",
    [
      ["Found", "", (each) => time(each.at_ms)],
      ["Row", "number", (each) => count(each.row)],
      ["Loss before", "number", (each) => fixed(4)(each.old_loss)],
      ["Loss since", "number", (each) => fixed(4)(each.new_loss)],
      ["Detector", "", (each) => each.detector],
    ],
    details.drifts,
    "No drift has been found.",
  );
  drawFields(details.fields);
  write("given-up", known(details.checkpoints_given_up) ? `${count(details.checkpoints_given_up)} given up` : "");
  list(
    rowsOf("checkpoints"),
    "Checkpoints",
    [
      ["Number", "", (each) => whole.format(each.number)],
      ["Committed", "", (each) => time(each.committed_at_ms)],
      ["Duration", "number", (each) => `${whole.format(1000 * each.duration_s)} ms`],
      ["Size", "number", (each) => bytes(each.size_bytes)],
    ],
    details.checkpoints,
    "No checkpoint has been committed.",
  );
  list(
    rowsOf("dead"),
    "Dead letters",
    [
      ["Refused", "", (each) => time(each.at_ms)],
      ["Step", "", (each) => each.step],
      ["Error", "text", (each) => each.error],
      ["Value", "text value", (each) => each.value],
      ["Partition", "number", (each) => count(each.partition)],
      ["Offset", "number", (each) => count(each.offset)],
    ],
    details.dead_letters,
    "No record has been refused.",
  );
}

function drawWeights(weights) {
  const moved = weights?.weights ?? [];
  const most = Math.max(...moved.map((each) => Math.abs(each.moved)));
  const name = (version) => `${version.generation}.${whole.format(version.version)}`;
  write("weights-span", weights ? `from ${name(weights.old)} (${time(weights.old.created_at_ms)}) to ${name(weights.new)}` : "");
  const number = fixed(3);
  list(
    rowsOf("weights"),
    "Weights that changed most",
    [
      ["Feature", "text", (each) => (each.label === null ? each.name : `${each.name}, ${each.label}`)],
      ["Before", "number", (each) => number(each.old)],
      ["Now", "number", (each) => number(each.new)],
      ["Effect", "number", (each) => `${each.moved > 0 ? "+" : ""}${number(each.moved)}`],
      ["", "bar", (each) => bar(each.moved / most)],
    ],
    moved,
    weights ? "No weight has changed." : "Two versions are needed.",
  );
}

function bar(part) {
  const length = 39 * Math.abs(part);
  return svg(
    "svg",
    { viewBox: "0 0 80 14", "aria-hidden": "true" },
    svg("line", { class: "axis", x1: 40, x2: 40, y1: 0, y2: 14 }),
    svg("rect", { class: part > 0 ? "up" : "down", x: part > 0 ? 40 : 40 - length, y: 3, width: length, height: 8, rx: 1 }),
  );
}

// Of several classes, a field is shown for the one that it does most to.
function drawEffects(effects) {
  $("effects").hidden = !effects;
  if (!effects) return;
  const strong = fixed(3);
  const isSeen = ({ strength }) => strength >= 0.0005; // Others would be 0.000.
  const rows = effects.columns.filter(isSeen).map((column) => {
    const spans = column.bins[0].effect.map((_, score) => {
      const all = column.bins.map((bin) => bin.effect[score]);
      return Math.max(...all) - Math.min(...all);
    });
    const score = spans.indexOf(Math.max(...spans));
    const bins = column.bins.map((bin) => ({ ...bin, effect: bin.effect[score] }));
    const ordered = bins.toSorted((a, b) => a.effect - b.effect);
    return { ...column, bins, least: ordered[0], most: ordered.at(-1), label: effects.classes?.[score] };
  });
  const end = ({ name, effect }) => `${effect > 0 ? "+" : ""}${strong(effect)}: ${name}`;
  list(
    rowsOf("effects"),
    "What the fields do",
    [
      ["Field", "text", (each) => (each.label === undefined ? each.field : `${each.field}, ${each.label}`)],
      ["Strength", "number", (each) => strong(each.strength)],
      ["Effect of its values", "shape", shape],
      ["Least", "text", (each) => end(each.least)],
      ["Most", "text", (each) => end(each.most)],
    ],
    rows,
    "No field has an effect yet.",
  );
  const pairs = effects.pairs.filter(isSeen);
  write("pairs", pairs.length ? `together: ${pairs.map((pair) => `${pair.fields.join(" × ")} ${strong(pair.strength)}`).join(", ")}` : "");
}

function drawChallenger(challenger) {
  $("challenger").hidden = !challenger;
  if (!challenger) return;
  const { name, version, generation, compared, verdict } = challenger;
  const served = (challenger.is_served ? ", promoted: its versions are served" : "") + (known(challenger.stopped) ? ", stopped" : "");
  write("challenger-name", `${name} ${known(version) ? `${generation}.${whole.format(version)}` : UNKNOWN}${served}`);
  list(
    rowsOf("challenger"),
    "Challenger and champion",
    [
      ["On the same rows", "text", ([figure]) => figure],
      ["Now", "number", ([, value]) => value],
    ],
    [
      ["Better than the champion, beyond chance", { better: "yes", worse: "no, it is worse" }[verdict] ?? verdict],
      ["Rows compared", count(compared?.compared_rows)],
      ["Loss of the challenger", fixed(4)(compared?.challenger_loss)],
      ["Loss of the champion", fixed(4)(compared?.champion_loss)],
      ["Mean difference", fixed(5)(compared?.loss_difference)],
      ["at least, with 95 % at any time", fixed(5)(compared?.loss_difference_least)],
      ["at most, with 95 % at any time", fixed(5)(compared?.loss_difference_most)],
      ["Differences cut to ±2", count(compared?.cut_differences)],
      ...(known(challenger.share) ? [["Share of the keys it answers for", `${fixed(1)(100 * challenger.share)} %`]] : []),
    ],
    "",
  );
}

function drawEmbeddings(figures) {
  $("embeddings").hidden = !figures;
  if (!figures) return;
  write("embeddings-kind", `${figures.kind}, ${figures.factors} factors`);
  list(
    rowsOf("embeddings"),
    "Embeddings",
    [
      ["Figure", "text", ([name]) => name],
      ["Now", "number", ([, value]) => value],
    ],
    [
      ["Share of the prediction", `${fixed(1)(100 * figures.share)} %`],
      [`Features of ${count(figures.fields)} fields`, count(figures.features)],
      ["with a vector of their own", count(figures.admitted)],
      ["Left: expired", count(figures.expired)],
      ["Left: no room", count(figures.evicted)],
    ],
    "",
  );
}

function drawFields(window) {
  $("fields").hidden = !window;
  if (!window) return;
  const { first_row, rows, reference_rows, name, left_out, fields } = window.report;
  const span = `rows ${whole.format(first_row)} to ${whole.format(first_row + rows - 1)}`;
  const others = left_out ? `; ${count(left_out)} values of other fields are not watched` : "";
  const reference = `compared with ${count(reference_rows)} rows${name && ` of ${name}`}`;
  write("fields-window", `${window.shifted} of ${count(window.count)} have shifted in ${span}, ${reference}${others}`);
  list(
    rowsOf("fields"),
    "Fields",
    [
      ["Field", "text", (each) => each.field],
      ["", "", (each) => (each.shifted.length ? html("span", { class: "shifted" }, `▲ ${each.shifted.join(", ")}`) : "")],
      ["Missing", "number", (each) => share(each.missing)],
      ["Before", "number", (each) => share(each.missing_before)],
      ["New values", "number", (each) => share(each.new_values)],
      ["PSI", "number", (each) => fixed(3)(each.psi)],
      ["KS", "number", (each) => fixed(3)(each.ks)],
    ],
    fields,
    "No field has values.",
  );
}

// The effect of each bin, in ascending order of the values, above bars of how many rows the bins have had.
function shape({ field, bins, least, most }) {
  const [wide, high] = [240, 40];
  const each = wide / bins.length;
  const room = most.effect - least.effect || 1;
  const y = (effect) => 2 + ((high - 4) * (most.effect - effect)) / room;
  const crowd = Math.max(...bins.map((bin) => bin.rows));
  const bars = bins.map((bin, at) => svg("rect", { class: "fill", x: at * each, width: each, y: high * (1 - bin.rows / crowd), height: (high * bin.rows) / crowd }));
  const steps = bins.map((bin, at) => `${at ? "L" : "M"}${at * each},${y(bin.effect)}H${(at + 1) * each}`).join("");
  const told = `${field}: from ${least.effect.toFixed(3)} (${least.name}) to ${most.effect.toFixed(3)} (${most.name})`;
  const zero = svg("line", { class: "axis", x1: 0, x2: wide, y1: y(0), y2: y(0) });
  return svg("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": told }, ...bars, zero, svg("path", { class: "series", d: steps }));
}

// -- the connection ----------------------------------------------------------------------------------------

const WAITS_MS = [500, 1_000, 2_000, 5_000];
// States come each second; after this long without one the service hangs or the line is cut.
const SILENCE_MS = 10_000;

let source = null;
let attempts = 0;
let heardAt = Date.now();
let lostAt = null;

async function connect() {
  source?.close();
  heardAt = Date.now();
  try {
    const answer = await fetch("api/history", { signal: AbortSignal.timeout(SILENCE_MS) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    takeHistory(await answer.json());
  } catch {
    lost();
    return;
  }
  source = new EventSource("api/events");
  source.addEventListener("state", (event) => {
    heard();
    takeState(JSON.parse(event.data));
    draw();
  });
  source.addEventListener("details", (event) => drawDetails(JSON.parse(event.data)));
  source.addEventListener("error", lost);
}

function heard() {
  heardAt = Date.now();
  attempts = 0;
  lostAt = null;
  document.documentElement.dataset.connection = "live";
  write("connection", "live");
}

function lost() {
  source?.close();
  source = null;
  lostAt ??= heardAt;
  document.documentElement.dataset.connection = "lost";
  write("connection", "no connection");
  $("verdict").dataset.level = "unknown";
  write("sentence", `No answer of the service since ${time(lostAt)}. The figures are the last ones; the page tries again.`);
  $("problems").hidden = true;
  setTimeout(connect, WAITS_MS[Math.min(attempts, WAITS_MS.length - 1)]);
  attempts += 1;
}

setInterval(() => {
  write("now", `${clock.format(Date.now())} ${zone()}`);
  if (source && Date.now() - heardAt > SILENCE_MS) lost();
}, 1_000);

async function draw() {
  if (document.hidden) return;
  drawFigures();
  for (const chart of charts) chart.draw();
  await takeDrawing();
  drawFlow();
}

document.addEventListener("visibilitychange", () => state && draw());
write("zone", `${Intl.DateTimeFormat().resolvedOptions().timeZone} (${zone()})`);
write("now", `${clock.format(Date.now())} ${zone()}`);
connect();
