// The list of conversations: open, rename, keep as a file, delete and take that back.
import { $, button, element } from "./dom.js";
import { asMarkdown, findChat, listChats, removeChat, saveChat, titleOf } from "./store.js";

const UNDO_MS = 10_000;

export class ChatList {
  // `open(chat)` shows one; `left(id)` is told when one was deleted, `renamed(id, title)` when it has another title.
  constructor({ open, left, renamed }) {
    this.open = open;
    this.left = left;
    this.renamed = renamed;
    this.current = null;
    this.timer = null;
  }

  draw(current = this.current) {
    this.current = current;
    const chats = listChats();
    $("no-chats").hidden = chats.length > 0;
    $("chats").replaceChildren(...chats.map((chat) => this.entry(chat)));
  }

  entry(chat) {
    const item = element("li", "chat-entry");
    const title = titleOf(chat);
    const opener = button(title, "plain title", () => this.open(findChat(chat.id) ?? chat));
    opener.title = title;
    if (chat.id === this.current) opener.setAttribute("aria-current", "true");
    const menu = element("details", "menu");
    const handle = element("summary", "", "⋯");
    handle.setAttribute("aria-label", `What to do with: ${title}`);
    const choices = element("div", "choices");
    choices.append(
      button("Rename", "plain", () => this.rename(item, chat)),
      button("Export", "plain", () => { menu.open = false; save(chat); }),
      button("Delete", "plain", () => this.remove(chat)),
    );
    menu.append(handle, choices);
    menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !menu.open) return;
      event.stopPropagation();
      menu.open = false;
      handle.focus();
    });
    menu.addEventListener("focusout", (event) => { if (!menu.contains(event.relatedTarget)) menu.open = false; });
    item.append(opener, menu);
    return item;
  }

  rename(item, chat) {
    const form = element("form", "rename");
    const field = element("input");
    field.type = "text";
    field.value = titleOf(chat);
    field.maxLength = 120;
    field.setAttribute("aria-label", "Title of this conversation");
    form.append(field);
    const done = (keep) => {
      if (!form.isConnected) return;
      const title = field.value.trim();
      const fresh = findChat(chat.id);
      if (keep && title && fresh) {
        saveChat({ ...fresh, title });
        this.renamed(chat.id, title);
      }
      this.draw();
      [...$("chats").querySelectorAll(".title")].find((one) => one.title === (keep && title ? title : titleOf(chat)))?.focus();
    };
    form.addEventListener("submit", (event) => { event.preventDefault(); done(true); });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); done(false); }
    });
    field.addEventListener("blur", () => done(true));
    item.replaceChildren(form);
    field.select();
  }

  remove(chat) {
    const kept = findChat(chat.id) ?? chat;
    removeChat(chat.id);
    this.left(chat.id);
    this.draw();
    const back = button("Put it back", "plain", () => {
      saveChat(kept);
      $("list-note").replaceChildren();
      this.draw();
    });
    $("list-note").replaceChildren(`“${titleOf(kept)}” is deleted. `, back);
    back.focus();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => $("list-note").replaceChildren(), UNDO_MS);
  }
}

function save(chat) {
  const kept = findChat(chat.id) ?? chat;
  const address = URL.createObjectURL(new Blob([asMarkdown(kept)], { type: "text/markdown" }));
  const anchor = element("a");
  anchor.href = address;
  anchor.download = `${titleOf(kept).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 50) || "conversation"}.md`;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
