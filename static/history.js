// The charts of the history: drawn from /ops/history.json, zoomed and read together.
"use strict";
(() => {
  const main = document.getElementById("content");
  const charts = document.getElementById("charts");
  const at = document.getElementById("at");
  const HINT = at.textContent;
  const HEIGHT = 150;
  const DEFINITIONS = [
    ["Tokens a second", rate, [["output", "output_tokens_per_second", "strong"], ["prompt", "prompt_tokens_per_second", "pale"]]],
    ["Requests a second", rate, [["ended", "requests_per_second", "strong"], ["goodput", "goodput_requests_per_second", "pale"]]],
    ["Requests inside", count, [["waiting", "waiting", "strong"], ["most waiting", "waiting_max", "pale"], ["running", "running", "second"]]],
    ["KV memory", percent, [["used", "kv_usage", "strong"], ["most", "kv_usage_max", "pale"]], { top: 1 }],
    ["First token", seconds, quantiles("ttft"), { target: "ttft_p95_seconds" }],
    ["Between tokens", seconds, quantiles("itl"), { target: "itl_p95_seconds" }],
    ["End to end", seconds, quantiles("e2e"), { target: "e2e_p95_seconds" }],
    ["Within target", percent, [["first token", "attainment_ttft", "strong"], ["between tokens", "attainment_itl", "second"], ["end to end", "attainment_e2e", "pale"]], { top: 1 }],
    ["Trouble", count, [["refused", "rejections", "strong"], ["failed", "errors", "bad"], ["aborted", "aborts", "second"], ["preempted", "preemptions", "pale"]]],
    ["Event loop lag", seconds, [["mean", "loop_lag_seconds", "strong"], ["most", "loop_lag_max_seconds", "pale"]]],
  ];
  let span = { from: Number(main.dataset.from), to: Number(main.dataset.to) };
  let live = Number(main.dataset.live) || 0;
  let back = [];
  let events = [];
  let plots = [];
  let loading = null;
  let timer = 0;

  function quantiles(name) {
    return [["p50", `${name}_p50_seconds`, "second"], ["p95", `${name}_p95_seconds`, "strong"], ["p99", `${name}_p99_seconds`, "pale"]];
  }

  function rate(value) { return value === 0 ? "0" : value < 100 ? value.toFixed(value < 1 ? 2 : 1) : Math.round(value).toLocaleString("en"); }
  function count(value) { return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(1); }
  function percent(value) { return `${(value * 100).toFixed(value > 0.99 && value < 1 ? 1 : 0)} %`; }
  function seconds(value) { return value === 0 ? "0" : value < 0.01 ? `${(value * 1000).toFixed(1)} ms` : value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`; }
  function tick(word) { return (value) => word(value).replace(/(\.\d*?)0+(?= |$)/, "$1").replace(/\.(?= |$)/, ""); }
  function clock(time) { return `${new Date(time * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`; }

  // What stands below the charts: the time of day, and at midnight the day.
  function dial(plot, splits, axis, space, step) {
    return splits.map((time) => {
      const [day, hour] = new Date(time * 1000).toISOString().split("T");
      if (step >= 86400 || hour.startsWith("00:00:00")) {
        return new Date(`${day}T12:00Z`).toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });
      }
      return hour.slice(0, step < 60 ? 8 : 5);
    });
  }

  // The smallest round number that is not below a value.
  function ceiling(value) {
    if (!(value > 0)) return 1;
    const power = 10 ** Math.floor(Math.log10(value));
    return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => value <= step * power * 1.0000001);
  }

  function colours() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    return { strong: of("accent"), pale: of("faint"), second: of("soft"), bad: of("bad"), ink: of("soft"), line: of("line"), warn: of("warn") };
  }

  function drawMarks(plot, paint) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const event of events) {
      if (event.seconds < span.from || event.seconds > span.to) continue;
      const x = Math.round(plot.valToPos(event.seconds, "x", true));
      ctx.strokeStyle = event.level ? paint.warn : paint.ink;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  function tell(plot) {
    const { left } = plot.cursor;
    if (left == null || left < 0) { at.textContent = HINT; return; }
    const near = events.filter((event) => Math.abs(plot.valToPos(event.seconds, "x") - left) <= 6);
    at.textContent = [clock(plot.posToVal(left, "x")), ...near.map((event) => `${event.title}: ${event.text}`)].join(" · ");
  }

  function options([title, word, lines, more = {}], data) {
    const paint = colours();
    const axis = { stroke: paint.ink, grid: { stroke: paint.line, width: 1 }, ticks: { stroke: paint.line, width: 1 }, font: "11px system-ui" };
    // Where nothing is pointed at, the last value there is.
    const print = (plot, value, line, index) => {
      const shown = index == null ? plot.data[line].findLast((known) => known != null) : value;
      return shown == null ? "–" : word(shown);
    };
    const target = more.target && data.targets[more.target];
    const series = lines.map(([label, , css]) => ({
      label, stroke: paint[css], width: css === "strong" ? 2 : 1, value: print, points: { show: false },
    }));
    if (target) series.push({ label: "target", stroke: paint.warn, width: 1.25, dash: [5, 4], value: print, points: { show: false } });
    return {
      width: charts.clientWidth, height: HEIGHT, series: [{ value: (plot, value) => (value == null ? "–" : clock(value)) }, ...series],
      tzDate: (time) => uPlot.tzDate(new Date(time * 1000), "Etc/UTC"),
      axes: [{ ...axis, values: dial }, { ...axis, size: 58, splits: (plot, index, low, high) => [low, high / 2, high], values: (plot, values) => values.map(tick(word)) }],
      scales: { x: { range: () => [span.from, span.to] }, y: { range: (plot, low, high) => [0, more.top || ceiling(high)] } },
      cursor: { y: false, sync: { key: "history", setSeries: false }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => goBack() } },
      hooks: { draw: [(plot) => drawMarks(plot, paint)], setCursor: [(plot) => { if (plot.cursor.event) tell(plot); }], setSelect: [select] },
    };
  }

  function columns([, , lines, more = {}], data) {
    const times = data.series.time;
    const target = more.target && data.targets[more.target];
    return [times, ...lines.map(([, name]) => data.series[name]), ...(target ? [times.map(() => target)] : [])];
  }

  function draw(data) {
    charts.hidden = at.hidden = false;
    document.getElementById("numbers").open = false;
    plots.forEach((plot) => plot.destroy());
    charts.replaceChildren();
    plots = DEFINITIONS.map((definition) => {
      const figure = document.createElement("figure");
      figure.className = "card";
      const title = document.createElement("h2");
      title.textContent = definition[0];
      figure.append(title);
      charts.append(figure);
      const plot = new uPlot(options(definition, data), columns(definition, data), figure);
      plot.root.setAttribute("role", "img");
      plot.root.setAttribute("aria-label", `${definition[0]}, ${clock(span.from)} to ${clock(span.to)}`);
      return plot;
    });
    fit();
  }

  function fit() {
    for (const plot of plots) plot.setSize({ width: plot.root.parentElement.clientWidth - 32, height: HEIGHT });
  }

  function list() {
    const items = events.slice(-50).reverse().map((event) => {
      const item = document.createElement("li");
      const text = document.createElement("p");
      const title = document.createElement("b");
      title.textContent = event.title;
      title.className = event.level;
      text.append(title, ` ${event.text}`);
      const note = document.createElement("p");
      note.className = "note";
      note.textContent = `${clock(event.seconds)} · ${event.running} running, ${event.waiting} waiting`;
      item.append(text, note);
      return item;
    });
    document.getElementById("events").replaceChildren(...items);
    document.getElementById("no-events")?.remove();
  }

  async function load() {
    clearTimeout(timer);
    loading?.abort();
    const mine = (loading = new AbortController());
    const wanted = live ? `range=${live}` : `from=${Math.floor(span.from)}&to=${Math.ceil(span.to)}`;
    const points = Math.max(100, Math.min(2000, charts.clientWidth || main.clientWidth));
    try {
      const answer = await fetch(`/ops/history.json?${wanted}&points=${points}`, { signal: mine.signal });
      const data = await answer.json();
      if (!answer.ok) throw new Error(data.error?.message || `The server answered ${answer.status}.`);
      span = { from: data.from, to: data.to };
      events = data.events.map((event) => ({ ...event, seconds: Date.parse(event.time) / 1000 }));
      show(data);
    } catch (error) {
      if (mine.signal.aborted) return;
      at.hidden = false;
      at.textContent = `The history could not be loaded: ${error.message}`;
    }
    if (live) timer = setTimeout(() => (document.hidden ? load.later() : load()), Math.max(5000, (live / points) * 1000));
  }
  load.later = () => document.addEventListener("visibilitychange", () => load(), { once: true });

  function show(data) {
    const query = `from=${span.from}&to=${span.to}`;
    document.getElementById("csv").href = `/ops/history.csv?${query}`;
    document.getElementById("json").href = `/ops/history.json?${query}`;
    document.getElementById("span").textContent = `${clock(span.from)} to ${clock(span.to)}`;
    for (const link of document.querySelectorAll("[data-range]")) {
      if (Number(link.dataset.range) === live) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    const busy = plots.some((plot) => plot.select.width > 0);
    if (plots.length && !busy) {
      DEFINITIONS.forEach((definition, index) => plots[index].setData(columns(definition, data)));
    } else if (!busy) {
      draw(data);
    }
    list();
  }

  function go(from, to, remember = true) {
    if (remember) back.push({ ...span, live });
    live = 0;
    const length = Math.max(10, to - from);
    span = { from: Math.floor(from), to: Math.floor(from) + Math.ceil(length) };
    history.replaceState(null, "", `/ops/history?from=${span.from}&to=${span.to}`);
    load();
  }

  function goBack() {
    const before = back.pop();
    if (!before) return go(span.from - (span.to - span.from) / 2, span.to + (span.to - span.from) / 2, false);
    if (before.live) return goLive(before.live);
    go(before.from, before.to, false);
  }

  function goLive(length) {
    live = length;
    history.replaceState(null, "", `/ops/history?range=${live}`);
    load();
  }

  function select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const from = plot.posToVal(left, "x");
    const to = plot.posToVal(left + width, "x");
    for (const each of plots) each.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (Math.abs(from - span.from) > 0.5 || Math.abs(to - span.to) > 0.5) go(from, to);
  }

  document.querySelector(".moves").hidden = false;
  document.addEventListener("click", (event) => {
    const range = event.target.closest("[data-range]");
    const button = event.target.closest("[data-move], [data-zoom]");
    const length = span.to - span.from;
    if (range && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
      event.preventDefault();
      back = [];
      goLive(Number(range.dataset.range));
    } else if (button?.dataset.move) {
      go(span.from + (Number(button.dataset.move) * length) / 2, span.to + (Number(button.dataset.move) * length) / 2);
    } else if (button) {
      const half = (length * Number(button.dataset.zoom)) / 2;
      const middle = (span.from + span.to) / 2;
      go(middle - half, middle + half);
    }
  });
  addEventListener("resize", fit);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { plots.forEach((plot) => plot.destroy()); plots = []; load(); });
  load();
})();
