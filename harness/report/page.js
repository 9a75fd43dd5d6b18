"use strict";
// The script of report.html. `content` is what harness/report/page_content.py made of one run or two. All texts in it
// are somebody else's: they reach the page through text nodes alone. uPlot draws the curves; everything else is here.
(() => {
const content = JSON.parse(document.getElementById("content").textContent);
const [run, other] = content.runs;
const ofFirst = other ? " of A" : ""; // ends the titles of what is shown of the first run only
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const PLOT_HEIGHT = 210;
const FIRST_HEIGHT = 300;
const ROWS_AT_FIRST = 100;
const MOST_OF_A_CODE = 8; // events of one code whose texts are shown together
const BIN = 22; // pixels of the strip in which events share a button
const NONE = 0, ZERO = 1, FIRST = 2, LAST = 65535; // codes of harness/report/decimate.py
const LINES = ["rollback", "halt", "switch", "resume"]; // events with a line through every chart; others have a tick
const SIGNS = {switch: "\u21c5", rollback: "\u21b6", halt: "\u2716", skip: "\u2298", scale: "\u00d7",
  checkpoint: "\u25a3", resume: "\u25b6", other: "\u2022"};

// ---- Elements and numbers ----

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child != null) made.append(child); // a string becomes a text node
  }
  return made;
}

function table(headings, rows, numbers = []) {
  // numbers: columns that are aligned right. A cell is a text or an element.
  const kind = (place) => (numbers.includes(place) ? "number" : place ? "text" : null);
  const head = headings.map((text, place) => el("th", {scope: "col", class: kind(place)}, text));
  const body = rows.map((row) =>
    el("tr", {}, row.map((cell, place) => el("td", {class: kind(place)}, cell))));
  const parts = headings.length ? [el("thead", {}, el("tr", {}, head))] : [];
  return el("div", {class: "wide"}, el("table", {}, parts, el("tbody", {}, body)));
}

function figure(value, digits = 4) {
  if (value == null) return "-";
  if (typeof value === "string") return value;
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2);
  return Number(value.toPrecision(digits)).toString();
}

function size(bytes) {
  if (!bytes) return "-";
  return bytes < 2 ** 20 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function section(id, title, build) {
  const part = el("section", {id, "aria-labelledby": `${id}-title`}, el("h2", {id: `${id}-title`}, title));
  main.append(part);
  nav.append(el("a", {href: `#${id}`}, title));
  try {
    build(part);
  } catch (error) {
    // One part that fails must not take the others with it.
    console.error(error);
    part.append(el("p", {role: "alert"}, `This part cannot be shown: ${error.message}`));
  }
}

// ---- The steps in view, the same for every chart ----

const plots = [];
const whole = stepsOfAll();
let view = [...whole];
const viewers = []; // functions that are called when the view has changed

function stepsOfAll() {
  let low = Infinity, high = -Infinity;
  for (const each of content.runs) {
    const series = each.charts.flatMap((chart) => chart.series).map((one) => one.steps);
    series.push(...each.charts.flatMap((chart) => chart.series).map((one) => one.marks.map((mark) => mark[0])));
    if (each.slots) series.push(each.slots.steps, [each.slots.last]);
    for (const steps of series) {
      if (!steps.length) continue;
      low = Math.min(low, steps[0]);
      high = Math.max(high, steps[steps.length - 1]);
    }
  }
  if (!(low <= high)) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

function look(low, high) {
  const least = Math.min(2, whole[1] - whole[0]);
  let width = Math.max(least, Math.min(high - low, whole[1] - whole[0]));
  low = Math.max(whole[0], Math.min(low, whole[1] - width));
  view = [low, low + width];
  for (const plot of plots) plot.look();
  for (const each of viewers) each();
}

function zoom(factor, shift = 0) {
  const width = view[1] - view[0];
  const middle = (view[0] + view[1]) / 2 + shift * width;
  look(middle - width * factor / 2, middle + width * factor / 2);
}

function zoomControls() {
  const from = el("input", {type: "number", id: "from", step: "1"});
  const to = el("input", {type: "number", id: "to", step: "1"});
  const typed = () => {
    const low = Number(from.value), high = Number(to.value);
    if (from.value !== "" && to.value !== "" && low < high) look(low, high);
  };
  from.addEventListener("change", typed);
  to.addEventListener("change", typed);
  const button = (text, label, act) => el("button", {type: "button", "aria-label": label, title: label, onclick: act}, text);
  const show = () => {
    from.value = Math.round(view[0]);
    to.value = Math.round(view[1]);
  };
  viewers.push(show);
  show();
  return el("div", {class: "controls", role: "group", "aria-label": "Steps in view"},
    el("label", {for: "from"}, "steps from"), from, el("label", {for: "to"}, "to"), to,
    button("+", "zoom in", () => zoom(0.5)),
    button("\u2212", "zoom out", () => zoom(2)),
    button("\u2190", "earlier steps", () => zoom(1, -0.5)),
    button("\u2192", "later steps", () => zoom(1, 0.5)),
    button("all steps", "all steps", () => look(...whole)),
    el("span", {class: "note"}, "or drag over a chart; double-click for all"));
}

// ---- Events ----

const shownKinds = new Set(content.kinds.map(([kind]) => kind));
const kindLabels = new Map(content.kinds);

function eventCard(event) {
  const card = el("div", {}, el("h3", {}, kindSwatch(event.kind), `step ${event.step}: ${event.code}`));
  card.append(...aboutEvent(event, true), explanation(event.code, true));
  return card;
}

function aboutEvent(event, open) {
  const parts = [];
  if (event.text) parts.push(el("p", {}, event.text));
  if (event.time) parts.push(el("p", {class: "note"}, `attempt ${event.attempt}, ${event.time}`));
  if (event.undone) parts.push(el("p", {class: "note"}, "A rollback or a restart did this step again."));
  const rows = event.details.map(([name, text]) => [name, el("code", {}, text)]);
  if (rows.length) parts.push(el("details", {open}, el("summary", {}, "Evidence"), table([], rows)));
  return parts;
}

function explanation(code, open) {
  // A code may be any text, such as "constructor".
  if (!Object.hasOwn(content.explanations, code)) return "";
  const explained = content.explanations[code];
  const about = el("details", {open}, el("summary", {}, `${code} in the runbook`));
  for (const [label, lines] of explained) {
    about.append(el("h3", {}, label));
    for (const line of lines) {
      about.append(line.startsWith("    ") ? el("pre", {}, line.slice(4)) : el("p", {}, line));
    }
  }
  return about;
}

function eventGroup(events) {
  // Several events of one code: each in short, and what the code means once.
  if (events.length === 1) return eventCard(events[0]);
  const {kind, code} = events[0];
  const card = el("div", {}, el("h3", {}, kindSwatch(kind), `${code}, ${events.length} times`));
  for (const event of events.slice(0, MOST_OF_A_CODE)) {
    card.append(el("p", {}, el("strong", {}, `step ${event.step}`)), ...aboutEvent(event, false));
  }
  const left = events.length - MOST_OF_A_CODE;
  if (left > 0) card.append(el("p", {class: "note"}, `and ${left} more in the list of events`));
  card.append(explanation(code, false));
  return card;
}

function kindSwatch(kind) {
  const swatch = el("i", {class: "kind", "data-kind": kind});
  swatch.style.background = color(kind);
  return swatch;
}

function kindMark(kind) {
  return el("span", {class: "kinds"}, kindSwatch(kind), kindLabels.get(kind));
}

function showEvents(panel, events, back) {
  const close = el("button", {type: "button", onclick: () => {
    panel.hidden = true;
    back.focus();
  }}, "Close");
  const byCode = new Map();
  for (const event of [...events].sort((a, b) => weight(a) - weight(b))) {
    byCode.set(event.code, [...(byCode.get(event.code) ?? []), event]);
  }
  panel.replaceChildren(...[...byCode.values()].map(eventGroup), close);
  panel.hidden = false;
  panel.focus();
}

function eventStrip(plot) {
  // One button for the events of a few pixels; arrow keys go from one to the next.
  const strip = el("div", {class: "strip", role: "toolbar", "aria-label": "Events by step; arrow keys move"});
  const panel = el("div", {class: "panel", id: "event-panel", tabindex: "-1", role: "region", "aria-label": "Event"});
  panel.hidden = true;
  let at = 0;

  function fill() {
    const sorted = [];
    for (const event of run.events) { // by their steps
      if (!shownKinds.has(event.kind) || event.step < view[0] || event.step > view[1]) continue;
      const left = plot.left(event.step);
      const before = sorted[sorted.length - 1];
      if (before && left - before.left < BIN) before.events.push(event);
      else sorted.push({left, events: [event]});
    }
    at = Math.min(at, Math.max(0, sorted.length - 1));
    strip.replaceChildren(...sorted.map(({left, events}, place) => {
      const worst = [...events].sort((a, b) => weight(a) - weight(b))[0];
      const first = events[0].step, last = events[events.length - 1].step;
      const steps = first === last ? `step ${first}` : `steps ${first} to ${last}`;
      const codes = [...new Set(events.map((event) => event.code))].join(", ");
      const button = el("button", {type: "button", tabindex: place === at ? "0" : "-1", title: `${steps}: ${codes}`,
        "aria-label": `${steps}: ${codes}`, onclick: () => showEvents(panel, events, button)}, SIGNS[worst.kind]);
      button.style.left = `${left}px`;
      button.style.color = color(worst.kind);
      button.style.borderColor = color(worst.kind);
      return button;
    }));
  }

  strip.addEventListener("keydown", (event) => {
    const moves = {ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity};
    if (!(event.key in moves)) return;
    event.preventDefault();
    const buttons = [...strip.children];
    at = Math.max(0, Math.min(buttons.length - 1, at + moves[event.key]));
    buttons.forEach((button, place) => { button.tabIndex = place === at ? 0 : -1; });
    buttons[at]?.focus();
  });
  plot.drawn = fill;
  return [strip, panel];
}

function weight(event) {
  const order = ["halt", "rollback", "switch", "skip", "resume", "scale", "other", "checkpoint"];
  return order.indexOf(event.kind);
}

// ---- Charts ----

class Plot {
  // chart: title, unit, log, stepped; also top, line, skipped, bands.
  // series: each with label, steps, values, marks, color (a name of the style), dashed, fill.
  constructor(chart, series, height) {
    this.chart = chart;
    this.series = series;
    this.height = height;
    this.log = chart.log;
    this.node = el("div", {class: "plot"});
    this.key = el("div", {class: "key"});
    const log = el("input", {type: "checkbox", onchange: (event) => {
      this.log = event.target.checked ? (chart.log || 10) : 0;
      this.build();
    }});
    log.checked = Boolean(chart.log);
    const title = chart.unit ? `${chart.title}, ${chart.unit}` : chart.title;
    this.element = el("figure", {},
      el("div", {class: "controls"}, el("h3", {}, title), el("label", {class: "note"}, log, "log axis")),
      this.node, this.key);
    this.title = title;
    plots.push(this);
  }

  start() {
    // Called when the element is on the page and has a width.
    this.build();
    this.watch = new ResizeObserver(() => {
      const width = this.node.clientWidth;
      if (width > 0 && this.u && Math.abs(width - this.u.width) > 1) {
        this.u.setSize({width, height: this.height});
      }
    });
    this.watch.observe(this.node);
  }

  stop() {
    this.watch?.disconnect();
    this.u?.destroy();
    plots.splice(plots.indexOf(this), 1);
  }

  look() {
    this.u?.setScale("x", {min: view[0], max: view[1]});
  }

  left(step) {
    return this.node.offsetLeft - this.element.offsetLeft + this.u.valToPos(step, "x") + this.u.over.offsetLeft;
  }

  build() {
    this.u?.destroy();
    const log = this.log;
    const tables = this.series.map(({steps, values}) =>
      [steps, log ? values.map((value) => (value > 0 ? value : null)) : values]);
    const data = uPlot.join(tables);
    const ink = color("ink"), grid = color("grid");
    const axis = {stroke: ink, grid: {stroke: grid, width: 1}, ticks: {stroke: grid, width: 1}, font: "12px system-ui, sans-serif"};
    const stepped = uPlot.paths.stepped({align: 1});
    this.u = new uPlot({
      width: Math.max(200, this.node.clientWidth),
      height: this.height,
      legend: {show: false},
      scales: {
        x: {time: false, auto: false, min: view[0], max: view[1]},
        y: {distr: log ? 3 : 1, log: log || 10, range: (u, low, high) => this.range(low, high)},
      },
      axes: [
        {...axis, size: 34, incrs: wholeNumbers(), values: (u, values) => values.map((value) => figure(value))},
        {...axis, size: 64, values: (u, values) => values.map((value) => tick(value, log))},
      ],
      series: [{}, ...this.series.map((one) => ({
        stroke: color(one.color), width: one.thin ? 1 : 1.5, dash: one.dashed ? [5, 4] : undefined, spanGaps: true,
        paths: this.chart.stepped ? stepped : undefined,
      }))],
      bands: (this.chart.bands || []).map(([high, low]) => ({series: [high + 1, low + 1], fill: color("grid")})),
      cursor: {
        sync: {key: "run"},
        drag: {x: true, y: false, setScale: false},
        bind: {dblclick: () => () => look(...whole)},
      },
      hooks: {
        setSelect: [(u) => {
          if (u.select.width < 3) return;
          const low = u.posToVal(u.select.left, "x"), high = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
          look(low, high);
        }],
        setCursor: [(u) => this.fillKey(u.cursor.idx)],
        drawAxes: [(u) => this.drawEvents(u)],
        draw: [(u) => {
          this.drawMarks(u);
          this.drawn?.();
        }],
      },
    }, data, this.node);
    this.u.root.setAttribute("role", "img");
    this.u.root.setAttribute("aria-label", `Chart of ${this.title}. The table below it has its figures.`);
    this.fillKey(null);
  }

  range(low, high) {
    if (low == null || !(low <= high)) return this.log ? [1, 10] : [0, 1];
    const line = this.chart.line?.[0];
    const isWhole = view[0] <= whole[0] && view[1] >= whole[1];
    if (isWhole && this.chart.settled != null) [low, high] = this.settled(low, high);
    if (this.log) return uPlot.rangeLog(low, high, this.log, false);
    if (line != null && line > high && line < 1.5 * high) high = line;
    if (isWhole && this.chart.top != null) high = Math.min(high, this.chart.top);
    if (high <= low) return [low - Math.abs(low || 1) * 0.1, low + Math.abs(low || 1) * 0.1];
    const margin = (high - low) * 0.06;
    return [low >= 0 && low < margin ? 0 : low - margin, high + margin];
  }

  settled(low, high) {
    // Scales are not set in the first steps: the axis is that of the others, if there are any.
    let [least, largest] = [Infinity, -Infinity];
    for (const {steps, values} of this.series) {
      values.forEach((value, place) => {
        if (steps[place] < this.chart.settled || value == null || (this.log && value <= 0)) return;
        least = Math.min(least, value);
        largest = Math.max(largest, value);
      });
    }
    return least <= largest ? [least, largest] : [low, high];
  }

  fillKey(place) {
    const parts = this.series.map((one, at) => {
      const values = this.u?.data[at + 1] ?? [];
      let value = null;
      for (let each = place ?? -1; each >= 0 && value == null; each--) value = values[each];
      const mark = el("i", {class: one.dashed ? "dashed" : null});
      mark.style.borderColor = color(one.color);
      return el("span", {}, mark, place == null ? one.label : `${one.label}: ${figure(value)}`);
    });
    if (place != null && this.u) parts.unshift(el("span", {}, `step ${figure(this.u.data[0][place])}`));
    if (this.series.some((one) => one.marks.length)) parts.push(el("span", {}, "\u25bc NaN, infinite or off the axis"));
    if (this.chart.skipped?.length) parts.push(el("span", {}, `\u00d7 update${ofFirst} skipped`));
    if (this.chart.line) parts.push(el("span", {}, `\u2026 ${this.chart.line[1]}`));
    this.key.replaceChildren(...parts);
  }

  drawEvents(u) {
    const {ctx, bbox} = u;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const event of run.events) {
      if (!shownKinds.has(event.kind) || event.step < view[0] || event.step > view[1]) continue;
      const x = Math.round(u.valToPos(event.step, "x", true));
      const isLine = LINES.includes(event.kind);
      ctx.globalAlpha = isLine ? 0.55 : 0.9;
      ctx.strokeStyle = color(event.kind);
      ctx.beginPath();
      ctx.moveTo(x, isLine ? bbox.top : bbox.top + bbox.height - 6 * devicePixelRatio);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  drawMarks(u) {
    const {ctx, bbox} = u;
    const unit = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const triangle = (step, fill) => {
      const x = u.valToPos(step, "x", true);
      ctx.fillStyle = fill;
      ctx.beginPath();
      ctx.moveTo(x - 4 * unit, bbox.top);
      ctx.lineTo(x + 4 * unit, bbox.top);
      ctx.lineTo(x, bbox.top + 8 * unit);
      ctx.fill();
    };
    const top = u.scales.y.max;
    for (const one of this.series) {
      for (const [step] of one.marks) triangle(step, color("halt"));
      one.values.forEach((value, place) => {
        if (value != null && top != null && value > top) triangle(one.steps[place], color(one.color));
      });
    }
    if (this.chart.line && !this.log) {
      const y = u.valToPos(this.chart.line[0], "y", true);
      ctx.strokeStyle = color("faint");
      ctx.setLineDash([2 * unit, 4 * unit]);
      ctx.lineWidth = unit;
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.setLineDash([]);
    }
    ctx.strokeStyle = color("skip");
    ctx.lineWidth = 1.5 * unit;
    for (const step of this.chart.skipped || []) {
      const x = u.valToPos(step, "x", true), y = bbox.top + bbox.height - 8 * unit, arm = 3.5 * unit;
      ctx.beginPath();
      ctx.moveTo(x - arm, y - arm);
      ctx.lineTo(x + arm, y + arm);
      ctx.moveTo(x - arm, y + arm);
      ctx.lineTo(x + arm, y - arm);
      ctx.stroke();
    }
    ctx.restore();
  }
}

function tick(value, log) {
  // The label of an axis. Large and small powers of two are written as such.
  if (value == null) return "";
  const power = Math.log2(value);
  if (log !== 2 || Math.abs(power) < 10 || !Number.isInteger(power)) return figure(value, 3);
  const raised = String(power).replace("-", "\u207b").replace(/\d/g, (digit) => "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[digit]);
  return `2${raised}`;
}

function wholeNumbers() {
  const found = [];
  for (let power = 1; power < 1e18; power *= 10) found.push(power, 2 * power, 5 * power);
  return found;
}

function figuresTable(series) {
  const at = (pair) => (pair ? `${figure(pair[1])} (step ${figure(pair[0])})` : "-");
  const rows = series.map(({label, summary, marks}) => {
    const odd = marks.slice(0, 5).map(([step, what]) => `${what} at ${step}`).join(", ");
    const notDrawn = summary.not_drawn ? `${summary.not_drawn}: ${odd}` : "none";
    return [label, at(summary.first), at(summary.last), at(summary.least), at(summary.largest),
      figure(summary.count), notDrawn];
  });
  return el("details", {}, el("summary", {}, "Figures"),
    table(["series", "first", "last", "least", "largest", "points", "not drawn"], rows));
}

function curves(part) {
  const grid = el("div", {class: "charts"});
  part.append(zoomControls(), grid);
  const palette = ["a", "b", "c"];
  const inOther = new Map((other?.charts ?? []).map((chart) => [chart.id, chart]));
  const all = [...run.charts];
  for (const [id, chart] of inOther) {
    if (!run.charts.some((each) => each.id === id)) all.push({...chart, series: []});
  }
  if (!all.length) {
    part.append(el("p", {}, "No step has figures yet."));
    return;
  }
  all.forEach((chart, number) => {
    const series = [];
    const letters = other ? [" (A)", " (B)"] : [""];
    [chart.series, inOther.get(chart.id)?.series ?? []].forEach((list, side) => {
      for (const one of list) {
        // A label keeps its colour in both runs; the second run is dashed.
        const place = [...new Set(series.map((each) => each.base)), one.label].indexOf(one.label);
        const name = one.dashed ? "gone" : palette[place % palette.length];
        series.push({...one, base: one.label, label: one.label + letters[side], dashed: one.dashed || side === 1,
          color: name, thin: one.values.length > 300});
      }
    });
    // What a rollback discarded is drawn first, behind what counts.
    series.sort((a, b) => (b.color === "gone") - (a.color === "gone"));
    const plot = new Plot(chart, series, number ? PLOT_HEIGHT : FIRST_HEIGHT);
    if (!number) plot.element.classList.add("first");
    grid.append(plot.element);
    plot.start();
    if (!number) plot.node.after(...eventStrip(plot));
    plot.element.append(figuresTable(series));
  });
}

// ---- The list of events ----

function listOfEvents(part) {
  if (!run.events.length) {
    part.append(el("p", {}, "None."));
    return;
  }
  const there = new Set(run.events.map((event) => event.kind));
  const body = el("tbody");
  const status = el("p", {role: "status", class: "note"});
  let most = ROWS_AT_FIRST;

  function fill() {
    const wanted = run.events.filter((event) => shownKinds.has(event.kind));
    const rows = [];
    for (const event of wanted.slice(0, most)) {
      const more = el("tr", {}, el("td", {colspan: "5"}));
      more.hidden = true;
      const button = el("button", {type: "button", "aria-expanded": "false", "aria-label": `evidence of ${event.code}, step ${event.step}`,
        onclick: () => {
          more.hidden = !more.hidden;
          button.setAttribute("aria-expanded", String(!more.hidden));
          if (!more.hidden) more.firstChild.replaceChildren(el("div", {class: "panel"}, eventCard(event)));
        }}, "evidence");
      const shade = event.undone ? "undone" : event.severity === "error" ? "bad" : null;
      rows.push(el("tr", {class: shade},
        el("td", {class: "number"}, figure(event.step)), el("td", {}, kindMark(event.kind)), el("td", {}, event.code),
        el("td", {class: "what"}, event.text || "-"), el("td", {}, button)), more);
    }
    body.replaceChildren(...rows);
    status.textContent = `${Math.min(most, wanted.length)} of ${wanted.length} events`
      + (run.events_left_out ? `; ${run.events_left_out} more are in journal.jsonl` : "");
    all.hidden = wanted.length <= most;
  }

  const boxes = content.kinds.filter(([kind]) => there.has(kind)).map(([kind]) => {
    const box = el("input", {type: "checkbox", onchange: () => {
      if (box.checked) shownKinds.add(kind);
      else shownKinds.delete(kind);
      fill();
      for (const plot of plots) plot.u?.redraw(false);
    }});
    box.checked = true;
    return el("label", {}, box, kindMark(kind));
  });
  const all = el("button", {type: "button", onclick: () => {
    most = Infinity;
    fill();
  }}, "Show all");
  const head = ["step", "kind", "code", "what", ""].map((text, place) =>
    el("th", {scope: "col", class: place ? null : "number"}, text));
  part.append(el("fieldset", {class: "controls"}, el("legend", {}, "On the axis and in the list:"), boxes), status,
    el("div", {class: "wide"}, el("table", {}, el("thead", {}, el("tr", {}, head)), body)), all);
  fill();
}

// ---- FP8 slots ----

function bytes(text) {
  const binary = atob(text);
  const made = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) made[at] = binary.charCodeAt(at);
  return made;
}

function unpack(packed, row) {
  // The values of a series; null where there is none. Little-endian, as every machine with a browser is.
  const codes = new Uint16Array(bytes(packed.codes[row]).buffer);
  const low = packed.low[row], span = packed.high[row] - low;
  return Array.from(codes, (code) => {
    if (code === NONE) return null;
    return code === ZERO ? 0 : 2 ** (low + (code - FIRST) / (LAST - FIRST) * span);
  });
}

function seriesOfSlot(slots, row) {
  const marks = [];
  const text = slots.series.marks[row];
  if (text) {
    bytes(text).forEach((bits, group) => {
      if (bits) marks.push([slots.steps[group], bits & 2 ? "infinite" : "NaN"]);
    });
  }
  const found = {marks};
  for (const name of ["amax_low", "amax_high", "scale_low", "scale_high", "saturation_high"]) {
    found[name] = unpack(slots.series[name], row);
  }
  return found;
}

const COLUMNS = [
  // label, its value in a slot, and whether the largest values are the worst
  ["trouble", (slot) => slot.place, false],
  ["slot", (slot) => slot.model, false],
  ["amax", (slot) => slot.newest.amax, true],
  ["scale", (slot) => slot.newest.scale, true],
  ["saturation", (slot) => slot.newest.saturation, true],
  ["worst saturation", (slot) => slot.worst.saturation, true],
  ["worst clipped", (slot) => slot.worst.clipped, true],
  ["worst underflow", (slot) => slot.worst.underflow, true],
  ["least SQNR", (slot) => slot.worst.sqnr_db, false],
  ["least even SQNR", (slot) => slot.worst.even_db, false],
];
let chooseSlot = null; // shows a slot by its name; set once there are slots

function slotSources() {
  // The runs that have FP8 slots: their side on the page, their data, and the slots that are listed with their figures.
  // A slot of both runs is listed with A's. mark: says that only one of two such runs has the slot.
  const found = content.runs.map((each, side) => ({side, data: each.slots, slots: []})).filter(({data}) => data);
  const names = found.map(({data}) => new Set(data.slots.map((slot) => slot.name)));
  found.forEach((source, at) => {
    const rest = found[1 - at]?.data;
    const letter = "AB"[source.side];
    source.data.slots.forEach((slot, row) => {
      const isAlone = rest != null && !names[1 - at].has(slot.name);
      // Another run with too many slots for the page may have it among those that are left out.
      const mark = !isAlone ? "" : rest.left_out ? `of ${letter}` : `only in ${letter}`;
      if (at === 0 || isAlone) source.slots.push(Object.assign(slot, {source, row, mark}));
    });
  });
  return found;
}

function slotSection(part, sources) {
  const listed = sources.filter((source) => source.slots.length);
  const two = listed.length === 2;
  // Slots with trouble first, A's before B's, each in its run's order of trouble.
  const every = listed.flatMap((source) => source.slots).sort((a, b) => !a.why - !b.why);
  every.forEach((slot, place) => { slot.place = place; });
  const hasSeries = (slot) => slot.row < slot.source.data.series.marks.length;
  const panel = el("div", {class: "panel", role: "region", "aria-label": "Histories of one slot"});
  const status = el("p", {role: "status", class: "note"});
  const body = el("tbody");
  let sorted = 0, descending = false, most = ROWS_AT_FIRST, chosen = every[0], shown = [];

  const search = el("input", {type: "search", id: "search", placeholder: "such as blocks.03 down", oninput: () => fill()});
  const role = el("select", {id: "role", onchange: () => fill()},
    ["all roles", "input", "weight", "grad_output"].map((text) => el("option", {}, text)));
  const trouble = el("input", {type: "checkbox", id: "trouble", onchange: () => fill()});

  const heads = COLUMNS.map(([label, , largest], number) => el("th", {scope: "col"},
    el("button", {type: "button", onclick: () => {
      // The worst come first; the second click turns the order around.
      descending = sorted === number ? !descending : largest;
      sorted = number;
      fill();
    }}, label)));
  const head = [...heads, el("th", {scope: "col"}, "amax history")];

  function wanted() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const ofRole = role.selectedIndex ? `.${role.value}` : "";
    return every.filter((slot) => {
      const name = slot.name.toLowerCase();
      const text = `${name} ${slot.mark.toLowerCase()}`;
      return name.endsWith(ofRole) && words.every((word) => text.includes(word)) && (!trouble.checked || slot.why);
    });
  }

  function fill() {
    const value = COLUMNS[sorted][1];
    const number = (slot) => {
      const found = value(slot);
      return found === "inf" ? Infinity : found;
    };
    const turn = descending ? -1 : 1;
    shown = wanted().sort((a, b) => {
      const x = number(a), y = number(b);
      if (x == null || y == null) return (x == null) - (y == null) || a.place - b.place;
      return (x < y ? -1 : x > y ? 1 : 0) * turn || a.place - b.place;
    });
    heads.forEach((th, at) => {
      if (at === sorted) th.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    });
    body.replaceChildren(...shown.slice(0, most).map(rowOf));
    const leftOut = listed.reduce((sum, {data}) => sum + data.left_out, 0);
    status.textContent = `${Math.min(most, shown.length)} of ${shown.length} slots that match, of ${every.length}`
      + (leftOut ? `; ${leftOut} more are in the run's table` : "");
    all.hidden = shown.length <= most;
  }

  function rowOf(slot) {
    const button = el("button", {type: "button", class: "link", "aria-pressed": String(slot === chosen),
      onclick: () => choose(slot, true)}, slot.name);
    slot.button = button;
    const cells = COLUMNS.slice(2).map(([, value]) => el("td", {class: "number"}, figure(value(slot), 3)));
    const mark = slot.mark ? ` (${slot.mark})` : null;
    return el("tr", {}, el("td", {class: "why"}, slot.why || "-"), el("td", {class: "slot"}, button, mark), cells,
      el("td", {}, hasSeries(slot) ? spark(slot) : "-"));
  }

  function spark(slot) {
    // Logarithms of the largest amax of each group, over the width of the cell.
    const values = unpack(slot.source.data.series.amax_high, slot.row).map((value) => (value > 0 ? Math.log2(value) : null));
    const there = values.filter((value) => value != null);
    const low = Math.min(...there), span = Math.max(...there) - low || 1;
    let path = "", pen = "M";
    values.forEach((value, at) => {
      if (value == null) return;
      path += `${pen}${(at / Math.max(1, values.length - 1) * 100).toFixed(1)} ${(19 - (value - low) / span * 18).toFixed(1)}`;
      pen = "L";
    });
    const space = "http://www.w3.org/2000/svg";
    const image = document.createElementNS(space, "svg");
    image.setAttribute("class", "spark");
    image.setAttribute("viewBox", "0 0 100 20");
    image.setAttribute("preserveAspectRatio", "none");
    image.setAttribute("aria-hidden", "true");
    const line = document.createElementNS(space, "path");
    line.setAttribute("d", path);
    image.append(line);
    return image;
  }

  let drawn = [];
  function choose(slot, byHand) {
    chosen.button?.setAttribute("aria-pressed", "false");
    chosen = slot;
    slot.button?.setAttribute("aria-pressed", "true");
    for (const plot of drawn) plot.stop();
    drawn = [];
    panel.replaceChildren(el("h3", {}, slot.name), el("p", {}, slot.why || "every figure within its limit"));
    if (slot.mark) panel.append(el("p", {}, `${slot.mark}: in the other run its layer is not in FP8, or not there`));
    if (!hasSeries(slot)) {
      panel.append(el("p", {}, "This page has no room for the histories of so many slots; fp8_telemetry.parquet has all."));
    } else {
      const grid = el("div", {class: "charts"});
      panel.append(grid);
      drawn = plotsOfSlot(slot);
      for (const plot of drawn) {
        grid.append(plot.element);
        plot.start();
      }
    }
    if (byHand) panel.scrollIntoView({block: "nearest"});
  }

  function plotsOfSlot(slot) {
    const sides = [[slot.source, slot.row]];
    for (const source of sources) {
      const row = source.data.slots.findIndex((each) => each.name === slot.name);
      if (source !== slot.source && row >= 0 && row < source.data.series.marks.length) sides.push([source, row]);
    }
    const made = {amax: [], scale: [], saturation: []};
    sides.forEach(([{data, side}, row]) => {
      const values = seriesOfSlot(data, row);
      const letter = other ? ` (${"AB"[side]})` : "";
      const add = (name, label, list, marks = []) => made[name].push({label: label + letter, steps: data.steps,
        values: list, marks, color: side ? "b" : "a", dashed: side === 1, thin: true});
      // Where every point is one step, its smallest value is its largest one.
      const joined = data.joined > 1;
      add("amax", joined ? "largest" : "amax", values.amax_high, values.marks);
      if (joined) add("amax", "smallest", values.amax_low);
      add("scale", joined ? "largest" : "scale", values.scale_high);
      if (joined) add("scale", "smallest", values.scale_low);
      add("saturation", joined ? "largest" : "saturation", values.saturation_high);
    });
    const bands = slot.source.data.joined > 1 ? [[0, 1]] : [];
    const titles = {amax: "amax", scale: "scale", saturation: "saturation: amax x scale / largest FP8 value"};
    return Object.entries(made).map(([name, series]) => new Plot({title: titles[name], unit: "", log: 2,
      stepped: name === "scale", settled: slot.source.data.judged_from, bands: name === "saturation" ? [] : bands}, series, PLOT_HEIGHT));
  }

  const all = el("button", {type: "button", onclick: () => {
    most = Infinity;
    fill();
  }}, "Show all");
  chooseSlot = (name) => {
    const slot = every.find((each) => each.name === name);
    if (slot) choose(slot, true);
  };

  const steps = ({data, side}) => {
    const rows = data.every_step ? "every step" : "the steps with rows in the journal";
    const joined = data.joined > 1 ? `; each point joins ${data.joined} steps by their smallest and largest value` : "";
    return `Figures of ${two ? `${"AB"[side]}, ` : ""}${rows}${joined}. `;
  };
  const about = two ? "A slot of both runs is listed with A's figures, one that only B has with B's. " : "";
  part.append(
    el("p", {class: "note"}, `${listed.map(steps).join("")}${about}Sorted by how far the worst figure is beyond the `
      + "limit of the fallback (a recipe's defaults); an amax that was not finite, and layers in BF16, come first. Worst "
      + `figures are of applied steps from step ${listed[0].data.judged_from} on.`),
    panel, ...listed.flatMap((source) => map(source, hasSeries, choose, two && source.side === 1)),
    el("div", {class: "controls", role: "search"}, el("label", {for: "search"}, "search"), search,
      el("label", {for: "role"}, "role"), role, el("label", {}, trouble, "beyond a limit only")),
    status, el("div", {class: "wide"}, el("table", {id: "slots-table"}, el("thead", {}, el("tr", {}, head)), body)), all);
  fill();
  choose(every[0], false);
}

function map({data, slots}, hasSeries, choose, ofB) {
  // The saturation of every slot by step, a row a slot in the model's order.
  const rows = slots.filter(hasSeries).sort((a, b) => a.model - b.model);
  if (!rows.length) return [];
  const groups = data.steps.length;
  const whose = ofB ? "slot that only B has" : "slot";
  const canvas = el("canvas", {role: "img", "aria-label": `Map of the saturation of every ${whose} by step. The table has its figures.`});
  const told = el("p", {class: "note"}, "Point at the map for a slot and step; click to see its histories.");
  const values = rows.map((slot) => unpack(data.series.saturation_high, slot.row));
  canvas.width = groups;
  canvas.height = rows.length;
  canvas.style.height = `${Math.max(90, Math.min(640, 4 * rows.length))}px`;

  function draw() {
    const context = canvas.getContext("2d");
    const image = context.createImageData(groups, rows.length);
    const [ground, under, over, none] = ["raised", "a", "rollback", "gone"].map(rgb);
    values.forEach((row, y) => row.forEach((value, x) => {
      let shade = none;
      if (value > 0) {
        // Factors of two from 1, to two on either side.
        const octaves = Math.max(-2, Math.min(2, Math.log2(value))) / 2;
        const end = octaves > 0 ? over : under;
        shade = ground.map((part, at) => part + (end[at] - part) * Math.abs(octaves));
      }
      image.data.set([...shade, 255], 4 * (y * groups + x));
    }));
    context.putImageData(image, 0, 0);
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) / box.width * groups);
    const y = Math.floor((event.clientY - box.top) / box.height * rows.length);
    return [Math.max(0, Math.min(groups - 1, x)), Math.max(0, Math.min(rows.length - 1, y))];
  }
  canvas.addEventListener("mousemove", (event) => {
    const [x, y] = at(event);
    told.textContent = `${rows[y].name}, step ${data.steps[x]}: saturation ${figure(values[y][x], 3)}`;
  });
  canvas.addEventListener("click", (event) => choose(rows[at(event)[1]], true));
  themed.push(draw);
  draw();
  const swatch = (name, text) => {
    const box = el("i");
    box.style.background = color(name);
    return el("span", {}, box, text);
  };
  return [el("h3", {}, `Saturation of every ${whose}, layers from top to bottom, steps from left to right`),
    el("p", {class: "swatches note"}, swatch("a", "under a quarter of the format's largest value"),
      swatch("raised", "at it, where delayed scaling puts amax"), swatch("rollback", "four times over it: clipped"),
      swatch("gone", "no amax")),
    el("div", {class: "map"}, canvas), told];
}

function rgb(name) {
  const text = color(name);
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

// ---- The other parts ----

function overview(part) {
  const grid = el("div", {class: "charts"});
  content.runs.forEach((each, side) => {
    const box = el("div", {});
    if (other) box.append(el("h3", {}, `${"AB"[side]}: ${each.name}`));
    box.append(table([], each.account.map(([label, text]) => [el("strong", {}, label), text])));
    if (each.running) box.append(el("p", {class: "note"}, "The run has not ended: harness report RUN writes this page again."));
    if (each.link) box.append(link(each.link));
    if (!other) box.classList.add("first");
    grid.append(box);
  });
  part.append(grid);
}

function link({href, command}) {
  // Only addresses of the web become links.
  const made = /^https?:\/\//.test(href) ? el("a", {href, rel: "noreferrer"}, "This run in MLflow") : href;
  return el("p", {}, command ? ["In MLflow: ", el("code", {}, command), ", then "] : [], made);
}

function moves(part) {
  const rest = (count, what) => {
    if (count) part.append(el("p", {class: "note"}, `and ${count} more ${what}, in journal.jsonl`));
  };
  if (!run.moves.length && !run.rollbacks.length) {
    part.append(el("p", {}, "No layer changed its precision, and nothing was rolled back."));
    return;
  }
  for (const move of run.moves) {
    const texts = [];
    if (move.demote) texts.push(`${move.demote} to BF16`);
    if (move.promote) texts.push(`${move.promote} back to FP8`);
    if (move.whole_run) texts.push(`the whole run to ${move.whole_run}`);
    const box = el("div", {class: "panel"}, el("h3", {}, `step ${move.step}: ${texts.join("; ")}`));
    if (move.undone) box.append(el("p", {class: "note"}, "A rollback undid this."));
    box.append(el("p", {}, move.why || "The journal has no evidence for it."));
    if (move.slots.length) {
      const button = (slot) => (chooseSlot ? el("button", {type: "button", class: "link", onclick: () => chooseSlot(slot)}, slot) : slot);
      box.append(table(["slot", "figure", "observed, newest last"],
        move.slots.map((each) => [button(each.slot), each.figure, el("code", {}, each.values)])));
    }
    part.append(box);
  }
  rest(run.moves_left_out, "switches");
  for (const each of run.rollbacks) {
    const box = el("div", {class: "panel"}, el("h3", {}, `step ${each.step}: rolled back to step ${each.to_step ?? "?"}`),
      el("p", {}, each.why), el("p", {class: "note"}, `Windows passed over: ${each.windows || "none"}. `
        + (each.source ? `State from ${each.source}.` : "")));
    if (each.led.length) box.append(table(["before it", "codes", "last text"], each.led));
    part.append(box);
  }
  rest(run.rollbacks_left_out, "rollbacks");
  if (run.replays.length) {
    part.append(el("p", {}, "To run a bad step again:"), table(["step", "command"],
      run.replays.map(([step, command]) => [figure(step), el("code", {}, command)]), [0]));
  }
}

function checkpoints(part) {
  const rows = run.checkpoints.map(([step, attempt, time, seconds, count, state]) =>
    [figure(step), figure(attempt), time, figure(seconds, 3), size(count), state]);
  if (rows.length) part.append(table(["step", "attempt", "saved", "seconds", "on disk", "state"], rows, [0, 1, 3, 4]));
  else part.append(el("p", {}, "None was saved."));
}

function cost(part) {
  const grid = el("div", {class: "charts"});
  content.runs.forEach((each, side) => {
    const heading = other ? el("h3", {}, `${"AB"[side]}: ${each.name}`) : null;
    grid.append(el("div", {}, heading, table([], each.cost.map(([label, text]) => [el("strong", {}, label), text]))));
  });
  part.append(grid);
}

function measured(part) {
  for (const each of run.measured) {
    part.append(el("h3", {}, each.title), table(each.headings, each.rows, each.numbers));
    for (const note of each.notes) part.append(el("p", {class: "note"}, note));
  }
}

function comparison(part) {
  const found = content.compared;
  const [steps, first, last] = found.steps;
  if (!steps) part.append(el("p", {}, "No step is in both runs."));
  else if (!found.first) part.append(el("p", {}, `No divergence: all recorded figures of steps ${first} to ${last} agree, to the last bit.`));
  else {
    part.append(el("p", {}, el("strong", {}, `First divergence, of steps ${first} to ${last}: ${found.first}`)));
    if (found.evidence) part.append(el("p", {}, found.evidence));
    if (found.causes.length) part.append(el("h3", {}, "Likely causes"), table(["kind", "key", "A", "B"], found.causes));
  }
  if (found.gaps.length) part.append(el("h3", {}, "Losses"), table(["loss", "A", "B", "B - A"], found.gaps, [1, 2, 3]));
  for (const note of found.notes) part.append(el("p", {class: "note"}, note));
  part.append(el("h3", {}, "What they were given that differs"));
  if (found.given.length) part.append(table(["kind", "key", "A", "B"], found.given));
  else part.append(el("p", {}, "Nothing that is recorded: config, recipe, plan, data, libraries, machine."));
  if (found.left_out) part.append(el("p", {class: "note"}, `and ${found.left_out} more: harness compare --json lists them`));
}

function plan(part) {
  const found = run.plan;
  part.append(el("pre", {}, found.lines.join("\n")));
  part.append(table(["layers", "count", "precision", "backend", "shape", "why"],
    found.layers.map(([layers, count, ...rest]) => [el("code", {}, layers), figure(count), ...rest]), [1]));
  if (found.left_out) part.append(el("p", {class: "note"}, `and ${found.left_out} more in plan.json`));
}

function pictures(part) {
  for (const {about, source} of content.pictures) {
    part.append(el("figure", {}, el("figcaption", {class: "note"}, about), el("img", {class: "picture", src: source, alt: about})));
  }
}

const themed = []; // functions that draw in the colours of the theme
section("overview", "Overview", overview);
if (content.compared) section("compared", "A and B", comparison);
section("curves", "Curves", curves);
section("events", `Events${ofFirst}`, listOfEvents);
const sources = slotSources();
if (sources.length) {
  const sides = sources.filter((source) => source.slots.length).map((source) => "AB"[source.side]);
  section("slots", `FP8 slots${other ? ` of ${sides.join(" and ")}` : ""}`, (part) => slotSection(part, sources));
}
section("moves", `Demotions and rollbacks${ofFirst}`, moves);
section("checkpoints", `Checkpoints${ofFirst}`, checkpoints);
section("cost", "Cost", cost);
if (run.measured.length) section("measured", `Profiles and layers${ofFirst}`, measured);
if (run.plan) section("plan", `Precision plan${ofFirst}`, plan);
if (run.config != null) section("config", `Config${ofFirst}`, (part) => part.append(el("pre", {}, run.config)));
if (content.pictures.length) section("pictures", `FP8 over the layers${ofFirst}`, pictures);

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const swatch of document.querySelectorAll("[data-kind]")) swatch.style.background = color(swatch.dataset.kind);
  for (const plot of plots) plot.build();
  for (const each of themed) each();
});
performance.mark("usable");
document.documentElement.dataset.ready = "true";
})();
