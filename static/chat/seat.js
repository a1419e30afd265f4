// Where one's own requests sit: the last steps of the table as a strip, others in grey and without a name.
import { $, element, plural, seconds, svg } from "./dom.js";

const POLL_MS = 600;
const FIRST_MS = 120;
const MAX_FAILURES = 3;
const STEP_WIDTH = 8;
const ROW_HEIGHT = 7;
const MAX_SEATS = 64;   // more would be too thin to be seen; one's own are shown in any case

export class SeatPanel {
  constructor() {
    this.ids = () => [];
    this.timer = null;
    this.failures = 0;
    this.prefills = new Set();   // steps that read the prompt of the first
    this.onPlaces = () => {};
  }

  // Look again and again while `ids` (the names of requests, "" for one that is not known yet) gives any; `onPlaces` is
  // told the place of each, null for one that is not open. `many` colours them; one alone has the accent.
  follow(ids, { many = false, onPlaces = () => {} } = {}) {
    this.stop();
    this.ids = ids;
    this.many = many;
    this.onPlaces = onPlaces;
    this.failures = 0;
    this.prefills.clear();
    $("seat").classList.add("live");
    this.timer = setTimeout(() => this.look(), FIRST_MS);
  }

  // The steps that were seen last stay; the facts are those of the end: rows of a name and its value.
  stop(end = null) {
    clearTimeout(this.timer);
    this.timer = null;
    $("seat").classList.remove("live");
    if (end === null) return;
    $("strip").querySelector("svg")?.setAttribute("aria-label", "The last steps that were seen before the end.");
    tell(end);
  }

  async look() {
    const timer = this.timer;
    const ids = this.ids();
    const known = ids.filter(Boolean);
    try {
      if (known.length) {
        const query = known.map((id) => `id=${encodeURIComponent(id)}`).join("&");
        const answer = await fetch(`/chat/seats?${query}`, { cache: "no-store" });
        if (!answer.ok) throw new Error(String(answer.status));
        const seen = await answer.json();
        if (this.timer !== timer) return;
        this.failures = 0;
        this.show(seen, known.map((id) => ids.indexOf(id)));
      }
    } catch {
      this.failures += 1;
    }
    // A server that is gone is told of by the answer itself.
    if (this.timer === timer && this.failures < MAX_FAILURES) this.timer = setTimeout(() => this.look(), POLL_MS);
  }

  show(seen, places) {
    const seated = seen.mine.filter((place) => place?.seat != null);
    const others = Math.max(0, seen.running - seated.length);
    $("strip").replaceChildren(draw(seen, places, this.many, this.describe(seen, seated, others)));
    tell(this.many ? manyRows(seen, others) : this.oneRows(seen, others));
    this.onPlaces(seen.mine, places, seen.seats);
  }

  describe(seen, seated, others) {
    const own = seated.length ? `You sit on ${seated.length === 1 ? "seat" : "seats"} ${seated.map((place) => place.seat + 1).join(", ")}` : "You have no seat";
    return `${own} of ${seen.seats}, with ${plural(others, "other")}. The last ${seen.steps.length} steps.`;
  }

  oneRows(seen, others) {
    const [place] = seen.mine;
    for (const { step, rows } of seen.steps) {
      if (rows.some(([, whose, phase]) => whose === 0 && phase === "prefill")) this.prefills.add(step);
    }
    if (!place) return [["this answer", "has left its seat"], ["at the table", plural(seen.running, "request")]];
    const rows = [];
    if (place.seat === null) rows.push(["this answer", `waits: ${place.why ?? "not looked at yet"}`]);
    else rows.push(["this answer", `seat ${place.seat + 1} of ${seen.seats}, token ${place.output_tokens}`]);
    rows.push(["sharing with", plural(others, "request")]);
    if (seen.waiting) rows.push(["waiting for a seat", plural(seen.waiting, "request")]);
    rows.push(["waited for a seat", seconds(place.waited_seconds * 1000)]);
    if (this.prefills.size) rows.push(["prompt read in", plural(this.prefills.size, "step")]);
    if (place.cached_tokens) rows.push(["from the cache", `${place.cached_tokens} of ${plural(place.prompt_tokens, "token")}`]);
    return rows;
  }
}

function tell(rows) {
  $("seat-facts").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
}

function manyRows(seen, others) {
  const seated = seen.mine.filter((place) => place?.seat != null).length;
  return [
    ["of these", `${seated} at the table, ${seen.mine.filter((place) => place && place.seat === null).length} waiting`],
    ["sharing with", plural(others, "request")],
    ["seats", String(seen.seats)],
  ];
}

// One row a seat, one column a step, the newest at the right edge.
function draw(seen, places, many, label) {
  const own = seen.mine.length;
  const highest = Math.max(0, ...seen.steps.flatMap(({ rows }) => rows.filter(([, whose]) => whose < own).map(([seat]) => seat + 1)));
  const seats = Math.max(Math.min(seen.seats, MAX_SEATS), highest);
  const columns = 60;
  const picture = svg("svg", {
    class: "strip", viewBox: `0 0 ${columns * STEP_WIDTH} ${seats * ROW_HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label,
  });
  for (let seat = 0; seat < seats; seat += 1) {
    picture.append(svg("rect", { class: "free-seat", x: 0, y: seat * ROW_HEIGHT + 0.5, width: columns * STEP_WIDTH, height: ROW_HEIGHT - 1 }));
  }
  for (const run of runs(seen.steps, columns - seen.steps.length)) {
    if (run.seat >= seats) continue;
    const css = run.whose >= own ? "other" : many ? `own own${places[run.whose] % 12}` : "own mine";
    const quiet = run.phase === "prefill" ? " reads" : run.phase === "decode" ? "" : " rests";
    picture.append(svg("rect", {
      class: css + quiet, x: run.first * STEP_WIDTH + (run.arrives ? 1.5 : 0), y: run.seat * ROW_HEIGHT + 0.5,
      width: (run.last - run.first + 1) * STEP_WIDTH - (run.arrives ? 1.5 : 0), height: ROW_HEIGHT - 1,
    }));
  }
  return picture;
}

// Neighbouring steps of the same request, on the same seat and doing the same, are one.
function runs(steps, offset) {
  const found = [];
  const open = new Map();
  steps.forEach(({ rows }, index) => {
    for (const [seat, whose, phase] of rows) {
      const run = open.get(seat);
      const column = index + offset;
      if (run && run.last === column - 1 && run.whose === whose && run.phase === phase) run.last = column;
      else {
        const fresh = { seat, whose, phase, first: column, last: column, arrives: run?.whose !== whose };
        open.set(seat, fresh);
        found.push(fresh);
      }
    }
  });
  return found;
}
