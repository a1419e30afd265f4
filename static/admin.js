// Sends a change of the live settings and shows what came of it; the page itself refreshes from the server.
"use strict";
(() => {
  const form = document.getElementById("tuning");
  const controls = document.getElementById("controls");
  const outcome = document.getElementById("outcome");
  const inputs = [...form.querySelectorAll("[data-effective]")];
  const ranges = new Map([...form.querySelectorAll("input[type=range]")].map((range) => [range.dataset.for, range]));
  let seen = generation();
  controls.disabled = false;
  enableReverts();

  function generation() {
    return document.getElementById("live").dataset.generation;
  }

  function enableReverts() {
    for (const button of document.querySelectorAll(".revert")) button.disabled = false;
  }

  function set(input, value) {
    input.value = value;
    const range = ranges.get(input.name);
    if (range) range.value = value;
  }

  // Takes over what holds on the server, but leaves alone what somebody has begun to change here.
  function follow(force) {
    for (const input of inputs) {
      const value = document.querySelector(`#live [data-value="${input.name}"]`).dataset.raw;
      if (force || input.value === input.dataset.effective) set(input, value);
      input.dataset.effective = value;
    }
  }

  function showErrors(errors) {
    for (const place of form.querySelectorAll(".error")) {
      const name = place.id.slice(0, -"-error".length);
      place.textContent = errors[name] || "";
      const field = form.elements[name];
      if (field) field.toggleAttribute("aria-invalid", name in errors);
    }
    const first = Object.keys(errors).find((name) => form.elements[name]);
    if (first) {
      form.elements[first].closest("details")?.setAttribute("open", "");
      form.elements[first].focus();
    }
  }

  async function send(body) {
    outcome.className = "outcome";
    outcome.textContent = "Waiting for the next step …";
    showErrors({});
    let answer, result;
    try {
      answer = await fetch("/admin/config", {
        method: "PATCH", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
      });
      result = await answer.json().catch(() => ({}));
    } catch {
      return fail("The server cannot be reached; nothing is known to have changed.");
    }
    if (answer.status === 401) return fail("Sign in first: this page needs the admin token. Reload it.");
    if (!answer.ok) {
      const error = result.error || {};
      const message = error.message || `The server answered ${answer.status}.`;
      if (error.param && document.getElementById(`${error.param}-error`)) {
        showErrors({ [error.param]: message });
        return fail("Nothing was changed.");
      }
      return fail(message);
    }
    const { max_num_seqs: over, policy: running } = result.pending_drain || {};
    outcome.classList.add("good");
    outcome.textContent = `Generation ${result.generation} holds.` + (over ? ` ${over} above the limit will finish first.` : "")
      + (running ? ` The change of policy waits for the ${running} who run.` : "");
    for (const input of inputs) {
      input.dataset.effective = result.effective[input.name];
      set(input, result.effective[input.name]);
    }
    document.getElementById("reason").value = "";
    htmx.trigger(document.body, "config-changed");
  }

  function fail(message) {
    outcome.classList.add("bad");
    outcome.textContent = message;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const body = {};
    const errors = {};
    for (const input of inputs) {
      if (input.value === input.dataset.effective) continue;
      if (input.type !== "number") body[input.name] = input.value;
      // What is no number at all cannot be sent as one; ranges are the server's to judge.
      else if (input.value.trim() === "" || Number.isNaN(Number(input.value))) errors[input.name] = `A whole number from ${input.min} to ${input.max}.`;
      else body[input.name] = Number(input.value);
    }
    if (Object.keys(errors).length) return showErrors(errors);
    if (!Object.keys(body).length) { showErrors({}); return fail("These values hold already."); }
    const reason = form.elements.reason.value.trim();
    if (reason) body.reason = reason;
    if (form.elements.ttl.value) body.ttl_seconds = Number(form.elements.ttl.value);
    send(body);
  });
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    follow(true);
    showErrors({});
    outcome.textContent = "";
  });
  form.addEventListener("input", (event) => {
    const { target } = event;
    if (target.type === "range") form.elements[target.dataset.for].value = target.value;
    else if (ranges.has(target.name)) ranges.get(target.name).value = target.value;
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".revert");
    if (!button) return;
    send({ ...JSON.parse(button.dataset.values), reason: `back to generation ${button.dataset.generation}` });
  });
  // The history is left alone while nothing changed, so that a button keeps its focus.
  document.body.addEventListener("htmx:oobBeforeSwap", (event) => {
    if (event.detail.target.id !== "history") return;
    const fresh = event.detail.fragment.querySelector("#history");
    const known = document.getElementById("history").dataset.newest;
    if (fresh && fresh.dataset.newest === known) event.detail.shouldSwap = false;
  });
  document.body.addEventListener("htmx:afterSettle", () => {
    enableReverts();
    if (generation() !== seen) { seen = generation(); follow(false); }
  });
})();
