// A streamed answer as it comes in: its events, what they add up to, and what went wrong in plain words.
import { plural, seconds } from "./dom.js";

// The events of a stream of server-sent events: their type ("" without one) and their data.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let type = "";
  let data = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r\n|\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (data.length) yield { type, data: data.join("\n") };
        type = "";
        data = [];
      } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      else if (line.startsWith("event:")) type = line.slice(6).trim();
    }
  }
}

// What has come of one answer; `isFirst`: nothing was said before the message that it answers.
export class Progress {
  constructor(isFirst) {
    this.isFirst = isFirst;
    this.begun = performance.now();
    this.id = null;
    this.text = "";
    this.thinking = "";
    this.pieces = 0;
    this.first = null;     // when the first and the last piece came
    this.last = null;
    this.usage = null;
    this.timing = null;
    this.finish = null;
    this.error = null;
    this.isDone = false;
  }

  // Take the data of an event; true where there is more to read than before.
  take(data) {
    if (data === "[DONE]") { this.isDone = true; return false; }
    const chunk = JSON.parse(data);
    if (chunk.error) { this.error = chunk; return false; }
    this.id ??= chunk.id ?? null;
    if (chunk.usage) { this.usage = chunk.usage; this.timing = chunk.relevo ?? null; }
    const choice = chunk.choices[0];
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    const { content, reasoning_content: thinking } = choice?.delta ?? {};
    if (!content && !thinking) return false;
    this.last = performance.now();
    this.first ??= this.last;
    this.text += content ?? "";
    this.thinking += thinking ?? "";
    this.pieces += 1;
    return true;
  }

  get tokens() { return this.usage?.completion_tokens ?? this.pieces; }

  // Between the first token and the last; null where that says nothing.
  get rate() {
    return this.tokens > 1 && this.last > this.first ? (this.tokens - 1) / ((this.last - this.first) / 1000) : null;
  }

  // A stopped answer has no usage; a piece is a token or a few, so what was seen is the least there were.
  get about() { return this.usage ? "" : "about "; }

  // How an answer that has ended left the table.
  get leaving() {
    return this.first === null ? "ended before its first token" : `left its seat after ${this.about}${plural(this.tokens, "token")}`;
  }

  // What is told below an answer that has ended; `stopped` is by the reader.
  facts(stopped) {
    const list = [];
    if (this.first !== null) list.push(`${seconds(this.first - this.begun)} to first token`);
    if (this.rate !== null) list.push(`${this.about}${this.rate.toFixed(1)} tokens/s`);
    if (this.tokens || this.usage) list.push(this.about + plural(this.tokens, "token"));
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      list.push(plural(this.usage.prompt_tokens, "prompt token") + (cached ? `, ${cached} from the cache` : ""));
    }
    if (stopped) list.push(this.first === null ? "stopped before the first token" : `stopped after ${seconds(performance.now() - this.begun)}`);
    if (this.finish === "length") list.push("cut at its limit");
    else if (this.finish && this.finish !== "stop") list.push(`ended by ${this.finish}`);
    return list;
  }

  // What went wrong, as {words, again, signIn}; null where nothing did.
  failure(stopped) {
    if (this.error) {
      const { error, status, retry_after: wait } = this.error;
      return this.first === null && status ? refusal(status, error, { wait, isFirst: this.isFirst })
        : { words: `The answer broke off: ${error.message}`, again: true };
    }
    if (this.isDone || stopped) return null;
    return { words: "The answer was interrupted; what is above is not the whole of it.", again: true };
  }
}

// Why a request was refused and what to do about it. `again`: whether asking the same once more can help; `isFirst` as
// of `Progress`.
export function refusal(status, error, { wait, isFirst }) {
  const what = isFirst ? "This message" : "This conversation";
  const shorter = isFirst ? "Edit it and make it shorter." : "Start a new chat, or edit a message and make it shorter.";
  const soon = wait ? ` in about ${wait} s` : " in a moment";
  switch (error.code) {
    case "queue_full":
      return { words: `The server is full and takes no more for now. Your message is kept; try again${soon}.`, again: true };
    case "rate_limit_exceeded":
      return { words: `Your key has had what it may have for now. Your message is kept; try again${soon}.`, again: true };
    case "draining":
      return { words: `${error.message} Your message is kept; try again later.`, again: true };
    case "context_length_exceeded":
      return {
        words: `${what} ${isFirst ? "is" : "has become"} longer than the model can read` +
          (error.prompt_tokens ? ` (${error.prompt_tokens} tokens, ${error.capacity} fit)` : "") + `. ${shorter}`, again: false,
      };
  }
  switch (status) {
    case 401: return { words: "A key is needed. Your message is kept; sign in and try again.", again: true, signIn: true };
    case 408: return { words: "The answer did not come in time. Try again, or ask for a shorter one.", again: true };
    case 413: return { words: `${what} is larger than the server takes. ${shorter}`, again: false };
    case 429: return { words: `${error.message || "Too many requests."} Your message is kept.`, again: true };
  }
  return { words: error.message || `The server answered with status ${status}. Your message is kept.`, again: status >= 500 };
}

// Why an answer that is no stream was given.
export async function refusalOf(response, isFirst) {
  const { error = {} } = await response.json().catch(() => ({}));
  return refusal(response.status, error, { wait: response.headers.get("Retry-After"), isFirst });
}

export const UNREACHABLE = { words: "The server cannot be reached. Your message is kept; try again when it is back.", again: true };
