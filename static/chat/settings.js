// The parameters of an answer, kept in this browser.
import { $ } from "./dom.js";

const STORE = "relevo.settings";
const FIELDS = { temperature: "temperature", topP: "top-p", maxTokens: "max-tokens", seed: "seed", system: "system" };
const WORDS = {
  maxTokens: (field) => `A whole number from 1 to ${Number(field.max).toLocaleString("en")}.`,
  seed: () => "A whole number, or nothing for another answer each time.",
};

const field = (name) => $(FIELDS[name]);

// Show what was kept, and keep what is changed.
export function startSettings() {
  try {
    const stored = JSON.parse(localStorage.getItem(STORE)) || {};
    for (const name of Object.keys(FIELDS)) if (typeof stored[name] === "string") field(name).value = stored[name];
  } catch { /* a browser that keeps nothing has the defaults */ }
  show();
  $("settings").addEventListener("input", changed);
  $("defaults").addEventListener("click", () => {
    for (const name of Object.keys(FIELDS)) field(name).value = field(name).defaultValue;
    changed();
  });
}

function changed() {
  show();
  const values = Object.fromEntries(Object.keys(FIELDS).map((name) => [name, field(name).value]));
  try { localStorage.setItem(STORE, JSON.stringify(values)); } catch { /* not kept */ }
}

function show() {
  $("temperature-value").textContent = Number(field("temperature").value).toFixed(1);
  $("top-p-value").textContent = Number(field("topP").value).toFixed(2);
  for (const [name, words] of Object.entries(WORDS)) {
    const input = field(name);
    const wrong = !input.validity.valid;
    input.toggleAttribute("aria-invalid", wrong);
    $(`${FIELDS[name]}-error`).textContent = wrong ? words(input) : "";
  }
}

// True where everything can be sent; else the first field that cannot is shown and has the focus.
export function checkSettings() {
  const wrong = Object.keys(WORDS).map(field).find((input) => !input.validity.valid);
  if (!wrong) return true;
  $("settings").open = true;
  wrong.focus();
  return false;
}

// The body of a request for an answer to `messages`.
export function requestBody(model, messages) {
  const system = field("system").value.trim();
  const body = {
    model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: Number(field("temperature").value),
    top_p: Number(field("topP").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (field("maxTokens").value) body.max_tokens = Number(field("maxTokens").value);
  if (field("seed").value) body.seed = Number(field("seed").value);
  return body;
}
