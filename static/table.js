// The table of seats and steps: tells what a cell is, stands still, goes back to earlier steps.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const picture = byId("picture");
  if (!picture) return;
  const said = byId("cell"), link = byId("cell-request"), slider = byId("at-step"), pauseButton = byId("pause");
  const COLUMNS = 120, HINT = said.textContent;
  let table = null;    // what the picture is of
  let cursor = null;   // {seat, step}; it stays on its step while the picture moves on
  let pointer = null;  // where the mouse is, while it is over the picture
  let paused = false, wanted = null, fetching = false;

  const count = (number) => number.toLocaleString("en");
  const tokens = (number) => `${count(number)} token${number === 1 ? "" : "s"}`;

  function read() {
    const holder = picture.querySelector("[data-cells]");
    const { seats, pitch, last, oldest, newest } = holder.dataset;
    table = { ...JSON.parse(holder.dataset.cells), svg: holder.querySelector(".steps"), seats: +seats, pitch: +pitch,
      last: +last, oldest: +oldest, newest: +newest };
    table.rows = new Map();
    for (const [seat, first, end, phase, each, name] of table.runs) {
      if (!table.rows.has(seat)) table.rows.set(seat, []);
      table.rows.get(seat).push({ first, end, phase: table.phases[phase], each, name: table.names[name] });
    }
    if ("past" in holder.dataset) setPaused(true);
    slider.min = Math.min(table.newest, table.oldest + COLUMNS - 1);
    slider.max = table.newest;
    slider.value = table.last;
    slider.setAttribute("aria-valuetext", `step ${count(table.last)}`);
    byId("earlier").disabled = table.first <= table.oldest;
    byId("later").disabled = table.last >= table.newest && !paused;
    if (pointer) point();
    if (cursor && (cursor.step < table.first || cursor.seat >= table.seats)) cursor = null;
    mark();
  }

  const columnOf = (step) => table.offset + step - table.first;
  const runAt = (seat, column) => (table.rows.get(seat) || []).find((run) => run.first <= column && column <= run.end);

  function describeStep(column) {
    let sum = 0;
    for (const [, first, end, , each] of table.runs) if (first <= column && column <= end) sum += each;
    for (const [where, , made] of table.drafts) if (where === column) sum += made;
    const budget = table.budgets.filter(([from]) => from <= column).at(-1);
    const change = table.changes.find(([where]) => where === column);
    return `step ${count(table.first + column - table.offset)} computed ${count(sum)} of ${count(budget ? budget[1] : 0)} tokens` +
      (change ? `, the first under generation ${count(change[1])} of the settings` : "");
  }

  function describeRun(run, column, seat) {
    if (run.phase === "prefill") return `reads its prompt, ${tokens(run.each)}`;
    if (run.phase === "recompute") {
      const [, , fresh] = table.mixed.find(([where, there]) => where === column && there === seat) || [0, 0, 0];
      return `computes again what a preemption threw away, ${tokens(run.each - fresh)}` + (fresh ? `, and goes on by ${count(fresh)}` : "");
    }
    if (run.phase === "idle") return "keeps its seat and has no tokens";
    if (run.phase === "padding") return `computes for nothing, ${tokens(run.each)}`;
    const [, , made, right] = table.drafts.find(([where, there]) => where === column && there === seat) || [0, 0, 0, 0];
    return `decodes, ${tokens(1 + right)}` + (made ? `: ${right} of ${made} drafted tokens ${made === 1 ? "was" : "were"} right` : "");
  }

  function tell() {
    const column = cursor && columnOf(cursor.step);
    const run = cursor && runAt(cursor.seat, column);
    let text = HINT;
    if (cursor && cursor.seat < 0) text = describeStep(column);
    else if (cursor) {
      const lost = table.lost.find(([where, name]) => where === column && runAt(cursor.seat, column - 1)?.name === name);
      const what = run ? `${run.name} ${describeRun(run, column, cursor.seat)}` : "nobody";
      text = `Seat ${cursor.seat + 1}: ${what}${lost && lost[1] !== run?.name ? `; ${lost[1]} lost it here` : ""} · ${describeStep(column)}`;
    }
    if (said.textContent !== text) said.textContent = text;
    link.hidden = !run;
    if (run) link.href = `/ops/requests?id=${encodeURIComponent(run.name)}`;
  }

  function mark() {
    table.svg.querySelector(".cursor")?.remove();
    if (cursor) {
      const box = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const seats = table.seats * table.pitch, strip = cursor.seat < 0;
      const height = strip ? table.svg.height.baseVal.value - seats : Math.max(table.pitch, 9);
      const values = { class: "cursor", x: `${columnOf(cursor.step) / COLUMNS * 100}%`, width: `${100 / COLUMNS}%`, height,
        y: strip ? seats : (cursor.seat + 0.5) * table.pitch - height / 2 };
      for (const [name, value] of Object.entries(values)) box.setAttribute(name, value);
      table.svg.append(box);
    }
    tell();
  }

  function point() {
    const box = table.svg.getBoundingClientRect();
    const column = Math.floor((pointer.x - box.left) / box.width * COLUMNS), seat = Math.floor((pointer.y - box.top) / table.pitch);
    const inside = pointer.x >= box.left && pointer.y >= box.top && pointer.y <= box.bottom && column < COLUMNS;
    const known = table.last && column >= table.offset;
    cursor = inside && known ? { seat: seat < table.seats ? seat : -1, step: table.first + column - table.offset } : null;
  }

  function setPaused(value) {
    paused = value;
    pauseButton.setAttribute("aria-pressed", paused);
    pauseButton.textContent = paused ? "Go on" : "Pause";
    picture.classList.toggle("paused", paused);
  }

  // What came meanwhile is not sent again where nothing has happened since.
  function turn() {
    setPaused(!paused);
    if (!paused) htmx.ajax("GET", "/ops/table", { target: picture });
  }

  async function show(step) {
    setPaused(true);
    wanted = Math.max(+slider.min, Math.min(+slider.max, step));
    if (fetching) return;
    fetching = true;
    while (wanted !== null) {
      const to = wanted;
      wanted = null;
      // Where the server cannot be reached the picture stays, and the page says so by itself.
      await htmx.ajax("GET", `/ops/table?to=${to}`, { target: picture }).catch(() => {});
    }
    fetching = false;
  }

  function move(seats, steps) {
    if (!table.last) return;
    cursor ??= { seat: 0, step: table.last + (steps > 0 ? 0 : -steps) };
    const step = cursor.step + steps;
    cursor = { seat: Math.max(0, Math.min(table.seats - 1, cursor.seat + seats)), step: Math.max(table.oldest, Math.min(step, Math.max(table.last, table.newest))) };
    if (cursor.step < table.first) show(cursor.step + COLUMNS - 1);
    else if (cursor.step > table.last) show(cursor.step);
    else mark();
  }

  const keys = {
    ArrowLeft: () => move(0, -1), ArrowRight: () => move(0, 1), ArrowUp: () => move(-1, 0), ArrowDown: () => move(1, 0),
    Home: () => move(0, table.first - (cursor ?? { step: table.last }).step),
    End: () => move(0, table.last - (cursor ?? { step: table.last }).step),
    PageUp: () => show(table.last - COLUMNS), PageDown: () => show(table.last + COLUMNS),
    Escape: () => { cursor = null; mark(); },
    " ": turn,
    Enter: () => { if (!link.hidden) location.href = link.href; },
  };
  picture.addEventListener("keydown", (event) => {
    if (event.target !== picture || !(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    pointer = null;
    keys[event.key]();
  });
  picture.addEventListener("pointermove", (event) => { pointer = { x: event.clientX, y: event.clientY }; point(); mark(); });
  picture.addEventListener("pointerdown", (event) => { pointer = { x: event.clientX, y: event.clientY }; point(); mark(); });
  // The cell that was pointed at last stays, so that one can go to its timeline.
  picture.addEventListener("pointerleave", () => { pointer = null; });
  picture.addEventListener("wheel", (event) => {
    const way = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
    if (!way || Math.abs(way) < Math.abs(event.deltaY) && !event.shiftKey) return;
    event.preventDefault();
    show((wanted ?? table.last) + Math.sign(way) * 6);
  }, { passive: false });
  picture.addEventListener("htmx:sseBeforeMessage", (event) => { if (paused) event.preventDefault(); });
  picture.addEventListener("htmx:afterSwap", read);
  slider.addEventListener("input", () => show(+slider.value));
  byId("earlier").addEventListener("click", () => show(table.last - COLUMNS / 2));
  byId("later").addEventListener("click", () => show(table.last + COLUMNS / 2));
  pauseButton.addEventListener("click", turn);
  byId("reading").hidden = false;
  picture.classList.add("told");  // the line below tells more than the rectangles' own titles
  read();
})();
