// Sliders, what a change would do while it is typed, and what changes elsewhere. Without it the page works as well.
"use strict";
(() => {
  const form = document.getElementById("tuning");
  const preview = document.getElementById("preview");
  const ranges = new Map([...form.querySelectorAll("input[type=range]")].map((range) => [range.dataset.for, range]));
  const fields = [...form.querySelectorAll("input[name^='was.']")].map((was) => ({ was, input: form.elements[was.name.slice(4)] }));
  let timer = 0;
  let asked = 0;
  for (const range of ranges.values()) range.hidden = false;

  const touched = () => fields.filter(({ was, input }) => input.value !== was.value);

  function set(input, value) {
    input.value = value;
    if (ranges.has(input.name)) ranges.get(input.name).value = value;
  }

  // Takes over what holds on the server. A form that somebody has begun to change keeps the generation that it was built
  // on, and is told on sending what changed meanwhile.
  function follow(fresh) {
    const begun = touched().length > 0;
    for (const { was, input } of fields) {
      const now = fresh.querySelector(`#live [data-value="${input.name}"]`).dataset.raw;
      if (input.value !== was.value || now === was.value) continue;
      set(input, now);
      was.value = now;
    }
    if (!begun) form.elements.if_generation.value = fresh.getElementById("live").dataset.generation;
  }

  function refresh(fresh) {
    for (const part of fresh.querySelectorAll("[data-follow]")) {
      const place = document.getElementById(part.id);
      if (!place) continue;
      // What somebody has opened or closed stays so, and what has not changed stays where it is.
      const known = new Map([...place.querySelectorAll("details")].map((details) => [details.id, details.open]));
      for (const details of part.querySelectorAll("details")) if (known.has(details.id)) details.open = known.get(details.id);
      if (place.isEqualNode(part)) continue;
      const focus = place.contains(document.activeElement) ? document.activeElement.id : "";
      Object.assign(place.dataset, part.dataset);
      place.replaceChildren(...part.childNodes);
      if (focus) document.getElementById(focus)?.focus();
    }
  }

  const parse = (html) => new DOMParser().parseFromString(html, "text/html");

  async function ask() {
    const number = ++asked;
    if (!touched().length) return preview.replaceChildren();
    const body = new URLSearchParams(new FormData(form));
    body.set("action", "preview");
    let answer;
    try {
      answer = await fetch("/admin", { method: "POST", body });
    } catch {
      return; // the next change asks again
    }
    const fresh = parse(await answer.text()).getElementById("preview");
    // An answer that another question has overtaken is none.
    if (fresh && number === asked) preview.replaceChildren(...fresh.childNodes);
  }

  form.addEventListener("input", ({ target }) => {
    if (target.type === "range") form.elements[target.dataset.for].value = target.value;
    else if (ranges.has(target.name)) ranges.get(target.name).value = target.value;
    clearTimeout(timer);
    timer = setTimeout(ask, 300);
  });
  document.body.addEventListener("htmx:afterRequest", ({ detail }) => {
    if (!detail.successful || detail.elt.id !== "state") return;
    const fresh = parse(detail.xhr.responseText);
    if (!fresh.getElementById("live")) return;
    follow(fresh);
    refresh(fresh);
  });
  const wrong = form.querySelector("[aria-invalid]");
  if (wrong) wrong.focus();
})();
