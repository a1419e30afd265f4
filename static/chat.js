// The chat: sends the conversation, shows the answer while it is written. Whatever a model or a user wrote goes into the
// page as text only.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const page = $("content");
  const log = $("log");
  const message = $("message");
  const settings = { temperature: $("temperature"), maxTokens: $("max-tokens"), system: $("system") };
  const STORE = "relevo.settings";
  let turns = [];         // [{role, content}] that the model has seen
  let running = null;     // AbortController of the answer being written

  // ---- what is shown ------------------------------------------------------------------------------------------

  function element(name, css, text) {
    const made = document.createElement(name);
    if (css) made.className = css;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // Fences of three or more, closed by the same or by the end of what has come so far: a block of code of its own.
  const FENCED = /^ {0,3}(`{3,}|~{3,})([^`\n]*)(?:\n|(?![^]))([^]*?)(?:^ {0,3}\1[`~]*[ \t]*(?:\n\n?|(?![^]))|(?![^]))/gm;

  function show(body, text) {
    body.replaceChildren();
    let end = 0;
    for (const { 0: whole, 2: language, 3: code, index } of text.matchAll(FENCED)) {
      body.append(text.slice(end, index).replace(/\n\n?$/, ""));
      const block = element("pre", "");
      block.tabIndex = 0;   // wide code is scrolled by keyboard too
      block.dataset.language = language.trim();
      block.append(element("code", "", code.replace(/\n$/, "")));
      body.append(block);
      end = index + whole.length;
    }
    body.append(text.slice(end));
  }

  function addTurn(role, text) {
    $("welcome").hidden = true;
    const item = element("li", role);
    item.append(element("span", "unseen", role === "user" ? "You:" : "Model:"));
    const body = element("div", "text");
    if (text) show(body, text);
    item.append(body);
    log.append(item);
    return { item, body };
  }

  // The line at the top asks the server anew.
  function tellState() {
    document.body.dispatchEvent(new Event("chat-changed"));
  }

  // Follows the answer down, unless the reader has scrolled up to read something again.
  function nearBottom() {
    return window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 120;
  }

  function toBottom() {
    window.scrollTo({ top: document.documentElement.scrollHeight });
  }

  function facts(view, list) {
    view.facts ??= view.item.appendChild(element("p", "facts"));
    view.facts.replaceChildren(...list.filter(Boolean).map((text) => element("span", "", text)));
  }

  // What the model thinks before it answers: open while it does, and folded away when it is done.
  function think(view, text) {
    if (!view.thought) {
      view.thinking = element("details", "thinking");
      view.thinking.open = true;
      view.thought = element("div", "thought");
      view.thinking.append(element("summary", "", "Thinking"), view.thought);
      view.item.insertBefore(view.thinking, view.body);
    }
    view.thought.textContent = text;
  }

  function seconds(ms) {
    return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
  }

  function fail(view, text, again) {
    const note = element("p", "failure", text);
    note.setAttribute("role", "alert");
    if (again) {
      const button = element("button", "quiet small", "Try again");
      button.type = "button";
      button.addEventListener("click", () => { if (!running) { view.item.remove(); again(); } });
      note.append(" ", button);
    }
    view.item.append(note);
  }

  // ---- one answer ---------------------------------------------------------------------------------------------

  async function* events(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    let data = [];
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  }

  function requestBody() {
    const system = settings.system.value.trim();
    const body = {
      model: page.dataset.model,
      messages: system ? [{ role: "system", content: system }, ...turns] : turns,
      temperature: Number(settings.temperature.value),
      stream: true,
      stream_options: { include_usage: true },
    };
    if (settings.maxTokens.value) body.max_tokens = Number(settings.maxTokens.value);
    return JSON.stringify(body);
  }

  // Why a request was refused, and whether asking again can help.
  function refusal(status, error, retryAfter) {
    switch (error.code) {
      case "queue_full":
        return [`The server is full: ${error.depth ?? "many"} wait already and it takes no more for now.` +
          (retryAfter ? ` Room is expected in about ${retryAfter} s.` : ""), true];
      case "draining":
        return ["The server is shutting down and takes nothing new.", true];
      case "context_length_exceeded":
        return ["This conversation has become longer than the model can read" +
          (error.prompt_tokens ? ` (${error.prompt_tokens} tokens, ${error.capacity} fit)` : "") +
          ". Start a new chat, or shorten your message.", false];
      case "no_chat_template":
        return [error.message, false];
    }
    if (status === 401) return ["A key is needed. Reload this page to sign in.", false];
    return [error.message || `The server answered with status ${status}.`, status >= 500 || status === 429];
  }

  async function readAnswer(response, view, begun) {
    const got = { text: "", thinking: "", pieces: 0, first: null, last: null, usage: null, finish: null, done: false, error: null };
    let painted = false;
    const paint = () => {
      painted = false;
      const follow = nearBottom();
      if (got.thinking) think(view, got.thinking);
      if (got.text) {
        if (view.thinking && !view.body.textContent) view.thinking.open = false;
        show(view.body, got.text);
      }
      if (follow) toBottom();
    };
    try {
      for await (const data of events(response.body)) {
        if (data === "[DONE]") { got.done = true; break; }
        const chunk = JSON.parse(data);
        if (chunk.error) { got.error = chunk.error; break; }
        if (chunk.usage) got.usage = chunk.usage;
        const choice = chunk.choices[0];
        if (choice?.finish_reason) got.finish = choice.finish_reason;
        const { content = "", reasoning_content: thinking = "" } = choice?.delta ?? {};
        if (!content && !thinking) continue;
        got.last = performance.now();
        if (got.first === null) {
          got.first = got.last;
          tellState();
          facts(view, [`${seconds(got.first - begun)} to first token`]);
        }
        got.text += content ?? "";
        got.thinking += thinking ?? "";
        got.pieces += 1;
        if (!painted) { painted = true; requestAnimationFrame(paint); }
      }
    } catch (error) {
      if (error.name !== "AbortError") got.error = { message: "the connection was lost" };
    }
    paint();
    return got;
  }

  function summary(got, begun, stopped) {
    const list = [];
    if (got.first !== null) list.push(`${seconds(got.first - begun)} to first token`);
    // A stopped answer has no usage; a piece is a token or a few, so what was seen is the least there were.
    const tokens = got.usage?.completion_tokens ?? got.pieces;
    const about = got.usage ? "" : "about ";
    if (tokens > 1 && got.last > got.first) {
      list.push(`${about}${((tokens - 1) / ((got.last - got.first) / 1000)).toFixed(1)} tokens/s`);
    }
    if (tokens || got.usage) list.push(`${about}${tokens} token${tokens === 1 ? "" : "s"}`);
    if (got.usage) {
      const cached = got.usage.prompt_tokens_details?.cached_tokens;
      list.push(`${got.usage.prompt_tokens} prompt tokens${cached ? `, ${cached} from the cache` : ""}`);
    }
    if (stopped) list.push(`stopped after ${seconds(performance.now() - begun)}`);
    if (got.finish === "length") list.push("cut at the longest answer");
    return list;
  }

  async function ask(text) {
    // A new chat begins a new list; an answer that is still ending belongs to the old one.
    const talk = turns;
    talk.push({ role: "user", content: text });
    const view = addTurn("assistant", "");
    const begun = performance.now();
    const control = running = new AbortController();
    view.item.classList.add("writing");
    view.item.setAttribute("aria-busy", "true");
    facts(view, ["waiting for the first token"]);
    setRunning(true);
    toBottom();
    const again = () => ask(text);
    let answered = false;
    try {
      const response = await fetch("/v1/chat/completions", {
        method: "POST", headers: { "Content-Type": "application/json" }, body: requestBody(), signal: control.signal,
      });
      if (!response.ok) {
        const { error = {} } = await response.json().catch(() => ({}));
        facts(view, []);
        const [words, mayRetry] = refusal(response.status, error, response.headers.get("Retry-After"));
        fail(view, words, mayRetry && again);
        return;
      }
      const got = await readAnswer(response, view, begun);
      const stopped = control.signal.aborted;
      facts(view, summary(got, begun, stopped));
      if (got.error) fail(view, `The answer broke off: ${got.error.message}`, again);
      else if (!got.done && !stopped) fail(view, "The answer was interrupted; what is above is not the whole of it.", again);
      else if (got.text || got.done) {
        talk.push({ role: "assistant", content: got.text });
        answered = true;
        if (!got.text) view.body.append(element("span", "note", "The model had nothing to say."));
      }
    } catch (error) {
      if (control.signal.aborted) facts(view, ["stopped before the first token"]);
      else { facts(view, []); fail(view, "The server cannot be reached.", again); }
    } finally {
      // What was not answered is shown but not told to the model: two questions in a row would confuse it.
      if (!answered) talk.pop();
      view.item.classList.remove("writing");
      view.item.removeAttribute("aria-busy");
      if (running === control) { running = null; setRunning(false); }
      tellState();
      if (nearBottom()) toBottom();
    }
  }

  // ---- controls -----------------------------------------------------------------------------------------------

  function setRunning(on) {
    const hadFocus = document.activeElement === $("send") || document.activeElement === $("stop");
    $("send").hidden = on;
    $("stop").hidden = !on;
    if (hadFocus) (on ? $("stop") : message).focus();
  }

  function grow() {
    message.rows = Math.min(8, Math.max(1, message.value.split("\n").length, Math.ceil(message.value.length / 70)));
  }

  function send() {
    const text = message.value.trim();
    if (!text || running) return;
    message.value = "";
    grow();
    addTurn("user", text);
    ask(text);
  }

  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  message.addEventListener("input", grow);
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
  $("stop").addEventListener("click", () => running?.abort());
  $("new").addEventListener("click", () => {
    const control = running;
    running = null;
    control?.abort();
    setRunning(false);
    turns = [];
    log.replaceChildren();
    $("welcome").hidden = false;
    message.focus();
  });

  // ---- settings -----------------------------------------------------------------------------------------------

  function showTemperature() {
    $("temperature-value").textContent = Number(settings.temperature.value).toFixed(1);
  }

  try {
    const stored = JSON.parse(localStorage.getItem(STORE)) || {};
    for (const [name, field] of Object.entries(settings)) if (typeof stored[name] === "string") field.value = stored[name];
  } catch { /* a browser that keeps nothing has the defaults */ }
  showTemperature();
  $("settings").addEventListener("input", () => {
    showTemperature();
    const values = Object.fromEntries(Object.entries(settings).map(([name, field]) => [name, field.value]));
    try { localStorage.setItem(STORE, JSON.stringify(values)); } catch { /* not kept */ }
  });

  const wide = matchMedia("(min-width: 60rem)");
  const place = () => { $("settings").open = wide.matches; };
  wide.addEventListener("change", place);
  place();
  $("composer").hidden = $("settings").hidden = false;
  message.focus({ preventScroll: true });
})();
