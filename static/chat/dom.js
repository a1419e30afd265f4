// Elements, made one by one: nothing that somebody wrote is ever read as HTML.

export const $ = (id) => document.getElementById(id);

export function element(name, css, text) {
  const made = document.createElement(name);
  if (css) made.className = css;
  if (text !== undefined) made.textContent = text;
  return made;
}

// A button; `label` is what a screen reader says where the word alone would not do.
export function button(text, css, act, label) {
  const made = element("button", css, text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

export function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// A button that copies what `text` gives and says so for a moment.
export function copyButton(css, text, label) {
  const made = button("Copy", css, async () => {
    made.textContent = (await copy(text())) ? "Copied" : "Not allowed";
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  }, label);
  // The word that changes is what is said, and the label would hide it.
  if (label) { made.removeAttribute("aria-label"); made.title = label; }
  return made;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers give the clipboard to secure pages only; the old way works on others.
    const field = element("textarea", "unseen");
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

export function seconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

export function plural(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}
