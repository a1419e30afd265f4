// Markdown as elements. The library reads the text into tokens; only the elements named here are made of them, so there
// is nothing to be cleaned: raw HTML stays text, a picture is a link to it, and a link leads to the web or is none.
import { copyButton, element } from "./dom.js";

const reader = globalThis.markdownit({ html: false, linkify: true, breaks: true });
// `example.py` is a file, not an address in Paraguay.
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });

// Headings of an answer stand below those of the page.
const TAGS = {
  p: "p", blockquote: "blockquote", ul: "ul", ol: "ol", li: "li", strong: "strong", em: "em", s: "s",
  table: "table", thead: "thead", tbody: "tbody", tr: "tr", th: "th", td: "td",
  h1: "h3", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6",
};
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
// What stands at the end of a text that is being written and may yet become something else: `-` under a line is a heading
// or the next entry of a list, `**` opens or closes.
const UNDECIDED = /(?:^|\n)[ \t]*(?:[-=+*_#>|]+|\d+[.)]?)[ \t]*$|[*_~`]+$/;

// Shows a text that grows. What has not changed since the last time stays as it is: nothing flickers, and what is
// selected or scrolled stays so.
export class Markdown {
  constructor(body) {
    this.body = body;
    this.shown = [];   // {key, start, node, grow} of each block
  }

  show(text, isWriting) {
    const blocks = split(isWriting ? text.replace(UNDECIDED, "") : text);
    blocks.forEach((block, index) => {
      const old = this.shown[index];
      if (old?.key === block.key) return;
      if (old?.grow && block.isCode && old.start === block.start) {
        old.grow(block.tokens[0]);
        old.key = block.key;
        return;
      }
      const made = build(block);
      if (old?.node.localName === "p" && made.node.localName === "p") {
        old.node.replaceChildren(...made.node.childNodes);
        made.node = old.node;
      } else if (old) old.node.replaceWith(made.node);
      else this.body.append(made.node);
      this.shown[index] = { ...made, key: block.key, start: block.start };
    });
    for (const { node } of this.shown.splice(blocks.length)) node.remove();
  }
}

// The tokens of each block of the top level, and what tells whether it has changed.
function split(text) {
  const about = {};
  const lines = text.split(/\r\n|\r|\n/);
  const blocks = [];
  let open = null;
  for (const token of reader.parse(text, about)) {
    if (!open) {
      const isCode = token.type === "fence" || token.type === "code_block";
      open = { tokens: [], isCode, start: `${token.type} ${token.map[0]}` };
      open.key = `${open.start}\n${lines.slice(...token.map).join("\n")}`;
    }
    open.tokens.push(token);
    if (token.level === 0 && token.nesting <= 0) {
      blocks.push(open);
      open = null;
    }
  }
  // A reference that comes last changes what stands before it.
  const references = JSON.stringify(about.references ?? {});
  for (const block of blocks) block.key += references;
  return blocks;
}

function build(block) {
  if (block.isCode) return codeBlock(block.tokens[0]);
  const holder = document.createDocumentFragment();
  fill(holder, block.tokens);
  return { node: holder.firstChild ?? document.createComment("") };
}

function fill(parent, tokens) {
  const open = [parent];
  for (const token of tokens) {
    const top = open.at(-1);
    if (token.type === "inline") fill(top, token.children);
    else if (token.nesting < 0) open.pop();
    else if (token.nesting === 0) top.append(single(token));
    else if (token.hidden) open.push(top);   // the paragraphs of a tight list
    else {
      const made = token.type === "link_open" ? link(token.attrGet("href")) : element(TAGS[token.tag] ?? "span");
      if (token.type === "ordered_list_open" && token.attrGet("start")) made.start = Number(token.attrGet("start"));
      if (/right|center/.test(token.attrGet("style") ?? "")) made.className = token.attrGet("style").split(":")[1];
      if (made.localName === "table") {
        const scroll = element("div", "scroll");
        scroll.tabIndex = 0;
        scroll.append(made);
        top.append(scroll);
      } else top.append(made);
      open.push(made);
    }
  }
}

function single(token) {
  switch (token.type) {
    case "code_inline": return element("code", "", token.content);
    case "softbreak": case "hardbreak": return element("br");
    case "hr": return element("hr");
    case "fence": case "code_block": return codeBlock(token).node;
    case "image": {
      const made = link(token.attrGet("src"));
      made.append(`picture: ${token.content || token.attrGet("src")}`);
      return made;
    }
    default: return document.createTextNode(token.content);
  }
}

// Opens beside this page, which tells the other one nothing of itself.
function link(href) {
  let address = null;
  try { address = new URL(href); } catch { /* no address of its own: not a way out of this page */ }
  if (!address || !SCHEMES.has(address.protocol)) return element("span");
  const made = element("a");
  made.href = address.href;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}

function codeBlock(token) {
  const node = element("div", "code");
  const name = element("span");
  const code = element("code");
  const block = element("pre");
  block.tabIndex = 0;   // wide code is scrolled by keyboard too
  block.append(code);
  const head = element("p", "code-head");
  head.append(name, copyButton("plain", () => code.textContent, "Copy this code"));
  const grow = ({ info, content }) => {
    block.dataset.language = name.textContent = info.trim().split(/\s/)[0];
    code.textContent = content.replace(/\n$/, "");
  };
  grow(token);
  node.append(head, block);
  return { node, grow };
}

// Fences of three or more, closed by the same or by the end of what has come so far.
const FENCED = /^ {0,3}(`{3,}|~{3,})([^`\n]*)(?:\n|(?![^]))([^]*?)(?:^ {0,3}\1[`~]*[ \t]*(?:\n\n?|(?![^]))|(?![^]))/gm;

// What a person wrote, as it was written; only fenced code is a block of its own.
export function showAsWritten(body, text) {
  let end = 0;
  for (const { 0: whole, 2: info, 3: content, index } of text.matchAll(FENCED)) {
    body.append(text.slice(end, index).replace(/\n\n?$/, ""), codeBlock({ info, content }).node);
    end = index + whole.length;
  }
  body.append(text.slice(end));
}
