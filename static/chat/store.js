// Conversations, kept in this browser and nowhere else: one entry each, so that two tabs do not undo each other's work.
//
// A conversation is {id, title, time, exchanges, earlier}; an exchange {user, answer}; an answer {text, thinking, facts,
// failure, ok}, where only what is ok is told to the model again. `earlier` is what an edit or a second answer replaced.

const PREFIX = "relevo.chat.";
export const MAX_CHATS = 50;
// Browsers give a site about five million.
export const MAX_CHARACTERS = 3_000_000;
const MAX_TITLE = 60;

export function newChat() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", time: Date.now(), exchanges: [], earlier: null };
}

export function titleOf(chat) {
  if (chat.title) return chat.title;
  const line = (chat.exchanges[0]?.user ?? "").trim().split("\n")[0];
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line || "New chat";
}

// All of them, the newest first. What is not ours or is damaged is left out.
export function listChats() {
  return entries().map(({ text }) => parse(text)).filter(Boolean).sort((a, b) => b.time - a.time);
}

export function findChat(id) {
  return parse(read(PREFIX + id));
}

// False where the browser keeps nothing. The oldest make room.
export function saveChat(chat) {
  const text = JSON.stringify(chat);
  if (text.length > MAX_CHARACTERS) return false;
  const key = PREFIX + chat.id;
  const others = entries().filter((entry) => entry.key !== key)
    .map((entry) => ({ ...entry, time: parse(entry.text)?.time ?? 0 })).sort((a, b) => a.time - b.time);
  let size = others.reduce((sum, entry) => sum + entry.text.length, text.length);
  for (;;) {
    if (others.length < MAX_CHATS && size <= MAX_CHARACTERS) {
      try {
        localStorage.setItem(key, text);
        return true;
      } catch {
        if (!others.length) return false;
      }
    }
    const oldest = others.shift();
    size -= oldest.text.length;
    removeKey(oldest.key);
  }
}

export function removeChat(id) {
  removeKey(PREFIX + id);
}

// Calls `changed` when another tab has changed something.
export function watchChats(changed) {
  addEventListener("storage", (event) => { if (event.key === null || event.key.startsWith(PREFIX)) changed(); });
}

// A conversation as a text that people can read.
export function asMarkdown(chat) {
  const parts = [`# ${titleOf(chat)}`];
  for (const { user, answer } of chat.exchanges) {
    parts.push(`**You**\n\n${user}`);
    if (answer?.text) parts.push(`**Model**\n\n${answer.text}`);
  }
  return `${parts.join("\n\n")}\n`;
}

function entries() {
  const found = [];
  try {
    for (let index = 0; index < localStorage.length; index += 1) {
      const key = localStorage.key(index);
      if (key.startsWith(PREFIX)) found.push({ key, text: localStorage.getItem(key) ?? "" });
    }
  } catch { /* a browser that keeps nothing has none */ }
  return found;
}

function read(key) {
  try { return localStorage.getItem(key); } catch { return null; }
}

function removeKey(key) {
  try { localStorage.removeItem(key); } catch { /* nothing was kept */ }
}

function parse(text) {
  let chat;
  try { chat = JSON.parse(text); } catch { return null; }
  const isText = (value) => typeof value === "string";
  const isExchange = (one) => isText(one?.user) && (one.answer === null || (isText(one.answer?.text) && Array.isArray(one.answer.facts)));
  const areExchanges = (list) => Array.isArray(list) && list.every(isExchange);
  const isChat = chat && isText(chat.id) && isText(chat.title) && Number.isFinite(chat.time) && areExchanges(chat.exchanges) &&
    (!chat.earlier || (Number.isInteger(chat.earlier.at) && areExchanges(chat.earlier.exchanges)));
  return isChat ? chat : null;
}
