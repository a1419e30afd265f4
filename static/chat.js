// The chat: a conversation, its answers while they are written, and what can be done with them.
import { $, button, copyButton, element } from "./chat/dom.js";
import { ChatList } from "./chat/list.js";
import { Many } from "./chat/many.js";
import { Markdown, showAsWritten } from "./chat/markdown.js";
import { SeatPanel } from "./chat/seat.js";
import { checkSettings, requestBody, startSettings } from "./chat/settings.js";
import { findChat, newChat, saveChat, watchChats } from "./chat/store.js";
import { events, Progress, refusalOf, UNREACHABLE } from "./chat/stream.js";

const SAVE_MS = 1000;
const LEAVING_MS = 300;
const page = $("content");
const log = $("log");
const message = $("message");
const panel = new SeatPanel();
const list = new ChatList({
  open: show,
  left: (id) => { if (id === chat.id) forget(); },
  renamed: (id, title) => { if (id === chat.id) chat.title = title; },
});
let chat = newChat();
let running = null;     // {control, exchange, progress}: the answer that is being written, or {control} of several

// ---- what is shown ----------------------------------------------------------------------------------------------

// Show a conversation from its beginning.
function show(other) {
  leave();
  setView("chat");
  chat = other;
  log.replaceChildren();
  for (const exchange of chat.exchanges) addExchange(exchange);
  $("welcome").hidden = chat.exchanges.length > 0;
  list.draw(chat.id);
  closePanels();
  toBottom();
  message.focus({ preventScroll: true });
}

function startNew() {
  show(newChat());
}

// It was deleted: an answer that is still being written to it is not kept.
function forget() {
  if (running?.chat) running.chat.isGone = true;
  startNew();
}

function setView(view) {
  page.dataset.view = view;
  $("many").hidden = view !== "many";
  $("conversation").hidden = $("composer").hidden = view === "many";
  $("open-many").toggleAttribute("aria-current", view === "many");
}

function addExchange(exchange) {
  $("welcome").hidden = true;
  const asked = element("li", "user");
  const body = element("div", "text");
  showAsWritten(body, exchange.user);
  const under = element("p", "under");
  under.append(button("Edit", "plain act", () => edit(asked, exchange), "Edit this message and ask again"));
  asked.append(element("span", "unseen", "You:"), body, under);
  log.append(asked);
  const item = element("li", "assistant");
  const text = element("div", "text");
  item.append(element("span", "unseen", "Model:"), text);
  log.append(item);
  const view = { item, body: text, markdown: new Markdown(text) };
  if (exchange.answer) finishView(view, exchange);
  return view;
}

// An answer that has ended: its text, what is told about it, and what can be done with it.
function finishView(view, exchange) {
  const { answer } = exchange;
  paint(view, answer.text, answer.thinking, false);
  if (!answer.text && answer.ok) view.body.append(element("p", "note", "The model had nothing to say."));
  facts(view, answer.facts);
  view.line.append(...actions(exchange));
  if (answer.failure) fail(view, exchange);
}

function actions(exchange) {
  const made = [];
  if (exchange.answer.text) made.push(copyButton("plain act", () => exchange.answer.text, "Copy this answer"));
  made.push(button("Again", "plain act", () => again(exchange), "Answer again from here"));
  const { earlier } = chat;
  if (earlier && chat.exchanges[earlier.at] === exchange) {
    made.push(button("Put back", "plain act", putBack, "Put back what stood here before"));
  }
  return made;
}

function paint(view, text, thinking, isWriting) {
  if (thinking) think(view, thinking);
  if (!text) return;
  if (view.thinking && !view.body.hasChildNodes()) view.thinking.open = false;
  view.markdown.show(text, isWriting);
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

function facts(view, texts) {
  view.line ??= view.item.appendChild(element("p", "facts"));
  view.line.replaceChildren(...texts.filter(Boolean).map((text) => element("span", "", text)));
}

function fail(view, exchange) {
  const { words, again: may, signIn } = exchange.answer.failure;
  const note = element("p", "failure", words);
  note.setAttribute("role", "alert");
  if (signIn) {
    const anchor = element("a", "", "Sign in");
    anchor.href = "/login?next=/";
    note.append(" ", anchor);
  }
  if (may) note.append(" ", button("Try again", "quiet small act", () => again(exchange)));
  view.item.append(note);
}

// Follows the answer down, unless the reader has scrolled up to read something again.
function nearBottom() {
  return window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 120;
}

function toBottom() {
  window.scrollTo({ top: document.documentElement.scrollHeight });
}

// The line at the top asks the server anew.
function tellState() {
  document.body.dispatchEvent(new Event("chat-changed"));
}

function keep(which) {
  which.title = findChat(which.id)?.title ?? which.title;   // another tab may have named it
  $("not-kept").hidden = saveChat(which);
}

// ---- one answer -------------------------------------------------------------------------------------------------

// What the model is told: what was answered, and the question. What was not answered is shown but not told: two
// questions in a row would confuse it.
function messagesFor(exchange) {
  const before = chat.exchanges.slice(0, chat.exchanges.indexOf(exchange)).filter(({ answer }) => answer?.ok && answer.text);
  const turns = before.flatMap(({ user, answer }) => [{ role: "user", content: user }, { role: "assistant", content: answer.text }]);
  return [...turns, { role: "user", content: exchange.user }];
}

async function ask(exchange, view) {
  const messages = messagesFor(exchange);
  const own = running = { control: new AbortController(), chat, exchange, progress: new Progress(messages.length === 1), seat: "" };
  const { control, progress } = own;
  const body = requestBody(page.dataset.model, messages);
  view.item.classList.add("writing");
  $("live").setAttribute("aria-busy", "true");
  facts(view, ["waiting for the first token"]);
  setRunning(true);
  toBottom();
  store(own, null);
  const saving = setInterval(() => store(own, null), SAVE_MS);
  panel.follow(() => [progress.id ?? ""], {
    onPlaces: ([place], _, seats) => { own.seat = place?.seat != null ? `seat ${place.seat + 1} of ${seats}` : own.seat; },
  });
  let failure = null;
  try {
    failure = await read(own, view, body);
  } catch {
    if (!control.signal.aborted) {
      failure = progress.first === null ? UNREACHABLE
        : { words: "The connection was lost; what is above is not the whole of it.", again: true };
      // A page that is being left loses its connections first, and is gone by then.
      await new Promise((resolve) => { setTimeout(resolve, LEAVING_MS); });
    }
  }
  clearInterval(saving);
  const stopped = control.signal.aborted;
  failure ??= progress.failure(stopped);
  store(own, failure, progress.facts(stopped));
  view.item.classList.remove("writing");
  finishView(view, exchange);
  if (running === own) {
    running = null;
    setRunning(false);
    panel.stop([["this answer", progress.leaving]]);
    $("live").removeAttribute("aria-busy");
    if (nearBottom()) toBottom();
  }
  tellState();
}

// Reads an answer to its end; gives why it was refused, null where it was not.
async function read(own, view, body) {
  const { control, progress } = own;
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: control.signal,
  });
  if (!response.ok) return refusalOf(response, progress.isFirst);
  let painted = false;
  const draw = () => {
    painted = false;
    if (control.signal.aborted || progress.isDone) return;
    const follow = nearBottom();
    paint(view, progress.text, progress.thinking, true);
    if (follow) toBottom();
  };
  for await (const { data } of events(response.body)) {
    const first = progress.first === null;
    if (progress.take(data)) {
      if (first) tellState();
      const { rate } = progress;
      facts(view, [progress.facts(false)[0], rate === null ? "" : `${rate.toFixed(1)} tokens/s`, own.seat]);
      if (!painted) { painted = true; requestAnimationFrame(draw); }
    }
    if (progress.isDone || progress.error) break;
  }
  return null;
}

// Write down how far the answer has come. One that is found unfinished later was left with the page.
function store({ chat: whose, exchange, progress }, failure, told) {
  exchange.answer = {
    text: progress.text,
    thinking: progress.thinking,
    facts: told ?? ["the page was left before it ended"],
    failure,
    ok: failure === null && (progress.text !== "" || progress.isDone),
  };
  if (!whose.isGone) keep(whose);
}

// ---- what can be done -------------------------------------------------------------------------------------------

function send() {
  const text = message.value.trim();
  if (!text || running || !checkSettings()) return;
  message.value = "";
  grow();
  chat.time = Date.now();
  chat.earlier = null;
  const exchange = { user: text, answer: null };
  chat.exchanges.push(exchange);
  const view = addExchange(exchange);
  ask(exchange, view);
  list.draw(chat.id);
}

// Ask again from an exchange on, with what it says or with another text; what stood there can be put back.
function again(exchange, text = exchange.user) {
  if (running || !checkSettings()) return;
  const at = chat.exchanges.indexOf(exchange);
  const replaced = chat.exchanges.splice(at);
  // Of an attempt that has failed nothing is worth keeping, unless there was something before it.
  const isWorth = replaced.length > 1 || replaced[0].answer?.text || text !== exchange.user;
  if (isWorth) chat.earlier = { at, exchanges: replaced };
  while (log.children.length > 2 * at) log.lastChild.remove();
  const fresh = { user: text, answer: null };
  chat.exchanges.push(fresh);
  chat.time = Date.now();
  ask(fresh, addExchange(fresh));
}

function putBack() {
  if (running) return;
  const { at, exchanges } = chat.earlier;
  chat.exchanges.splice(at, Infinity, ...exchanges);
  chat.earlier = null;
  keep(chat);
  show(chat);
}

function edit(item, exchange) {
  if (running) return;
  const form = element("form", "edit");
  const field = element("textarea");
  field.value = exchange.user;
  field.rows = Math.min(12, Math.max(2, exchange.user.split("\n").length));
  field.setAttribute("aria-label", "Your message");
  const shown = [...item.children];
  const close = () => {
    item.replaceChildren(...shown);
    item.querySelector(".act").focus();
  };
  const submit = () => {
    const text = field.value.trim();
    if (!text || running) return;
    item.replaceChildren(...shown);
    again(exchange, text);
  };
  const row = element("div", "buttons");
  const sendIt = element("button", "main small", "Ask again");
  row.append(element("span", "note", "What comes after it is replaced."), button("Cancel", "quiet small", close), sendIt);
  form.append(field, row);
  form.addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); close(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  });
  item.replaceChildren(form);
  field.focus();
  field.setSelectionRange(field.value.length, field.value.length);
}

function stop() {
  running?.control.abort();
}

// Whatever is being written belongs to what is shown no more.
function leave() {
  stop();
  running = null;
  panel.stop([]);
  $("live").removeAttribute("aria-busy");
  setRunning(false);
}

function setRunning(on) {
  const hadFocus = document.activeElement === $("send") || document.activeElement === $("stop");
  $("send").hidden = on;
  $("stop").hidden = !on;
  page.classList.toggle("busy", on);
  if (hadFocus) (on ? $("stop") : message).focus();
}

function grow() {
  message.rows = Math.min(8, Math.max(1, message.value.split("\n").length, Math.ceil(message.value.length / 70)));
}

// ---- the page ---------------------------------------------------------------------------------------------------

const wide = matchMedia("(min-width: 68rem)");
const panels = [$("conversations"), $("seat"), $("settings")];

// On a narrow window they are menus, of which one is open at most.
function closePanels() {
  if (!wide.matches) for (const one of panels) one.open = false;
}

function placePanels() {
  for (const one of panels) one.open = wide.matches;
}

for (const one of panels) {
  one.querySelector("summary").addEventListener("click", (event) => {
    if (wide.matches) event.preventDefault();   // there they stay open
    else for (const other of panels) if (other !== one) other.open = false;
  });
}
wide.addEventListener("change", placePanels);
$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
message.addEventListener("input", grow);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (!wide.matches && panels.some((one) => one.open)) closePanels();
  else stop();
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", startNew);
const many = new Many({
  model: page.dataset.model,
  panel,
  running: (control) => {
    if (control) running = { control };
    else if (!running?.exchange) running = null;
    setRunning(running !== null);
    tellState();
  },
});
$("open-many").addEventListener("click", () => {
  leave();
  setView("many");
  list.draw(null);
  closePanels();
  $("ask-many").focus();
});
addEventListener("pagehide", () => { if (running?.exchange) store(running, null); });
watchChats(() => list.draw());

placePanels();
startSettings();
setView("chat");
list.draw(chat.id);
for (const one of panels) one.hidden = false;
message.focus({ preventScroll: true });
