// Ten at once: different questions side by side over one stream, each with the colour of its seat.
import { $, button, element, plural, seconds } from "./dom.js";
import { Markdown } from "./markdown.js";
import { checkSettings, requestBody } from "./settings.js";
import { events, Progress, refusalOf, UNREACHABLE } from "./stream.js";

const MAX_QUESTIONS = 16;
const STORE = "relevo.questions";

export class Many {
  // `panel`: shows the seats; `running(control)`: told the AbortController while answers are written, null behind them.
  constructor({ model, panel, running }) {
    this.model = model;
    this.panel = panel;
    this.running = running;
    this.control = null;
    this.panes = [];
    const field = $("questions");
    try { field.value = localStorage.getItem(STORE) || field.value; } catch { /* nothing is kept */ }
    field.addEventListener("input", () => {
      try { localStorage.setItem(STORE, field.value); } catch { /* nothing is kept */ }
      this.count();
    });
    $("ask-many").addEventListener("click", () => this.ask());
    $("stop-many").addEventListener("click", () => this.control?.abort());
    this.count();
  }

  questions() {
    return $("questions").value.split("\n").map((line) => line.trim()).filter(Boolean);
  }

  count() {
    const number = this.questions().length;
    $("ask-many").disabled = number === 0 || number > MAX_QUESTIONS;
    $("ask-many").textContent = this.panes.length ? "Ask again" : `Ask ${number === 10 ? "all ten" : plural(number, "question")}`;
    $("questions-error").textContent = number > MAX_QUESTIONS ? `At most ${MAX_QUESTIONS}; there are ${number}.` : "";
  }

  async ask() {
    if (this.control || !checkSettings()) return;
    const questions = this.questions();
    if (!questions.length || questions.length > MAX_QUESTIONS) return;
    this.panes = questions.map((question, index) => new Pane(question, index));
    $("panes").replaceChildren(...this.panes.map((pane) => pane.node));
    $("panes").setAttribute("aria-busy", "true");
    const control = this.control = new AbortController();
    this.running(control);
    this.count();
    this.swap(true);
    this.panel.follow(() => this.panes.map((pane) => pane.progress.id ?? ""), {
      many: true,
      onPlaces: (mine, places, seats) => mine.forEach((place, index) => this.panes[places[index]]?.sit(place, seats)),
    });
    const total = setInterval(() => this.tell(), 250);
    let failure = null;
    try {
      failure = await this.read(questions, control);
    } catch {
      failure = control.signal.aborted ? null : UNREACHABLE;
    }
    clearInterval(total);
    for (const pane of this.panes) pane.end(control.signal.aborted, failure);
    this.tell();
    $("panes").removeAttribute("aria-busy");
    this.panel.stop([["of these", "all have left their seats"]]);
    this.control = null;
    this.running(null);
    this.swap(false);
  }

  // One button in the place of the other.
  swap(on) {
    const hadFocus = document.activeElement === $("ask-many") || document.activeElement === $("stop-many");
    $("ask-many").hidden = on;
    $("stop-many").hidden = !on;
    if (hadFocus) $(on ? "stop-many" : "ask-many").focus();
  }

  // Reads to the end of the stream; gives what was wrong with all of it, null where nothing was.
  async read(questions, control) {
    const requests = questions.map((content) => requestBody(this.model, [{ role: "user", content }]));
    const response = await fetch("/chat/many", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ requests }), signal: control.signal,
    });
    if (!response.ok) return refusalOf(response, true);
    for await (const { type, data } of events(response.body)) {
      if (type !== "") this.panes[Number(type)]?.take(data);
      else if (data === "[DONE]") return null;
    }
    return { words: "The answers were interrupted.", again: true };
  }

  // All of them together.
  tell() {
    const begun = this.panes.filter((pane) => pane.progress.first !== null);
    const tokens = begun.reduce((sum, pane) => sum + pane.progress.tokens, 0);
    const from = Math.min(...begun.map((pane) => pane.progress.first));
    const until = Math.max(...begun.map((pane) => pane.progress.last));
    const done = this.panes.filter((pane) => pane.isOver).length;
    const words = [`${done} of ${plural(this.panes.length, "answer")} done`, plural(tokens, "token")];
    if (until > from) words.push(`${(tokens / ((until - from) / 1000)).toFixed(1)} tokens/s together`);
    $("many-facts").replaceChildren(...words.map((text) => element("span", "", text)));
  }
}

class Pane {
  constructor(question, index) {
    this.progress = new Progress(true);
    this.isOver = false;
    this.isPainting = false;
    this.seat = "";
    this.node = element("li", `pane writing own${index % 12}`);
    const body = element("div", "text");
    this.markdown = new Markdown(body);
    this.line = element("p", "facts");
    this.node.append(element("h3", "", question), body, this.line);
    this.tell(["waiting for a seat"]);
  }

  take(data) {
    if (this.progress.take(data) && !this.isPainting) {
      this.isPainting = true;
      requestAnimationFrame(() => this.paint());
    }
    if (this.progress.isDone || this.progress.error) this.end(false, null);
  }

  // Where it sits; null when it has left.
  sit(place, seats) {
    if (this.isOver || !place) return;
    this.seat = place.seat === null ? "" : `seat ${place.seat + 1} of ${seats}`;
    if (place.seat === null && this.progress.first === null) this.tell([`waits: ${place.why ?? "not looked at yet"}`]);
  }

  paint() {
    this.isPainting = false;
    const { body } = this.markdown;
    const follow = body.scrollTop + body.clientHeight > body.scrollHeight - 40;
    this.markdown.show(this.progress.text || this.progress.thinking, !this.isOver);
    if (follow) body.scrollTop = body.scrollHeight;
    if (this.isOver) return;
    const { rate, first, begun, tokens } = this.progress;
    this.tell([this.seat, rate === null ? `${seconds(first - begun)} to first token` : `${rate.toFixed(1)} tokens/s`, plural(tokens, "token")]);
  }

  // `failure`: of the stream that carried it.
  end(stopped, failure) {
    if (this.isOver) return;
    this.isOver = true;
    this.node.classList.remove("writing");
    this.paint();
    this.tell([this.seat, ...this.progress.facts(stopped)]);
    const wrong = this.progress.failure(stopped || failure !== null) ?? failure;
    if (wrong) this.node.append(element("p", "failure", wrong.words.replace(/ Your message is kept[^.]*\./, "")));
  }

  tell(list) {
    this.line.replaceChildren(...list.filter(Boolean).map((text) => element("span", "", text)));
  }
}
